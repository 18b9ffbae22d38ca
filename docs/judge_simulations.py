"""Write the simulations of `headwise judge` into docs/judge.md, between their marks.

python docs/judge_simulations.py            simulate (some seconds) and write the tables
python docs/judge_simulations.py --check    check whether they are current
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.stats import norm
from scipy.stats import t as student

from headwise_verdict.judging.bounded import SHARES
from headwise_verdict.judging.evidence import EFFECT
from headwise_verdict.judging.ledger import levels

PAGE = Path(__file__).resolve().parent / "judge.md"
MARK = re.compile(r"(<!-- simulated: (?P<name>\S+) -->\n)(?P<text>.*?)(\n<!-- /simulated -->)", re.DOTALL)
ALPHA = 0.05
# simulated decisions in a row, and looks in each: one after every pair
ROWS, LOOKS = 20_000, 60
EFFECTS, AFTER = (0.5, 1.0, 2.0, 3.0), (3, 4, 5, 6, 8, 10, 12)
# runs of a noise floor, and of a candidate that is judged by it
FLOORS, BY_FLOOR = (5, 10, 20), 12

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Looks:
    """Evidence and mean after every pair, one row for each decision."""

    log: Array
    mean: Array

    def answers(self, level: Array | float = ALPHA) -> NDArray[np.int64]:
        """Return 1 for accept, -1 for reject (a higher metric is better), 0 for neither: what excludes zero first."""
        hit = self.log >= -np.log(level)[..., None]
        first = np.take_along_axis(self.mean, hit.argmax(-1)[..., None], -1)[..., 0]
        return np.where(hit.any(-1), np.sign(first), 0).astype(np.int64)


def looks(differences: Array) -> Looks:
    """Return the logarithm of the e-value against no difference and the mean, after every pair."""
    n = np.arange(1, differences.shape[-1] + 1)
    mean = differences.cumsum(-1) / n
    squares = np.maximum((differences**2).cumsum(-1) - n * mean**2, 1e-300)
    wide, x = 1 + n * EFFECT**2, n * mean**2 / squares
    log = -0.5 * np.log(wide) + n / 2 * (np.log1p(x) - np.log1p(x / wide))
    log[..., 0] = 0.0
    return Looks(log, mean)


def bets(differences: Array, bound: float) -> Looks:
    """Return the same with `--bound`, and the side that has more evidence in place of the mean."""
    sides = []
    for sign in (1.0, -1.0):
        logs = [np.log1p(share * sign * differences / bound).cumsum(-1) for share in SHARES]
        sides.append(np.logaddexp.reduce(logs, 0) - math.log(2 * len(SHARES)))
    return Looks(np.maximum(*sides), sides[0] - sides[1])


def by_floor(baseline: Array, candidate: Array) -> Looks:
    """Return the same for runs of a candidate by the noise floor of a baseline's runs."""
    runs, n = baseline.shape[-1], np.arange(1, candidate.shape[-1] + 1)
    mean = candidate.cumsum(-1) / n
    own = np.maximum((candidate**2).cumsum(-1) - n * mean**2, 0)
    change = mean - baseline.mean(-1, keepdims=True)
    size, nu = n * runs / (n + runs), n + runs - 2
    wide, x = 1 + size * EFFECT**2, size * change**2 / (own + runs * baseline.var(-1, keepdims=True))
    return Looks(-0.5 * np.log(wide) + (nu + 1) / 2 * (np.log1p(x) - np.log1p(x / wide)), change)


def autocorrelated(rng: Generator, rho: float, rows: int, count: int) -> Array:
    """Return stationary AR(1) noise of spread 1."""
    noise = rng.normal(size=(rows, count))
    for at in range(1, count):
        noise[:, at] = rho * noise[:, at - 1] + math.sqrt(1 - rho**2) * noise[:, at]
    return noise


def _of_runs(draw: Callable[[Generator, tuple[int, int]], Array]) -> Callable[[Generator], Array]:
    """Return differences of two independent runs."""
    return lambda rng: draw(rng, (ROWS, LOOKS)) - draw(rng, (ROWS, LOOKS))


