"""The alarms as shipped: the rules of `headwise.watch` at its own cadence, beside readings every fifth step.

Each run reads everything that the rules judge every `GRID` steps. Which alerts a cadence would have raised follows from
these readings, because watching does not change a training, and the code that chooses the steps is that of `watch`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwise.health.watching.alerts import Judge
from headwise.health.watching.cadence import MOVED, NEAR, Cadence
from headwise.health.watching.losses import BEFORE, LossFigures, Spikes
from headwise.health.watching.rules import OF_STEPS, RULES, Thresholds
from headwise_papers.alarms import _families
from headwise_papers.alarms.faults import HEALTHY, RATES, SLOW, Fault, faults_of
from headwise_papers.alarms.findings import caught_words, false_words, lead_words
from headwise_papers.alarms.models import FAMILIES, HELD_OUT
from headwise_papers.alarms.one_run import BEYOND, Cell, carry_out
from headwise_papers.alarms.scoring import TARGET, Scored, _quoted, false_interval, measured, shown
from headwise_verdict.files.durable import write_bytes, write_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import claim

# seeds of the newest faults that were run after every choice, in the families by which limits were fixed
FRESH = range(1000, 1004)
NEWEST = ("causal mask", "sorted by class")
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


def fresh_cells(data: Path | None) -> Iterator[Cell]:
    """Yield the runs with the newest faults on fresh seeds, and their twins."""
    for family in (kind(data) for kind in FAMILIES):
        for seed in FRESH:
            size = family.sizes[(seed - FRESH[0]) % len(family.sizes)]
            newest = (fault for fault in faults_of(family, size) if fault.kind.startswith(NEWEST))
            yield from (Cell(family.name, size, fault, seed) for fault in (Fault(HEALTHY, 1.0), *newest))


def seeds_of_healthy(seed: int) -> int:
    """Return the first number of the healthy runs that come with a seed."""
    return 100 + (HEALTHY_RUNS - 1) * seed


def write_run(cell: Cell, folder: Path, data: Path | None) -> None:
    """Execute one run and write its file."""

    if (cell.family, data) not in _families:
        _families[cell.family, data] = next(one for one in (*FAMILIES, HELD_OUT) if one.name == cell.family)(data)
    compared = cell.fault.kind != HEALTHY or cell.seed < seeds_of_healthy(0) or cell.seed in FRESH
    record = carry_out(
        cell, _families[cell.family, data], read=GRID, evaluate=EVALUATED if compared else None, statistics=JUDGED
    )
    write_json(folder / f"{cell.name}.json", record)


def runs_of(out: Path, data: Path | None, seeds: int, jobs: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the records of all runs, after executing those without a file."""
    from headwise_papers.alarms import carried_out

    return carried_out(out, [*cells(data, seeds), *fresh_cells(data)], jobs, say, partial(write_run, data=data))


# Replay of a cadence

# the cadences that were scored: steps between full readings, and between closer ones
CADENCES = ((5, None), (10, None), (25, None), (50, None), (100, None), (100, 5), (50, 10), (50, 5))
AT_ONCE = {rule.alert: rule.at_once for rule in RULES}


def read_at(run: dict[str, Any], every: int, closer: int | None) -> list[int]:
    """Return the steps of a run that `watch(every=, closer=)` reads, chosen by its own code."""
    cadence = Cadence(every, closer)
    moves = _moves(run)
    largest = dict(zip(run["read"], run["readings"]["largest logit"], strict=True))
    steps = []
    for step in range(run["steps"]):
        due = cadence.due(step)
        if due:
            steps.append(step)
        if step in moves:
            cadence.moved(step, "")
        if due and (largest.get(step) or 0.0) > NEAR * (Thresholds().max_logit or math.inf):
            cadence.moved(step, "")
    return steps


def _moves(run: dict[str, Any]) -> set[int]:
    """Return the steps at which the loss or the gradient norm moved."""
    series = [run["every step"]["loss"], run["every step"]["gradient norm"]]
    deviations = [Spikes(BEFORE, BEFORE).add(_finite(values)) for values in series]
    return {step for own in deviations for step, one in enumerate(own) if one is not None and one > MOVED}


def _finite(values: list[float]) -> list[float]:
    return [math.inf if value >= BEYOND else value for value in values]


