"""Write docs/wide_league.md, the table of the first edition of the league, from what docs/league keeps of it.

python docs/which_method.py                         write the page
python docs/which_method.py --check                 check whether it is current

What ran it is gone; the definitions of its entries and worlds, its tables and the archives of its runs are kept.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise_verdict.files.errors import count
from headwise_verdict.pages.formats import MINUS, Unit, unit_named

DOCS = Path(__file__).resolve().parent
KEPT, PAGE = DOCS / "league", DOCS / "wide_league.md"
TABLES = ("league", "runs", "trials", "aggregate", "left_out", "without", "fresh", "fresh_cells", "fresh_runs", "pairs")
# smallest share of errors of a world's plain model; with fewer errors, no entry can be shown to help
NO_ROOM = 0.01
# number of entries whose gains are shown without each world
HIGHEST = 5
# upper end of a rank correlation below which an order hardly predicts another
HARDLY = 0.3
WORDS = {"better": "better", "worse": "worse", "equivalent": "no effect", "no evidence": "not shown", "missing": ""}


# the runs are of November 2026
DATED = (
    "**The first edition, November 2026; nothing here is advice.** Its searches had six trials, and each symptom one "
    "world; two of its strongest results did not hold in other worlds, *Memorised words* has no room for a gain, and "
    "*Speech* is too little training. [What replaced it, and why](which_method.md)."
)


@dataclass(frozen=True)
class Row:
    """One entry in one world."""

    cells: dict[str, str]

    def __getitem__(self, name: str) -> str:
        return self.cells[name]

    def number(self, name: str) -> float | None:
        """Return a figure, or None if it is missing."""
        return float(self.cells[name]) if self.cells[name] else None


@dataclass(frozen=True)
class League:
    """The kept tables, and of each world its definition and what was recorded of its runs, by name."""

    tables: dict[str, list[Row]]
    # title, symptom and reason of each world
    worlds: dict[str, dict[str, Any]]
    records: dict[str, Mapping[str, Any]]

    @property
    def run(self) -> list[str]:
        """Return the worlds that were run, in the order of their kept table."""
        return list(dict.fromkeys(row["world"] for row in self.tables["league"]))

    def of(self, world: str) -> list[Row]:
        """Return the entries of a world without the plain model."""
        return [row for row in self.tables["league"] if row["world"] == world and row["kind"] != "plain"]

    def unit(self, world: str) -> tuple[Unit, bool, str]:
        """Return the unit of the primary outcome, whether higher is better, and its label."""
        name = next(row["outcome"] for row in self.of(world) if row["outcome"]).rpartition("/")[2]
        metric = next(one for one in self.records[world]["study"]["metrics"] if one["name"] == name)
        return unit_named(metric["unit"]), metric["higher_is_better"] is not False, metric["label"]

    def better(self, world: str, kinds: tuple[str, ...] = ("method",)) -> list[Row]:
        """Return the entries that are better than the plain model in a world, by falling gain."""
        rows = [row for row in self.of(world) if row["kind"] in kinds and row["verdict"] == "better"]
        return sorted(rows, key=lambda row: -(row.number("gain") or 0.0))


def read(kept: Path = KEPT) -> League:
    """Return the kept league."""
    tables = {}
    for name in TABLES:
        path = kept / f"{name}.csv"
        rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines()) if path.exists() else []
        tables[name] = [Row(row) for row in rows]
    worlds = {
        path.stem.replace("_", "-"): tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted((kept / "worlds").glob("*.toml"))
    }
    records = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(kept.glob("*.json"))}
    return League(tables, worlds, records)


def page(league: League) -> str:
    """Return the page."""
    parts = [
        "# The wide league: a table without advice",
        DATED,
        _lead(league),
        _no_winner(league),
        "## All entries in all worlds",
        "<details>\n<summary>The picture: every entry in every world</summary>",
        "![Gain of every entry in every world; a glyph in each cell gives the verdict](league/gains.svg)",
        "▲ better, ▼ worse, = no effect within the world's margin, · not shown, – refused by the world's model, × "
        "failed; colour: the gain in standard deviations of the plain model between seeds. Entries that miss a world "
        "come last. How it is measured: [the league](league.md); every figure: "
        "[league.csv](league/league.csv), [runs.csv](league/runs.csv), [trials.csv](league/trials.csv).",
        "</details>",
        "## Over all worlds",
        *_folded(
            "Every entry over all worlds, and its cost",
            [
                *_aggregate(league),
                "![Gain against the time of a step](league/cost.svg)",
                "![Share of runs whose gain exceeds a level, for the eight highest entries](league/profiles.svg)",
            ],
        ),
        "## World by world",
        *[part for world in league.run for part in _world(league, world)],
        "## Again on other seeds, and in pairs",
        *_fresh(league),
        *_pairs(league),
        "## What these figures cannot show",
        *_limits(league),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _folded(title: str, parts: list[str]) -> list[str]:
    """Return the parts behind a line that opens them; headings stay outside, as sections may not cross it."""
    parts = [part for part in parts if part]
    return [f"<details>\n<summary>{title}</summary>", *parts, "</details>"] if parts else []


def _lead(league: League) -> str:
    sizes = sorted({len(league.of(world)) for world in league.run})
    entries = " or ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    runs = len(league.tables["runs"])
    trials = len(league.tables["trials"])
    return (
        "The figures come from small models, each chosen because it should fail in one way: the *worlds*. "
        f"In each, {entries} entries (methods, and controls such as dropout and weight decay) were tuned with the "
        f"same number of trials: {trials:,} trials on validation data and {runs:,} final runs on test data. A gain "
        "is shown with its interval, the time of a step, and the worlds in which the same entry was worse than the "
        "plain model."
    )


def _no_winner(league: League) -> str:
    """Return the sentence that no order of entries holds over worlds; "" if one may, or with fewer than 3 worlds."""
    row = next((one for one in league.tables["left_out"] if one["left_out"] == "mean"), None)
    high = None if row is None else row.number("rank_correlation_high")
    if row is None or high is None or high > HARDLY or len(league.run) < 3:
        return ""
    return (
        "**No method is best everywhere.** The order of entries in all other worlds does not predict their order in "
        f"the one left out (rank correlation {_ends(row, 'rank_correlation')}, mean over worlds; the interval covers "
        "seeds, not another choice of worlds)."
    )


def _world(league: League, world: str) -> list[str]:
    unit, higher, label = league.unit(world)
    definition = league.worlds[world]
    lines = [
        f"| entry | {label}, against plain [95 %] | verdict | against the best control | time of a step | chosen |",
        "|---|---|---|---|---|---|",
    ]
    rows = sorted(league.of(world), key=lambda row: -(row.number("gain") or -1e9))
    lines += [f"| {' | '.join(map(_clean, (_named(row), *result(row, unit))))} |" for row in rows]
    direction = "higher is better" if higher else "lower is better"
    return [
        f"### {definition['title']}",
        f"Chosen for {definition['symptom']}{definition.get('found', '')}. {definition['reason']} "
        f"Outcome: {label} ({direction}). " + _of_plain(league, world),
        *_folded(
            f"All entries in {definition['title']}",
            [
                f"![Differences of all entries in {definition['title']}](league/forest-{world}.svg)",
                "\n".join(lines),
                *_others(league, world),
            ],
        ),
    ]


def _others(league: League, world: str) -> list[str]:
    """Return the table of further outcomes of the plain model and the entries that are better: means over seeds."""
    better = [row["entry"] for row in league.better(world, ("method", "control"))]
    plain = {row["entry"] for row in league.tables["league"] if row["kind"] == "plain"}
    runs = [row for row in league.tables["runs"] if row["world"] == world]
    primary = runs[0]["outcome"].rpartition("/")[2]
    columns = {
        "figure": f"{league.unit(world)[2]}",
        f"int8/{primary}": "the same with 8-bit weights",
        "test/loss": "test loss",
        "test/calibration": "calibration error",
    }
    columns = {name: words for name, words in columns.items() if name in runs[0].cells and runs[0][name]}
    if not better:
        return []
    lines = [f"| entry | {' | '.join(columns.values())} |", f"|---|{'---:|' * len(columns)}"]
    for name in (*sorted(plain), *better):
        own = [row for row in runs if row["entry"] == name]
        means = [sum(row.number(column) or 0.0 for row in own) / len(own) for column in columns]
        lines.append(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return ["The entries that are better, in further outcomes (means over the league's seeds):", "\n".join(lines)]


def _of_plain(league: League, world: str) -> str:
    """Return the text on the plain model's figures after its own search, and on how little room they leave if so."""
    unit, _, _ = league.unit(world)
    figures = _plain(league, world)
    mean, low, high = (unit.number(value) for value in (sum(figures) / len(figures), min(figures), max(figures)))
    text = (
        f"The plain model, searched like the others, reaches {mean} {unit.name}".rstrip()
        + f" ({low} to {high} over {count(len(figures), 'seed')})."
    )
    if _room(league, world) is not None:
        text += (
            f" Here {_no_room(league, world)}: this world can hardly show what helps, only which entries keep a model "
            "from learning the task."
        )
    return text