def _interleaved(rho: float) -> Callable[[Generator], Array]:
    """Return differences of neighbours: candidate, baseline, candidate, baseline, ..."""

    def differences(rng: Generator) -> Array:
        runs = autocorrelated(rng, rho, ROWS, 2 * LOOKS)
        return runs[:, 0::2] - runs[:, 1::2]

    return differences


def _signs(rng: Generator) -> Array:
    return rng.choice([-1.0, 1.0], size=(ROWS, LOOKS))


# noise of one run
RUNS: dict[str, Callable[[Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Student t, 3 degrees of freedom": lambda rng, shape: rng.standard_t(3, size=shape),
    "log-normal": lambda rng, shape: np.exp(rng.normal(size=shape)),
    "a run in ten fails": lambda rng, shape: (rng.random(shape) < 0.1) + 1e-3 * rng.normal(size=shape),
}
WORLDS: dict[str, Callable[[Generator], Array]] = {
    **{name: _of_runs(draw) for name, draw in RUNS.items()},
    "AR(1) over runs, ρ = 0.3, pairs interleaved": _interleaved(0.3),
    "AR(1) over runs, ρ = 0.6, pairs interleaved": _interleaved(0.6),
    "**AR(1) differences, ρ = 0.3**": lambda rng: autocorrelated(rng, 0.3, ROWS, LOOKS),
    "**AR(1) differences, ρ = 0.6**": lambda rng: autocorrelated(rng, 0.6, ROWS, LOOKS),
    "the same, ρ = 0.3, order within pairs at random": lambda rng: _signs(rng) * autocorrelated(rng, 0.3, ROWS, LOOKS),
    "the same, ρ = 0.6, order within pairs at random": lambda rng: _signs(rng) * autocorrelated(rng, 0.6, ROWS, LOOKS),
    # the means are the same, and the rare bad figures of the candidate are still to come
    "**the candidate alone is log-normal, σ = 0.7**": lambda rng: (
        math.exp(0.245) - np.exp(0.7 * rng.normal(size=(ROWS, LOOKS)))
    ),
    "**the candidate alone fails, a run in ten**": lambda rng: (
        0.1 - (rng.random((ROWS, LOOKS)) < 0.1) + 1e-3 * rng.normal(size=(ROWS, LOOKS))
    ),
}


def _capped(rng: Generator, sigma: float = 0.7, cap: float = 10.0) -> Array:
    """Return differences of mean zero whose candidate alone is log-normal, up to a cap."""
    mean = math.exp(sigma**2 / 2) * norm.cdf(math.log(cap) / sigma - sigma) + cap * norm.sf(math.log(cap) / sigma)
    return np.asarray(mean - np.minimum(np.exp(sigma * rng.normal(size=(ROWS, LOOKS))), cap))


# differences, and their bound
BOUNDED: dict[str, tuple[Callable[[Generator], Array], float]] = {
    "normal, bound of 5 spreads": (lambda rng: np.clip(rng.normal(size=(ROWS, LOOKS)), -5, 5), 5.0),
    "the candidate alone is log-normal, σ = 0.7, up to 10; bound 10": (_capped, 10.0),
    "the candidate alone fails, a run in ten; bound 1": (WORLDS["**the candidate alone fails, a run in ten**"], 1.0),
    "the candidate alone fails, a run in fifty; bound 1": (
        lambda rng: 0.02 - (rng.random((ROWS, LOOKS)) < 0.02) + 1e-4 * rng.normal(size=(ROWS, LOOKS)),
        1.0,
    ),
}


def percent(hits: NDArray[np.bool_]) -> str:
    """Return a share with the standard error of its simulation."""
    share = float(hits.mean())
    return f"{100 * share:.1f} ± {100 * math.sqrt(share * (1 - share) / hits.size):.1f} %"


def errors() -> str:
    """Return the table of wrong answers without a difference."""
    lines = ["| noise | false accept | false reject | a t-test after every pair |", "|---|---:|---:|---:|"]
    for number, (name, draw) in enumerate(WORLDS.items()):
        differences = draw(np.random.default_rng(number))
        answers = looks(differences).answers()
        lines.append(f"| {name} | {percent(answers > 0)} | {percent(answers < 0)} | {percent(_peeked(differences))} |")
    return "\n".join(lines)


def bounded() -> str:
    """Return the table of wrong answers without a difference, with and without `--bound`."""
    lines = ["| noise | with `--bound`: false accept | false reject | without: false accept |", "|---|---:|---:|---:|"]
    for number, (name, (draw, bound)) in enumerate(BOUNDED.items()):
        differences = draw(np.random.default_rng(400 + number))
        answers, plain = bets(differences, bound).answers(), looks(differences).answers()
        lines.append(f"| {name} | {percent(answers > 0)} | {percent(answers < 0)} | {percent(plain > 0)} |")
    return "\n".join(lines)


def price() -> str:
    """Return the table of the pairs after which half of the true gains are accepted, by the bound."""
    effects = (1.0, 2.0, 3.0)
    lines = [
        "| bound, in spreads of a difference | " + " | ".join(f"gain of {effect:g}" for effect in effects) + " |",
        "|---|" + "---:|" * len(effects),
    ]
    draws = {effect: effect + np.random.default_rng(500).normal(size=(2000, 120)) for effect in effects}
    for bound in (None, 5.0, 10.0, 20.0):
        cells = []
        for differences in draws.values():
            found = looks(differences) if bound is None else bets(np.clip(differences, -bound, bound), bound)
            accepted = ((found.log >= -math.log(ALPHA)) & (found.mean > 0)).cumsum(1) > 0
            half = np.flatnonzero(accepted.mean(0) >= 0.5)
            cells.append(str(half[0] + 1) if len(half) else f"more than {differences.shape[1]}")
        lines.append(f"| {'none: normal noise' if bound is None else f'{bound:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def floors() -> str:
    """Return the table of wrong answers without a difference by noise floors of several sizes."""
    head = " | ".join(f"floor of {runs} runs" for runs in FLOORS)
    lines = [f"| noise | {head} |", "|---|" + "---:|" * len(FLOORS)]
    for number, (name, draw) in enumerate(RUNS.items()):
        rng = np.random.default_rng(600 + number)
        shares = [percent(by_floor(draw(rng, (ROWS, n)), draw(rng, (ROWS, BY_FLOOR))).answers() != 0) for n in FLOORS]
        lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _peeked(differences: Array) -> NDArray[np.bool_]:
    """Return where a t-test at 5 % after every pair from the third on is ever significant."""
    n = np.arange(3, LOOKS + 1)
    return (np.abs(_t(differences)[:, 2:]) > student.ppf(1 - ALPHA / 2, n - 1)).any(1)


def _t(differences: Array) -> Array:
    n = np.arange(1, differences.shape[1] + 1)
    mean = differences.cumsum(1) / n
    squares = np.maximum((differences**2).cumsum(1) - n * mean**2, 1e-300)
    return np.asarray(mean * np.sqrt(n * np.maximum(n - 1, 1) / squares))


def power() -> str:
    """Return the table of acceptances of a true gain after n pairs, and of a t-test with n fixed before."""
    lines = [
        "| gain, in spreads of a difference | " + " | ".join(f"{n} pairs" for n in AFTER) + " |",
        "|---|" + "---:|" * len(AFTER),
    ]
    for number, effect in enumerate(EFFECTS):
        differences = effect + np.random.default_rng(100 + number).normal(size=(ROWS, max(AFTER)))
        found, t = looks(differences), _t(differences)
        cells = []
        for n in AFTER:
            part = Looks(found.log[:, :n], found.mean[:, :n]).answers() > 0
            fixed = t[:, n - 1] > student.ppf(1 - ALPHA / 2, n - 1)
            cells.append(f"{100 * part.mean():.0f} ({100 * fixed.mean():.0f})")
        lines.append(f"| {effect:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ledger(sequences: int = 500, candidates: int = 40, effect: float = 2.0) -> str:
    """Return the table of false discoveries over sequences of candidates, one in ten of which is a true gain."""
    rng = np.random.default_rng(200)
    true = rng.random((sequences, candidates)) < 0.1
    differences = rng.normal(size=(sequences, candidates, 30)) + effect * true[..., None]
    short, long = looks(differences[..., :12]), looks(differences)
    ways = {
        "`--ledger`, at most 12 pairs": _by_ledger(short, ALPHA),
        "`--ledger`, at most 30 pairs": _by_ledger(long, ALPHA),
        "`--ledger --alpha 0.2`, at most 12 pairs": _by_ledger(short, 0.2),
        "each at 5 %, at most 12 pairs": short.answers() > 0,
        "keep if better after one pair": differences[..., 0] > 0,
        "keep if better over 12 pairs": short.mean[..., -1] > 0,
    }
    lines = ["| accepted by | false among accepted | true gains found | accepted of 40 |", "|---|---:|---:|---:|"]
    for name, kept in ways.items():
        false = (kept & ~true).sum(1) / np.maximum(kept.sum(1), 1)
        error = false.std() / math.sqrt(sequences)
        lines.append(
            f"| {name} | {100 * false.mean():.1f} ± {100 * error:.1f} % | {percent(kept[true])} | "
            f"{kept.sum(1).mean():.1f} |"
        )
    return "\n".join(lines)


def _by_ledger(found: Looks, alpha: float) -> NDArray[np.bool_]:
    """Return which candidates of each sequence the ledger accepts."""
    kept = np.zeros(found.log.shape[:2], dtype=bool)
    for row, one in enumerate(kept):
        for at in range(len(one)):
            level = np.asarray(levels(one[:at].tolist(), alpha))
            one[at] = Looks(found.log[row, at], found.mean[row, at]).answers(level) > 0
    return kept


def curse(rows: int = ROWS, candidates: int = 10, pairs: int = 12) -> str:
    """Return the table of how much too high the estimates of chosen candidates are, in spreads of a difference."""
    rng = np.random.default_rng(300)
    gains = 0.5 * rng.normal(size=(rows, candidates))
    differences = gains[..., None] + rng.normal(size=(rows, candidates, pairs))
    found = looks(differences)
    best = np.take_along_axis(found.mean[..., 2], found.mean[..., 2].argmax(1)[:, None], 1)[:, 0]
    of_best = np.take_along_axis(gains, found.mean[..., 2].argmax(1)[:, None], 1)[:, 0]
    hit = found.log >= -math.log(ALPHA)
    accepted = found.answers() > 0
    at = hit.argmax(-1)[..., None]
    stopped = np.take_along_axis(found.mean, at, -1)[..., 0][accepted]
    chosen = {
        "the highest of ten after 3 pairs": (best, of_best),
        "accepted by `judge` within 12 pairs": (stopped, gains[accepted]),
    }
    lines = ["| chosen | estimate | true gain | too high by | again on 3 fresh pairs |", "|---|---:|---:|---:|---:|"]
    for name, (estimate, truth) in chosen.items():
        fresh = truth + rng.normal(size=(3, truth.size)).mean(0)
        error = (estimate - truth).std() / math.sqrt(truth.size)
        lines.append(
            f"| {name} | {estimate.mean():.2f} | {truth.mean():.2f} | {(estimate - truth).mean():.2f} ± {error:.2f} | "
            f"{fresh.mean():.2f} |"
        )
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "errors": errors,
    "bounded": bounded,
    "power": power,
    "price": price,
    "floors": floors,
    "ledger": ledger,
    "curse": curse,
}


def main() -> None:
    """Write the tables or check them."""
    before = PAGE.read_text(encoding="utf-8")
    if {mark["name"] for mark in MARK.finditer(before)} != set(TABLES):
        sys.exit(f"{PAGE.name} lacks a mark: <!-- simulated: NAME --> for each of {', '.join(TABLES)}")
    after = MARK.sub(lambda mark: f"{mark[1]}{TABLES[mark['name']]()}{mark[4]}", before)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(after, encoding="utf-8")
    elif after != before:
        sys.exit("docs/judge.md is not current: run python docs/judge_simulations.py")


if __name__ == "__main__":
    main()