def alerts_of(run: dict[str, Any], every: int, closer: int | None) -> dict[str, list[int]]:
    """Return the steps at which each rule raises alerts, and those of any rule."""
    found: dict[str, set[int]] = {}
    ill: dict[int, set[tuple[Any, ...]]] = {}
    for step, *key in run["ill"]:
        ill.setdefault(step, set()).add(tuple(key))
    reported: set[tuple[Any, ...]] = set()
    healthy_before: set[tuple[Any, ...]] = set()
    keys = set().union(*ill.values()) if ill else set()
    for step in read_at(run, every, closer):
        now = ill.get(step, set())
        for key in now - reported:
            if AT_ONCE[key[0]] or key in healthy_before:
                found.setdefault(key[0], set()).add(step)
                reported.add(key)
        healthy_before |= keys - now
        reported &= now
    judge, figures = Judge(Thresholds(), rules=OF_STEPS), LossFigures()
    for step, value in enumerate(_finite(run["every step"]["loss"])):
        # one record after the other, as in `Watch.step`
        for record in figures.next(step, value):
            for alert in judge.alerts([record]):
                found.setdefault(alert["alert"], set()).add(step)
    found["any rule"] = set().union(*found.values()) if found else set()
    return {name: sorted(steps) for name, steps in found.items()}


def scored_at(runs: Sequence[dict[str, Any]], every: int, closer: int | None) -> list[Scored]:
    """Return the runs with the alerts of a cadence."""
    twins = {
        (run["family"], run["size"], run["seed"]): dict(map(tuple, run["evaluated"]))
        for run in runs
        if run["kind"] == HEALTHY and run["evaluated"]
    }
    found = []
    for run in runs:
        twin = twins.get((run["family"], run["size"], run["seed"]), {})
        shows = None if run["kind"] == HEALTHY else shown(run["evaluated"], twin, run["onset"])
        alerts = {name: np.asarray(steps) for name, steps in alerts_of(run, every, closer).items()}
        fields = {name: run[name] for name in ("family", "kind", "severity", "seed", "onset", "steps")}
        found.append(Scored(**fields, shows=shows, series={}, rules=alerts))
    return found


def fixes(run: Scored) -> bool:
    """Return whether a run belongs to the half on which limits were fixed: even seeds, not the held-out family."""
    return run.family != HELD_OUT.name and run.seed % 2 == 0


# The page

FIGURES = "as_shipped.json"
PAGE = "as_shipped.md"
ALERTS = "as_shipped.csv"


