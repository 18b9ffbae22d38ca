"""Put what was read of pretrained models into words, a table, charts and claims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwise.auditing.balances import Compared
    from headwise.results.claim_record import JudgedClaim
    from headwise.results.intervals import Interval

PAPER = "Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819, on LLaMA-2 7B"
# points of a chart at most, of a pretrained and of a random model
POINTS = (250, 100)


@dataclass(frozen=True)
class Row:
    """Hold one comparison of norms in one model, and the same in the draws of both references."""

    model: str
    own: Compared
    random: tuple[Compared, ...]
    rotated: tuple[Compared, ...]

    @property
    def name(self) -> str:
        """Name the product and the model."""
        return f"{_product(self)} of {self.model}"

    @property
    def of_norms(self) -> bool:
        """Return whether Frobenius and nuclear norms are compared, not rows."""
        return self.own["second"].startswith("nuclear")

    def away(self, reference: str) -> Interval:
        """Return the mean difference in the draws of a reference, with its interval over them."""
        from headwise.results.intervals import interval

        return interval([one["deviation"] for one in getattr(self, reference)])

    def nearer(self, reference: str) -> bool | None:
        """Return whether the model's norms are nearer to equal than a reference's; None where the interval holds
        them."""
        found = self.away(reference)
        if found.low is None or found.high is None or found.low <= self.own["deviation"] <= found.high:
            return None
        return self.own["deviation"] < found.low


def paragraphs(rows: list[Row], draws: int) -> list[str]:
    """Return the findings in words, every figure from the data; the first paragraph is the answer."""
    from headwise.auditing.balances import NEARLY

    identical = [row for row in rows if row.own["verdict"] == "nearly identical"]
    counts = {
        (reference, verdict): sum(row.nearer(reference) is verdict for row in rows)
        for reference in ("random", "rotated")
        for verdict in (True, False)
    }
    words = "; ".join(f"{row.own['first']} against {row.own['second']}, {row.name}" for row in identical)
    return [
        f"{len(identical)} of {len(rows)} comparisons (two products and two kinds of norms in each model) differ by "
        f"at most {NEARLY:.0%} of "
        f"the mean, which is called nearly identical here{f': {words}' if words else ''}.",
        f"Against random weights of the same shapes ({draws} draws) the norms are nearer to equal in "
        f"{counts['random', True]} comparisons and "
        f"farther from it in {counts['random', False]}. Random weights of one size are nearly balanced by themselves: "
        "their rows have about the "
        "same norm and, in a wide layer, nearly right angles. That norms are nearly identical is therefore no "
        "evidence of weight decay "
        "by itself; what random weights lack is the correlation.",
        f"Against the model's own weights with one factor rotated ({draws} draws), which keeps all norms and spectra "
        "of the factors, they are "
        f"nearer to equal in {counts['rotated', True]} comparisons and farther from it in {counts['rotated', False]}; "
        "where they are nearer, "
        "training has aligned the factors.",
        "Rotary positions stand between queries and keys of stories260K, where only the traces of rotary pairs would "
        "balance, and its heads "
        "share keys and values in pairs; MiniLM was distilled and fine-tuned, with what decay is not known here.",
    ]


def table(rows: list[Row]) -> dict[str, Any]:
    """Return every comparison beside both references."""
    made = []
    for row in rows:
        chance = sum(one["correlation"] for one in row.random) / len(row.random)
        made.append(
            [
                row.model,
                _product(row),
                f"{row.own['first']} against {row.own['second']}",
                len(row.own["pairs"]),
                f"{row.own['deviation']:.1%}",
                _told(row.away("random")),
                _told(row.away("rotated")),
                f"{row.own['correlation']:.2f} (random {chance:.2f})",
                row.own["verdict"],
            ]
        )
    columns = [
        "model",
        "product",
        "what is compared",
        "pairs",
        "mean difference",
        "random weights [95 %]",
        "rotated [95 %]",
    ]
    return {
        "title": "Norms that weight decay would make equal",
        "columns": [*columns, "correlation", "verdict"],
        "rows": made,
    }


def _told(found: Interval) -> str:
    span = "" if found.low is None or found.high is None else f" [{found.low:.1%}, {found.high:.1%}]"
    return f"{found.mean:.1%}{span}"


def _product(row: Row) -> str:
    from headwise.auditing.weights import PRODUCTS

    return PRODUCTS[row.own["product"]]


def chart(row: Row) -> dict[str, Any]:
    """Return pairs of norms, of the model and of one draw of random weights, each as a share of their mean."""
    first, second = (f"{row.own[name]} / mean" for name in ("first", "second"))  # type: ignore[literal-required]
    data = []
    for name, one, most in ((row.model, row.own, POINTS[0]), ("random weights", row.random[0], POINTS[1])):
        pairs = one["pairs"]
        mean = sum(x + y for x, y in pairs) / (2 * len(pairs))
        for x, y in pairs[:: -(-len(pairs) // most)]:
            data.append({first: float(f"{x / mean:.3g}"), second: float(f"{y / mean:.3g}"), "weights": name})
    return {
        "title": f"{row.model}, {_product(row)}: {row.own['first']} against {row.own['second']}",
        "x": first,
        "y": second,
        "series": "weights",
        "data": data,
        "points": True,
        "caption": f"Mean difference {row.own['deviation']:.1%}, of random weights {row.random[0]['deviation']:.1%}.",
    }


def claims(rows: list[Row]) -> list[JudgedClaim]:
    """Return the paper's claims, and whether both references leave something of them."""
    norms, others = [row for row in rows if row.of_norms], [row for row in rows if not row.of_norms]
    same = "The Frobenius and nuclear norms of heads are nearer to equal than"
    return [
        _identical("The Frobenius and nuclear norms of every head are nearly identical.", norms),
        _identical("The norms of rows of W_Q and W_K, and of W_V and P, are nearly identical.", others),
        _nearer(f"{same} those of random weights of the same shapes.", norms, "random"),
        _nearer(f"{same} those of the same weights with one factor rotated.", norms, "rotated"),
    ]


def _identical(text: str, rows: list[Row]) -> JudgedClaim:
    from headwise.auditing.balances import NEARLY
    from headwise.results.claim_record import JudgedClaim

    wrong = [row.name for row in rows if row.own["verdict"] != "nearly identical"]
    ours = "; ".join(f"{row.name}: {row.own['deviation']:.1%} apart" for row in rows)
    why = f"more than {NEARLY:.0%} apart: {'; '.join(wrong)}" if wrong else ""
    return JudgedClaim(text=text, source=PAPER, ours=ours, verdict="contrary" if wrong else "as published", why=why)


def _nearer(text: str, rows: list[Row], reference: str) -> JudgedClaim:
    from headwise.results.claim_record import JudgedClaim, Verdict

    found = [row.nearer(reference) for row in rows]
    verdict: Verdict = "as published" if all(found) else "contrary" if False in found else "undecided"
    ours = "; ".join(f"{row.name}: {row.own['deviation']:.1%} against {_told(row.away(reference))}" for row in rows)
    wrong = "; ".join(row.name for row, nearer in zip(rows, found, strict=True) if not nearer)
    return JudgedClaim(text=text, source="", ours=ours, verdict=verdict, why=f"not so in {wrong}" if wrong else "")
