"""The alarms elsewhere: `headwise.watch` as it ships in healthy trainings and with faults that the study has not.

Every run is watched as a script would, with the loss and the gradient norm of each step; nothing is replayed.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise_papers.alarms import _families, carried_out, scripts
from headwise_papers.alarms.faults import RATES
from headwise_papers.alarms.models import FAMILIES, HELD_OUT, Digits, Family, Shakespeare, Size
from headwise_papers.alarms.one_run import written
from headwise_papers.alarms.other_models import OTHERS, Sentences
from headwise_papers.alarms.script_faults import FAULTS, HalfSorted, PaddingLeaks, Sorted
from headwise_papers.alarms.scripts import Script
from headwise_verdict.files.durable import write_bytes, write_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import claim

# the first seed of healthy trainings as in the study, of unlike ones, and of trainings with faults: all are fresh
AS_BEFORE, UNLIKE, FAULTY = 2000, 3000, 4000
HEALTHY_RATES = (0.1, *RATES, 1.5)
# steps of a usual run, of an unlike one, and of one with a fault
STEPS, UNLIKE_STEPS, WITH_FAULT = 256, 320, 330
# steps between evaluations of a run with a fault or its twin, and their examples
EVALUATE, EXAMPLES = 10, 100
# families with faults, these (all that fit, if none is named), and the number of seeds
WITH_FAULTS: tuple[tuple[type[Family], tuple[type[Script], ...], int], ...] = (
    (Shakespeare, (), 1),
    (Sentences, (PaddingLeaks,), 1),
    (Digits, (Sorted, HalfSorted), 3),
)


@dataclass(frozen=True)
class Training:
    """One run: its group ("usual", "unlike" or "fault"), script, family, size, seed, steps and multiple of the rate."""

    group: str
    script: type[Script]
    family: type[Family]
    size: Size
    seed: int
    steps: int
    rate: float = 1.0

    @property
    def name(self) -> str:
        """Return the name of the run's file."""
        size = f"{self.size.dim}x{self.size.depth}{self.size.norm}"
        words = f"{self.group} {self.family.name} {size} {self.script.__name__} {self.rate:g} seed {self.seed}"
        return "".join(c if c.isalnum() or c in ".-" else "_" for c in words)


def trainings() -> Iterator[Training]:
    """Yield the healthy runs, then those with a fault and their healthy twins."""
    every = (*FAMILIES, HELD_OUT, *OTHERS)
    for family in every:
        for number, rate in enumerate(HEALTHY_RATES):
            yield Training(
                "usual", Script, family, family.sizes[number % len(family.sizes)], AS_BEFORE + number, STEPS, rate
            )
    for number, family in enumerate(every):
        for place, script in enumerate(one for one in scripts.HEALTHY if one.fits(family)):
            size = family.sizes[(number + place) % len(family.sizes)]
            yield Training("unlike", script, family, size, UNLIKE + place, UNLIKE_STEPS)
    for family, kinds, seeds in WITH_FAULTS:
        fitting: list[type[Script]] = [Script]
        fitting += [one for one in FAULTS if one.fits(family) and (one in kinds or not kinds)]
        for number in range(seeds):
            for kind in fitting:
                yield Training("fault", kind, family, family.sizes[number], FAULTY + number, WITH_FAULT)


def carry_out(training: Training, family: Family) -> dict[str, Any]:
    """Train once, watched as shipped, and return alerts, report, losses and evaluations."""
    start = time.process_time()
    with torch.random.fork_rng([]):
        # dropout draws from the global generator too
        torch.manual_seed(training.seed)
        model = family.model(training.size).train()
        run = training.script(family, model, training.seed, training.steps, training.rate)
        watch = headwise.watch(model, on_alert=None)
        losses: list[float] = []
        evaluated = [(-1, _evaluate(family, model))]
        alerts: list[Any] = []
        for step in range(training.steps):
            before, watch = watch, run.before(step, watch)
            alerts += before.alerts() if before is not watch else []
            loss, norm = run.step(step)
            watch.step(loss, gradient_norm=norm)
            losses.append(loss.item())
            if (training.group == "fault" and step % EVALUATE == EVALUATE - 1) or step == training.steps - 1:
                evaluated.append((step, _evaluate(family, model)))
            if not math.isfinite(losses[-1]) and step > run.onset + 20:
                break
        report, details = str(watch.report()), str(watch.report(details=True))
        alerts += watch.alerts()
        watch.remove()
    return {
        "group": training.group,
        "family": family.name,
        "size": f"{training.size.dim} wide, {training.size.depth} blocks, {training.size.norm}-norm",
        "script": run.says,
        "rate": training.rate,
        "seed": training.seed,
        "onset": run.onset,
        "steps": len(losses),
        "losses": [written(one) for one in losses],
        "evaluated": [(step, written(one)) for step, one in evaluated],
        "alerts": sorted({(alert["step"], alert["alert"], alert["sentence"]) for alert in alerts}),
        "report": report,
        "details": details,
        "seconds": time.process_time() - start,
    }


@torch.no_grad()
def _evaluate(family: Family, model: torch.nn.Module) -> float:
    model.eval()
    loss = family.loss(model, *(one[:EXAMPLES] for one in family.held_out())).item()
    model.train()
    return loss


def write_run(training: Training, folder: Path, data: Path | None) -> None:
    """Execute one run and write its file."""
    key = training.family.name, data
    if key not in _families:
        _families[key] = training.family(data)
    write_json(folder / f"{training.name}.json", carry_out(training, _families[key]))


def main() -> None:
    """Execute the missing runs, and write the page, the figures and a row for each run."""
    from headwise_papers.alarms.elsewhere_page import FIGURES, PAGE, ROWS, content, judged_again, page, write_rows

    parser = argparse.ArgumentParser(prog="python -m headwise_papers.alarms.elsewhere", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, the page and its figures")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--page", action="store_true", help="run nothing, and write the page of the runs there are")
    options = parser.parse_args()
    try:
        claim(options.out, (PAGE, FIGURES, ROWS))
    except StudyError as error:
        parser.error(str(error))
    say = lambda text: print(text, file=sys.stderr, flush=True)
    write = partial(write_run, data=options.data)
    planned = list(trainings())
    there = [one for one in planned if (options.out / "runs" / f"{one.name}.json").is_file()]
    made = carried_out(options.out, there if options.page else planned, options.jobs, say, write)
    runs = list(map(judged_again, made))
    write_bytes(options.out / PAGE, page(runs, len(planned)).encode())
    write_json(options.out / FIGURES, content(runs))
    write_rows(options.out / ROWS, runs)


if __name__ == "__main__":
    main()