def page(runs: Sequence[dict[str, Any]], seeds: int) -> tuple[str, dict[str, Any]]:
    """Return the page in Markdown, and the figures that alerts quote: of the shipped cadence, on runs not fixed on."""
    fresh = [run for run in runs if run["seed"] in FRESH]
    runs = [run for run in runs if run["seed"] not in FRESH]
    usual = [run for run in runs if run["kind"] != SLOW.kind]
    rows, shipped = [], []
    for every, closer in CADENCES:
        scored = scored_at(usual, every, closer)
        tested = [run for run in scored if not fixes(run)]
        if (every, closer) == SHIPPED:
            shipped = scored
        point = measured(tested, "rule: any rule", math.nan)
        heads = _without_loss(tested)
        readings = 1000 * sum(len(read_at(run, every, closer)) for run in usual if run["kind"] == HEALTHY)
        healthy = sum(run["steps"] for run in usual if run["kind"] == HEALTHY)
        name = f"every {every}" + (f", closer {closer}" if closer else "")
        rows.append(
            [f"**{name}**" if (every, closer) == SHIPPED else name, f"{readings / healthy:.0f}", caught_words(point)]
            + [lead_words(point), false_words(point), caught_words(heads), lead_words(heads)]
        )
    tested = [run for run in shipped if not fixes(run)]
    slow = scored_at([run for run in runs if run["kind"] == SLOW.kind], *SHIPPED)
    names = sorted({f"rule: {rule.alert}" for rule in (*RULES, *OF_STEPS)} | {"rule: any rule"})
    quality = {name: measured(tested, name, math.nan) for name in names}
    rules = [
        [name.removeprefix("rule: "), caught_words(point), lead_words(point), false_words(point)]
        for name, point in quality.items()
    ]
    healthy_steps = sum(run.steps for run in tested if run.healthy)
    alerted = sum("any rule" in run.rules and bool(len(run.rules["any rule"])) for run in slow)
    faults = sum(run.shows is not None for run in tested)
    faulty = [run for run in usual if run["kind"] != HEALTHY]
    text = [
        "# The alarms as shipped",
        f"[The study of the alarms](README.md) reads every 8 steps. `headwise.watch` reads every {SHIPPED[0]}, and "
        f"every {SHIPPED[1]} for {SHIPPED[0]} steps once the loss or the gradient norm lies {MOVED:g} standard "
        f"deviations above the {BEFORE} steps before, or the largest logit passes {100 * NEAR:.0f} % of its "
        f"limit. This page "
        "scores that cadence, and what each alert quotes comes from it.",
        f"A stated part of the study, because the whole takes an hour: {seeds} seeds of each fault in three families, "
        f"without the four faults that never showed, and {len(usual) - len(faulty)} healthy runs; {len(runs)} runs of "
        "256 steps in all. Each reads everything that rules judge every 5 steps, and the cadences are replayed by the "
        "code that ships. Limits are those that were there before, except that of `sorted_batches`: twice the largest "
        "value in healthy runs of the half for fixing (even seeds of the character LM and the small ViT), "
        "rounded up. The form of that rule was chosen after a look at the losses of all runs, the tested ones "
        "too, so its "
        "own row is no test on unseen runs. All figures "
        f"below are of the other runs: {faults} faults that showed in the loss, {healthy_steps:,} healthy steps. "
        "Intervals are as in the study.",
        "## Cadences, all rules together",
        _table(
            ["reads", "readings in 1,000 healthy steps", "caught", "lead in steps", "false alarms in 1,000 steps"]
            + ["caught by readings alone", "their lead"],
            rows,
        ),
        choice(usual),
        "## Rules at the shipped cadence",
        _table(["rule", "caught", "lead in steps", "false alarms in 1,000 steps"], rules),
        f"In {len(slow)} healthy runs whose rate rises for {SLOW.severity:.0f} of the 256 steps, {alerted or 'none'} "
        "raised an alert.",
        "## New faults",
        _table(
            ["fault", "family", "seed", "steps until the loss shows it", "named by", "steps until then"],
            [_new_fault(run) for run in shipped if run.kind.startswith(NEWEST)],
        ),
        "A lost causal mask lies in the training forwards alone; the held-out loss is that of the model with its mask. "
        "It is seen at the next reading, whatever the loss does. Batches sorted by class are not seen as such, because "
        "labels and order are not visible to `watch`: what is seen is that the losses of neighbouring steps move "
        "together. That takes steps, so the alert names the cause after the loss has shown that something is wrong. It "
        f"also follows a stretch of bad batches: {_mistaken(shipped)}.",
        *_on_fresh_seeds(scored_at(fresh, *SHIPPED)),
        "## What is not shown",
        NOT_SHOWN.format(
            alarms=quality["rule: any rule"].false or "none",
            steps=healthy_steps,
            upper=10 * false_interval(quality["rule: any rule"])[1],
            needed=math.ceil(-math.log(0.025) / TARGET),
        ),
        f"Every run with the alerts of the shipped cadence: [{ALERTS}]({ALERTS}); `python docs/recompute.py` computes "
        "the figures of the rules from it. Made by `python -m headwise_papers.alarms.as_shipped --out FOLDER --data "
        f"FOLDER` in {sum(run['seconds'] for run in (*runs, *fresh)) / 60:.0f} minutes of one core.",
    ]
    content = {name.removeprefix("rule: "): _quoted(point) for name, point in quality.items()}
    return "\n\n".join(text) + "\n", content


# chosen after the table of cadences
SHIPPED = (50, 10)


def choice(runs: Sequence[dict[str, Any]]) -> str:
    """Return the paragraph on why the default is what it is."""
    from scipy import stats

    every, closer = SHIPPED
    dense, plain, chosen = (
        [run for run in scored_at(runs, *cadence) if run.shows is not None]
        for cadence in (CADENCES[0], (every, None), SHIPPED)
    )
    caught = [
        [run.lead(run.rules.get("any rule", np.empty(0))) is not None for run in own] for own in (dense, plain, chosen)
    ]
    gained = sum(after and not before for before, after in zip(caught[1], caught[2], strict=True))
    lost = sum(before and not after for before, after in zip(caught[1], caught[2], strict=True))
    p = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return (
        f"The default is every {every}, closer {closer}, chosen by both halves together: of {len(dense)} faults "
        f"readings every {CADENCES[0][0]} steps catch {sum(caught[0])}, every {every} alone {sum(caught[1])}, and "
        f"the default {sum(caught[2])}: closer readings gain {gained} and lose {lost} (McNemar's exact p = "
        f"{p:.2g}). Cadences that "
        "differ by one or two faults cannot be distinguished here. As the default was chosen on these runs, its own "
        "figures flatter it a little; and all faults during training begin at step 128, 22 steps before a "
        "reading of every 50."
    )


def _without_loss(runs: Sequence[Scored]) -> Any:
    """Return the score of the rules that need a reading."""
    of_steps = {rule.alert for rule in OF_STEPS if rule.alert != "not_finite"} | {"any rule"}
    for run in runs:
        steps = [list(found) for name, found in run.rules.items() if name not in of_steps and name != "readings"]
        run.rules["readings"] = np.unique(np.concatenate(steps)) if steps else np.empty(0)
    return measured(runs, "rule: readings", math.nan)