def _no_room(league: League, world: str) -> str:
    """Return the words on a plain model that makes no errors, on most of its seeds or on all."""
    figures = _plain(league, world)
    failed = sum(1 - figure >= NO_ROOM for figure in figures)
    if not failed:
        return "the plain model leaves no room"
    return f"the plain model leaves no room on {len(figures) - failed} of {len(figures)} seeds, and fails on {failed}"


def _plain(league: League, world: str) -> list[float]:
    """Return the figures of the plain model's final runs, those on fresh seeds too."""
    plain = {row["entry"] for row in league.tables["league"] if row["kind"] == "plain"}
    rows = [*league.tables["runs"], *league.tables["fresh_runs"]]
    figures = [row.number("figure") for row in rows if row["world"] == world and row["entry"] in plain]
    return [figure for figure in figures if figure is not None]


def _room(league: League, world: str) -> float | None:
    """Return the plain model's share of errors if it is too small on most seeds for a gain to be shown, else None."""
    unit, higher, _ = league.unit(world)
    figures = sorted(_plain(league, world))
    left = 1 - figures[len(figures) // 2]
    return left if higher and unit.factor == 100 and left < NO_ROOM else None


def first_reason(why: str) -> str:
    """Return the reason of the first layer, if `why` gives one for every layer of a model; else `why` itself."""
    reasons = re.findall(r"not applicable: (.+?)(?= \S+: not applicable: |$)", why)
    return reasons[0] if reasons else why


def result(row: Row, unit: Unit) -> list[str]:
    """Return the cells of an entry in a world: difference, verdict, verdict against the best control, time of a step,
    and the choice of its search."""
    if not row["difference"]:
        return ["", f"{row['status']}: {first_reason(row['why'])}", "", "", ""]
    cost = row.number("cost")
    return [
        difference_of(row, unit),
        WORDS.get(row["verdict"], row["verdict"]),
        WORDS.get(row["control_verdict"], row["control_verdict"]),
        "" if cost is None else f"{cost:.2f} ×",
        f"`{row['chosen']}`, rate {float(row['learning_rate']):g}",
    ]


def _named(row: Row) -> str:
    return row["entry"] + (" (control)" if row["kind"] == "control" else "")


def _aggregate(league: League) -> list[str]:
    lines = [
        "| entry | worlds | better in | worse in | gain in spreads [95 %] | share of pairs better than plain [95 %] | "
        "mean rank | step |",
        "|---|---:|---:|---:|---|---|---|---:|",
    ]
    for row in league.tables["aggregate"]:
        kind = "" if row["kind"] == "method" else f" ({row['kind']})"
        cost = row.number("cost")
        figures = (_ends(row, part) for part in ("gain", "improvement", "rank"))
        cells = [f"{row['entry']}{kind}", row["worlds"], row["better_in"], row["worse_in"], *figures]
        lines.append(f"| {' | '.join((*cells, '' if cost is None else f'{cost:.2f} ×'))} |")
    words = (
        "Gain: interquartile mean over all runs of all worlds, in standard deviations of the plain model between "
        "seeds, fresh ones included. It leaves out the lowest and the highest quarter of the runs, so an entry can "
        "fail in one whole world and its gain does not show it: look at *worse in*. Intervals: 1,000 resamples of the "
        "seeds within each world, not corrected over entries; they do not extend to other worlds. Time: of a step, "
        "measured alternately with the plain model if available, else the shortest of the seeds; mean over worlds."
    )
    parts = [words, "\n".join(lines)]
    left_out = league.tables["left_out"]
    if left_out:
        correlations = ", ".join(
            f"{_title(league, row['left_out'])} {_ends(row, 'rank_correlation')}" for row in left_out
        )
        parts.append(
            f"How well the other worlds predict the order of entries in the one left out (Spearman): {correlations}."
        )
    if league.tables["without"]:
        parts += [
            "The gain of the highest entries without each world: where the order changes, it depends on that world.",
            _without(league),
        ]
    return parts


def _without(league: League) -> str:
    """Return the table of the highest entries' gains without each world."""
    worlds = [name for name in league.run if f"without {name}" in league.tables["without"][0].cells]
    by_name = {row["entry"]: row for row in league.tables["without"]}
    lines = [f"| entry | all worlds | {' | '.join(f'without {_title(league, name)}' for name in worlds)} |"]
    lines += [f"|---|---:|{'---:|' * len(worlds)}"]
    for row in league.tables["aggregate"][:HIGHEST]:
        gains = [row.number("gain"), *(by_name[row["entry"]].number(f"without {name}") for name in worlds)]
        lines.append(f"| {row['entry']} | {' | '.join(_estimate(gain) for gain in gains)} |")
    return "\n".join(lines)


def _entries(league: League) -> int:
    """Return the number of methods and controls of the league."""
    return len({row["entry"] for row in league.tables["league"] if row["kind"] != "plain"})


def _fresh(league: League) -> list[str]:
    rows = league.tables["fresh"]
    if not league.tables["fresh_cells"]:
        return []
    lines = ["| entry | gain in the league | gain on fresh seeds |", "|---|---|---|"] if rows else []
    lines += [f"| {row['entry']} | {_ends(row, 'gain')} | {_ends(row, 'fresh')} |" for row in rows]
    words = (
        f"The highest of {_entries(league)} is too high by chance. These ran again, with the settings that their "
        "searches had chosen, on seeds that no earlier run had."
    )
    return ["### On fresh seeds", words, *_folded("The figures", ["\n".join(lines), *_fresh_cells(league)])]


def _fresh_cells(league: League) -> list[str]:
    """Return the table of everything that ran on fresh seeds, world by world."""
    first = {(row["world"], row["entry"]): row for row in league.tables["league"]}
    runs = sorted({int(row["runs"]) for row in league.tables["fresh_cells"] if row["kind"] != "plain"})
    seeds = " to ".join(map(str, dict.fromkeys((runs[0], runs[-1]))))
    lines = ["| world | entry | in the league | on fresh seeds | verdict there |", "|---|---|---|---|---|"]
    for row in league.tables["fresh_cells"]:
        if row["kind"] == "plain" or not row["difference"]:
            continue
        unit, _, _ = league.unit(row["world"])
        before = first[row["world"], row["entry"]]
        cells = (_title(league, row["world"]), _named(row), difference_of(before, unit), difference_of(row, unit))
        lines.append(f"| {' | '.join(cells)} | {WORDS.get(row['verdict'], row['verdict'])} |")
    words = (
        f"World by world, each against its plain model on the same {seeds} seeds. The intervals are corrected over the "
        f"entries that ran: up to {_entries(league)} in the league, fewer here."
    )
    return [words, "\n".join(lines)]


def _pairs(league: League) -> list[str]:
    rows = league.tables["pairs"]
    if not rows:
        return []
    worlds = list(dict.fromkeys(row["world"] for row in rows if row["world"] != "all"))
    over_all = [row for row in rows if row["world"] == "all"] or rows
    lines = [
        "| pair | worlds | gain | first alone | second alone | over the first | over the second | over their sum |"
    ]
    lines += ["|---|---:|---|---|---|---|---|---|"]
    parts = ("gain", "first", "second", "over_first", "over_second", "over_sum")
    lines += [
        f"| {' | '.join((row['pair'], row['worlds'], *(_ends(row, part) for part in parts)))} |" for row in over_all
    ]
    words = (
        f"Five of the highest methods in pairs, and each with the best control of a world if that helped, in "
        f"{', '.join(_title(league, name) for name in worlds)}. Each pair was searched like any entry, over both "
        "strengths. It is better than either part alone if it is above both by their intervals; gains add up if it is "
        f"not below their sum. {_added_up(rows)} Intervals are not corrected over pairs; each world: "
        "[pairs.csv](league/pairs.csv)."
    )
    return ["### Pairs", words, *_folded("The figures", ["\n".join(lines)])]


def _added_up(rows: list[Row]) -> str:
    """Return the sentences on how many pairs are better than both parts, below one of them, and below their sum."""
    sentences = []
    for words, some in (
        ("Over the worlds in which each ran", [row for row in rows if row["world"] == "all"]),
        ("World by world", [row for row in rows if row["world"] != "all"]),
    ):
        if some:
            above = sum(all((row.number(f"over_{part}_low") or 0) > 0 for part in ("first", "second")) for row in some)
            below = sum(any((row.number(f"over_{part}_high") or 0) < 0 for part in ("first", "second")) for row in some)
            less = sum((row.number("over_sum_high") or 0) < 0 for row in some)
            sentences.append(
                f"{words}, {above} of {len(some)} are better than both parts, {below} are worse than one of them, and "
                f"{less} are below the sum."
            )
    return " ".join(sentences)


def _limits(league: League) -> list[str]:
    studies = [one["study"] for one in league.records.values()]
    machines, versions = sorted({study["hardware"]["processor"] for study in studies}), studies[0]["versions"]
    return [
        "- These models have 2 to 12 layers and fewer than a million weights, and a run takes seconds. They do "
        "not cover failures that occur only in large models or after many steps.\n"
        f"- Each search has six trials of one run each. {_close_searches(league)} The best and second best trial of "
        "each are in [league.csv](league/league.csv).\n"
        "- Verdicts are corrected over all entries of a world; the aggregate is not.\n"
        f"- Times are of one thread on this processor; on a GPU they differ. {_untimed(league)}",
        f"Made with `headwise league --run --jobs 2 --data DATA` on {', '.join(machines)}; Python "
        f"{versions['python']}, torch {versions['torch']}; this page by `python docs/which_method.py`.",
    ]


def _close_searches(league: League) -> str:
    """Return the sentence on searches that another seed could have ended otherwise: best and second best trial within
    one standard deviation of the plain model."""
    close: dict[str, tuple[int, int]] = {}
    for world in league.run:
        figures = _plain(league, world)
        spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
        trials = [(row.number("validation"), row.number("second_validation")) for row in league.of(world)]
        gaps = [abs(best - second) for best, second in trials if best is not None and second is not None]
        close[world] = sum(gap < spread for gap in gaps), len(gaps)
    within, searches = (sum(pair[at] for pair in close.values()) for at in (0, 1))
    parts = ", ".join(f"{_title(league, name)} {one} of {every}" for name, (one, every) in close.items())
    return (
        f"In {within} of {searches} searches the best two trials are within one standard deviation of the plain model, "
        f"so that another seed could have chosen the other ({parts})."
    )


def _untimed(league: League) -> str:
    """Return the sentence on worlds whose steps were not timed next to the plain model's; all others were."""
    titles = ", ".join(_title(league, name) for name in league.run if not league.records[name]["step_times"])
    alternating = "They alternate with the plain model"
    return f"{alternating}, except in {titles}: the shortest of the seeds." if titles else f"{alternating}."


def difference_of(row: Row, unit: Unit) -> str:
    """Return the difference from the plain model with its interval as text."""
    mean = row.number("difference")
    ends = unit.interval(row.number("low"), row.number("high"), signed=True)
    return f"{unit.number(mean, signed=True)} {unit.difference} {ends}".replace("  ", " ").strip()


def _ends(row: Row, name: str) -> str:
    return _estimate(*(row.number(f"{name}{end}") for end in ("", "_low", "_high")))


def _estimate(value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return a figure with its interval as text; "" without a value."""
    if value is None:
        return ""
    figure, *ends = (f"{one:.2f}".replace("-", MINUS) for one in (value, low, high) if one is not None)
    return f"{figure} [{', '.join(ends)}]" if len(ends) == 2 else figure


def _title(league: League, world: str) -> str:
    return str(league.worlds[world]["title"]) if world in league.worlds else world


def _clean(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> int:
    """Write the page, or check it."""
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--check", action="store_true")
    options = reader.parse_args()
    league = read()
    wanted = page(league)
    if options.check:
        outdated = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != wanted
        if outdated:
            print(f"not current: {PAGE.name}; run python docs/which_method.py")
        return outdated
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
