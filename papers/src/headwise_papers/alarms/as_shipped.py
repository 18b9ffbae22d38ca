"""The alarms as shipped: the rules of `headwise.watch` at its own cadence, beside readings every fifth step.

Each run reads everything that the rules judge every `GRID` steps. Which alerts a cadence would have raised follows from
these readings, because watching does not change a training, and the code that chooses the steps is that of `watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headwise_papers.alarms import _families
from headwise_papers.alarms.faults import HEALTHY, RATES, SLOW, Fault, faults_of
from headwise_papers.alarms.models import FAMILIES, HELD_OUT
from headwise_papers.alarms.one_run import Cell, carry_out

# steps between the readings of a run, and between its evaluations
GRID = EVALUATED = 5
# seeds of each fault, and healthy runs of a family for each seed
SEEDS, HEALTHY_RUNS = 2, 13
# faults that never showed in any loss of the study of signals, and so count neither as caught nor as missed
HARMLESS = ("weights rounded up, bits 8", "weights rounded up, bits 2", "gains' decay 0", "no warm-up, rate × 1")
# what the rules judge
JUDGED = (
    "later_keys",
    "entropy_share",
    "max_logit",
    "token_cosine",
    "high_frequency",
    "effective_rank_qk",
    "effective_rank_vo",
    "output_norm",
    "head_redundancy",
)


def cells(data: Path | None, seeds: int) -> Iterator[Cell]:
    """Yield the runs, seed by seed, so that a study with fewer seeds is a part of one with more."""
    kinds = [kind(data) for kind in (*FAMILIES, HELD_OUT)]
    for seed in range(seeds):
        for family in kinds:
            size = family.sizes[seed % len(family.sizes)]
            faults = (fault for fault in faults_of(family, size) if fault.label not in HARMLESS)
            yield from (Cell(family.name, size, fault, seed) for fault in faults)
            yield Cell(family.name, size, SLOW, seed)
            # the twins of all seeds come first
            for number in (seed, *range(seeds_of_healthy(seed), seeds_of_healthy(seed + 1))):
                rate = 1.0 if number == seed else RATES[number % len(RATES)]
                yield Cell(family.name, family.sizes[number % len(family.sizes)], Fault(HEALTHY, rate), number)


def seeds_of_healthy(seed: int) -> int:
    """Return the first number of the healthy runs that come with a seed."""
    return 100 + (HEALTHY_RUNS - 1) * seed


def write_run(cell: Cell, folder: Path, data: Path | None) -> None:
    """Execute one run and write its file."""
    from headwise_verdict.files.durable import write_json

    if (cell.family, data) not in _families:
        _families[cell.family, data] = next(one for one in (*FAMILIES, HELD_OUT) if one.name == cell.family)(data)
    compared = cell.fault.kind != HEALTHY or cell.seed < 100
    record = carry_out(
        cell,
        _families[cell.family, data],
        read=GRID,
        evaluate=EVALUATED if compared else None,
        statistics=JUDGED,
    )
    write_json(folder / f"{cell.name}.json", record)


def runs_of(out: Path, data: Path | None, seeds: int, jobs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of all runs, after executing those without a file."""
    from headwise_papers.alarms import carried_out

    return carried_out(out, list(cells(data, seeds)), jobs, say, partial(write_run, data=data))