def _new_fault(run: Scored) -> list[str]:
    alert = "mask_lost" if run.kind.startswith("causal") else "sorted_batches"
    steps = [step for step in run.rules.get(alert, ()) if step >= run.onset]
    shows = "never" if run.shows is None else str(run.shows - run.onset)
    named = [alert, str(int(steps[0]) - run.onset)] if len(steps) else ["nothing", "–"]
    return [run.label, run.family, str(run.seed), shows, *named]


NOT_SHOWN = (
    "That rules raise at most one false alarm in 10,000 healthy steps at this cadence: {alarms} in {steps:,} is "
    "compatible with up to {upper:.1f} (Garwood's interval). None in {needed:,} would show it, on runs that no limit "
    "was fixed by. The dense study, which reads every 8 steps, was not run again with the newest faults: it takes an "
    "hour. So its table of signals says nothing on them, and `mask_lost` and `sorted_batches` are scored on this page "
    "alone. The figures of `sorted_batches` are of its rule before [a repair](elsewhere.md) on 29 November 2026. Other "
    "trainings and faults: [the alarms elsewhere](elsewhere.md)."
)


def _on_fresh_seeds(runs: Sequence[Scored]) -> list[str]:
    """Return the section on the newest faults with seeds that were run after every choice."""
    if not runs:
        return []
    rows = []
    for family, label in dict.fromkeys((run.family, run.label) for run in runs if not run.healthy):
        own = [run for run in runs if (run.family, run.label) == (family, label)]
        alert = "mask_lost" if label.startswith("causal") else "sorted_batches"
        named = [[step - run.onset for step in run.rules.get(alert, ()) if step >= run.onset] for run in own]
        showed = [run.shows - run.onset for run in own if run.shows is not None]
        first = [min(steps) for steps in named if steps]
        rows.append(
            [label, family, f"{len(showed)} of {len(own)}", _range(showed), f"{alert}: {len(first)} of {len(own)}"]
            + [_range(first)]
        )
    healthy = [run for run in runs if run.healthy]
    point = measured(healthy, "rule: any rule", math.nan)
    return [
        "## The newest faults on fresh seeds",
        _table(["fault", "family", "showed in the loss", "steps until it did", "named by", "steps until then"], rows),
        f"Seeds {FRESH[0]} to {FRESH[-1]}, run on 28 November 2026 after every choice; the tables above do not count "
        f"them. Their {len(healthy)} healthy twins, {point.healthy:,} steps, raised {point.false or 'no'} false "
        f"alarm{'s' if point.false != 1 else ''}.",
    ]


def _range(steps: Sequence[int]) -> str:
    if not steps:
        return "–"
    return str(min(steps)) if min(steps) == max(steps) else f"{min(steps)} to {max(steps)}"


def _mistaken(runs: Sequence[Scored]) -> str:
    others = [run for run in runs if not run.healthy and not run.kind.startswith("sorted")]
    named = [run.label for run in others if len(run.rules.get("sorted_batches", ()))]
    kinds = ", ".join(dict.fromkeys(named)) or "none"
    return f"{len(named)} of {len(others)} runs with another fault raised it ({kinds})"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write_alerts(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Write the alerts of every run at the shipped cadence: what the figures of the rules are computed from."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(["family", "fault", "seed", "part", "onset", "steps", "shows", "alerts"])
        for run in scored_at(runs, *SHIPPED):
            part = "fresh" if run.seed in FRESH else "fixed by" if fixes(run) else "tested"
            alerts = [f"{name}:{step}" for name, steps in run.rules.items() if name != "any rule" for step in steps]
            shows = "" if run.shows is None else run.shows
            rows.writerow([run.family, run.label, run.seed, part, run.onset, run.steps, shows, " ".join(alerts)])


def main() -> None:
    """Execute the missing runs, and write the page and the figures that alerts quote."""
    parser = argparse.ArgumentParser(prog="python -m headwise_papers.alarms.as_shipped", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, the page and its figures")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds of each fault")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    try:
        claim(options.out, (PAGE, FIGURES, ALERTS))
    except StudyError as error:
        parser.error(str(error))
    runs = runs_of(options.out, options.data, options.seeds, options.jobs, lambda text: print(text, file=sys.stderr))
    text, content = page(runs, options.seeds)
    write_bytes(options.out / PAGE, text.encode())
    write_json(options.out / FIGURES, content)
    write_alerts(options.out / ALERTS, runs)


if __name__ == "__main__":
    main()
