"""A study of alarms: how early each signal of a training warns of a fault, and how often it raises false alarms.

Known faults are injected into small trainings, each with a healthy twin of the same seed; three times as many trainings
stay healthy. Thresholds are set on the runs of even seeds, and tested on those of odd seeds and once on a held-out
family of models.

Every run has its own file, so an interrupted study continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TITLE = "Alarms: how early, and how often wrong?"
QUESTION = (
    "Which signal of a training warns of a fault before the loss shows it, how many steps before, how many faults does "
    "it catch, and how often does it warn in a healthy training?"
)
# seeds of each family, and of the held-out one
SEEDS, HELD_OUT_SEEDS = 6, 4
# healthy runs for each run with a fault
HEALTHY_RUNS = 3


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    data: Path | None = None,
    steps: int | None = None,
) -> dict[str, Any]:
    """Execute the missing runs in `out`/runs, `jobs` runs at a time, and return the findings.

    Args:
        out: the folder of the study.
        seeds: of each family with faults (default 6, at least 2: one half to set thresholds, one to test them).
        jobs: the number of processes.
        device: ignored; the models are always trained on the CPU.
        progress: a function that is called with messages on the progress.
        data: the folder of the texts.
        steps: of each run (default 256), for a small trial.

    Raises:
        ValueError: if `seeds` is below 2.
    """
    from headwise_papers.alarms.findings import findings
    from headwise_papers.data import multi30k, tinyshakespeare

    if seeds is not None and seeds < 2:
        raise ValueError(
            f"alarms fixes thresholds on one half of the seeds and reports on the other: seeds={seeds}, use 2 or more"
        )
    say = progress or (lambda text: None)
    tinyshakespeare.prepare(data, say)
    multi30k.prepare(data, say)
    every = list(cells(data, seeds or SEEDS, seeds or HELD_OUT_SEEDS))
    runs = carried_out(out, every, jobs, say, partial(write_run, data=data, steps=steps))
    return findings(runs, out, seeds or SEEDS)


def cells(data: Path | None, seeds: int, held_out_seeds: int) -> Iterator[Any]:
    """Yield every run of the study: those with faults, then the healthy ones, twins first."""
    from headwise_papers.alarms.faults import HEALTHY, RATES, SLOW, SURPRISE, Fault, faults_of
    from headwise_papers.alarms.models import FAMILIES, HELD_OUT
    from headwise_papers.alarms.one_run import Cell

    healthy: list[Cell] = []
    for kind, count in [*((one, seeds) for one in FAMILIES), (HELD_OUT, held_out_seeds)]:
        family = kind(data)
        sizes, faulty = family.sizes, []
        for seed in range(count):
            size = sizes[seed % len(sizes)]
            faulty += [Cell(family.name, size, fault, seed) for fault in faults_of(family, size)]
        for number in range(max(count, HEALTHY_RUNS * len(faulty))):
            # twins have the rate of runs with faults; a study with fewer seeds is a subset of one with more
            rate = 1.0 if number < max(count, SEEDS) else RATES[number // (2 * len(sizes)) % len(RATES)]
            healthy.append(Cell(family.name, sizes[number % len(sizes)], Fault(HEALTHY, rate), number))
        yield from faulty
        for seed in range(min(4, count)):
            yield Cell(family.name, sizes[seed % len(sizes)], SURPRISE, seed)
            yield Cell(family.name, sizes[seed % len(sizes)], SLOW, seed)
    yield from sorted(healthy, key=lambda one: one.seed)


def carried_out(
    out: Path, requested: list[Any], jobs: int, say: Callable[[str], None], write: Callable[..., None]
) -> list[dict[str, Any]]:
    """Return the records of all runs, after `write(run, folder=...)` has executed those without a file."""
    from headwise_verdict.files.durable import read_json
    from headwise_verdict.files.ownership import REPORT, STUDY, claim, plain_folder

    claim(out, (*STUDY, *REPORT, "signals.csv", "curves.csv", "alarms.json"))
    folder = plain_folder(out / "runs")
    missing = [one for one in requested if not (folder / f"{one.name}.json").is_file()]
    say(f"{len(requested) - len(missing)} of {len(requested)} runs are there")
    one_by_one = partial(write, folder=folder)
    if jobs > 1 and len(missing) > 1:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for done, _ in enumerate(as_completed([pool.submit(one_by_one, one) for one in missing]), 1):
                say(f"{done} of {len(missing)} runs")
    else:
        for done, one in enumerate(missing, 1):
            one_by_one(one)
            say(f"{done} of {len(missing)} runs: {one.name}")
    return [read_json(folder / f"{one.name}.json") for one in requested]  # type: ignore[misc]


_families: dict[tuple[str, Path | None], Any] = {}


def write_run(cell: Any, folder: Path, data: Path | None, steps: int | None) -> None:
    """Execute one run and write its file."""
    from headwise_papers.alarms.models import FAMILIES, HELD_OUT
    from headwise_papers.alarms.one_run import carry_out
    from headwise_verdict.files.durable import write_json

    if (cell.family, data) not in _families:
        _families[cell.family, data] = next(one for one in (*FAMILIES, HELD_OUT) if one.name == cell.family)(data)
    family = _families[cell.family, data]
    length: dict[str, Any] = {} if steps is None else {"steps": steps}
    write_json(folder / f"{cell.name}.json", carry_out(cell, family, **length))
