"""The page, the figures and the rows of the runs of `elsewhere`."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.health.watching.alerts import Judge
from headwise.health.watching.diagnosis import CAUSES
from headwise.health.watching.losses import LossFigures
from headwise.health.watching.rules import OF_STEPS, RULES, Thresholds
from headwise_papers.alarms.as_shipped import SHIPPED, _table
from headwise_papers.alarms.one_run import BEYOND
from headwise_papers.alarms.scoring import TARGET, Point, false_interval, shown

PAGE, FIGURES, ROWS = "elsewhere.md", "elsewhere.json", "elsewhere.csv"
Run = dict[str, Any]
NAMES = sorted({rule.alert for rule in (*RULES, *OF_STEPS)})


def judged_again(run: Run) -> Run:
    """Return a run with the alerts that today's rules raise on its losses, beside those when it was made."""
    judge, figures = Judge(Thresholds(), rules=OF_STEPS), LossFigures()
    of_steps = {rule.alert for rule in OF_STEPS} - {"not_finite"}
    alerts = {tuple(alert) for alert in run["alerts"] if alert[1] in NAMES and alert[1] not in of_steps}
    for step, loss in enumerate(run["losses"]):
        for record in figures.next(step, math.inf if loss >= BEYOND else loss):
            found = [alert for alert in judge.alerts([record]) if alert["alert"] in of_steps]
            alerts |= {(step, alert["alert"], alert["sentence"]) for alert in found}
    return {**run, "alerts": sorted(alerts), "when made": [alert for alert in run["alerts"] if alert[1] in NAMES]}


def healthy_of(runs: Sequence[Run]) -> list[Run]:
    """Return the healthy runs: all without a fault, the twins of those with one too."""
    return [run for run in runs if not run["onset"]]


def alarms_of(run: Run, rule: str | None = None, since: int = 0) -> list[int]:
    """Return the steps from `since` on at which a rule, or any of them, raised alerts."""
    return sorted({step for step, name, _ in run["alerts"] if step >= since and rule in (None, name)})


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the false alarms in healthy steps of any rule and of each, with Garwood's interval in 1,000 steps."""
    healthy = healthy_of(runs)
    steps = sum(run["steps"] for run in healthy)
    figures = {}
    for name in (None, *NAMES):
        false = sum(len(alarms_of(run, name)) for run in healthy)
        low, high = false_interval(Point(str(name), math.nan, 0, (), false, steps))
        per_1000 = [1000 * false / steps, low, high]
        figures[name or "any rule"] = {"false_alarms": false, "healthy_steps": steps, "per_1000": per_1000}
    return figures


def write_rows(path: Path, runs: Sequence[Run]) -> None:
    """Write a row for each run with its losses, when its fault shows, and its alerts."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        columns = ("group", "family", "script", "rate", "size", "seed", "onset", "steps")
        rows.writerow([*columns, "held out before", "held out after", "shows", "alerts when made", "alerts"])
        for run in runs:
            made, alerts = (sorted({f"{a[1]}:{a[0]}" for a in run[name]}) for name in ("when made", "alerts"))
            shows = shown_in(run, runs)
            held_out = [f"{loss:.4g}" for _, loss in (run["evaluated"][0], run["evaluated"][-1])]
            known = [*(run[name] for name in columns), *held_out, "" if shows is None else shows]
            rows.writerow([*known, " ".join(made), " ".join(alerts)])


def shown_in(run: Run, runs: Sequence[Run]) -> int | None:
    """Return the step at which the held-out loss shows a fault against the healthy twin; None if it never does."""
    if not run["onset"]:
        return None
    same = ("group", "family", "size", "seed")
    twin = next(one for one in runs if not one["onset"] and all(one[name] == run[name] for name in same))
    return shown(run["evaluated"], dict(map(tuple, twin["evaluated"])), run["onset"])


def page(runs: Sequence[Run], planned: int) -> str:
    """Return the page in Markdown; `planned` is the number of runs that there will be."""
    healthy, faulty = healthy_of(runs), [run for run in runs if run["onset"]]
    return (
        "\n\n".join(
            [
                "# The alarms elsewhere",
                f"`headwise.watch` as it ships (readings every {SHIPPED[0]} steps, closer ones every {SHIPPED[1]}) in "
                "trainings that [the study](README.md) does not have: healthy ones that scripts run otherwise, with "
                "other models and data, and faults of scripts. Seeds are fresh, no limit was fixed by these runs, and "
                "nothing is replayed: each run was watched as a script would, with its loss and gradient norm.",
                "## Healthy trainings",
                _table(
                    ["training", "models", "runs", "steps", "held-out loss, before → after", "false alarms"],
                    [_healthy_row(says, healthy) for says in dict.fromkeys(map(_habit, healthy))],
                ),
                _before(healthy),
                REPAIRED,
                *_false_alarms(healthy),
                "## Faults of scripts",
                f"Each begins at step {faulty[0]['onset'] if faulty else 0} of "
                f"{max((run['steps'] for run in faulty), default=0)} and stays. It shows where the held-out loss lies "
                "10 % above the healthy twin's at two evaluations in a row, of which there is one every 10 steps.",
                _table(
                    ["fault", "model", "steps until the loss shows it", "first named as", "steps until then", "then"],
                    [_fault_row(run, runs) for run in sorted(faulty, key=lambda one: _order(one, runs))],
                ),
                _silence(faulty, runs),
                f"{len(runs)} of {planned} planned runs are made. Every run: [{ROWS}]({ROWS}). Made by "
                "`python -m headwise_papers.alarms.elsewhere --out FOLDER --data FOLDER` "
                f"in {sum(run['seconds'] for run in runs) / 60:.0f} minutes of one core.",
            ]
        )
        + "\n"
    )


REPAIRED = (
    "`sorted_batches` was repaired after a false alarm in these runs (29 November 2026): it measured the waves of a "
    "loss about a line, and a loss that falls fast bends. It now measures them about a parabola, at the same limit. "
    "Losses are judged here by the repaired rule; the alerts when the runs were made are in a column of the table of "
    "runs. `loss_spike` was a rule on single steps then, and asks since for two in a row."
)


def _before(healthy: Sequence[Run]) -> str:
    """Return how many false alarms there were when the runs were made, and which today's rules no longer raise."""
    steps = sum(run["steps"] for run in healthy)
    made = sum(len({alert[0] for alert in run["when made"]}) for run in healthy)
    low, high = (10 * one for one in false_interval(Point("when made", math.nan, 0, (), made, steps)))
    rate = f"{1e4 * made / steps:.2f} [{low:.2f}, {high:.2f}] in 10,000"
    then = f"False alarms when the runs were made: {made or 'none'} in {steps:,} healthy steps, {rate}."
    gone = [
        f"{run['family']}, {_habit(run)}, seed {run['seed']}, step {step}, `{name}`"
        for run in healthy
        for step, name in sorted({(a[0], a[1]) for a in run["when made"]} - {(a[0], a[1]) for a in run["alerts"]})
    ]
    return then + (f" Raised then and no longer: {'; '.join(gone)}." if gone else "")


def _habit(run: Run) -> str:
    return str(run["script"]) + (f", rate × {run['rate']:g}" if run["group"] == "usual" else "")


def _healthy_row(says: str, healthy: Sequence[Run]) -> list[str]:
    own = [run for run in healthy if _habit(run) == says]
    ratio = [run["evaluated"][-1][1] / run["evaluated"][0][1] for run in own]
    false = sum(len(alarms_of(run)) for run in own)
    families = len({run["family"] for run in own})
    held_out = f"× {min(ratio):.2f} to × {max(ratio):.2f}"
    steps = sum(run["steps"] for run in own)
    return [says, str(families), str(len(own)), f"{steps:,}", held_out, str(false or "none")]


def _false_alarms(healthy: Sequence[Run]) -> list[str]:
    figures = content(healthy)["any rule"]
    false, steps = figures["false_alarms"], figures["healthy_steps"]
    low, high = (10 * one for one in figures["per_1000"][1:])
    needed = math.ceil(-math.log(0.025) / TARGET)
    models = ", ".join(dict.fromkeys(run["family"] for run in healthy))
    found = [
        f"- {run['family']}, {_habit(run)}, seed {run['seed']}, step {step}, `{name}`: {sentence}."
        for run in healthy
        for step, name, sentence in run["alerts"]
    ]
    verdict = (
        f"This shows at most one in 10,000 ({needed:,} steps without one would do)."
        if high <= 1e4 * TARGET
        else f"At most one in 10,000 is not shown: {needed:,} steps without one would show it."
    )
    alarms = f"{false or 'no'} false alarm{'' if false == 1 else 's'} in {steps:,} healthy steps"
    return [
        f"By the rules of today: {alarms} of {len(healthy)} runs ({models}): "
        f"{10_000 * false / steps:.2f} [{low:.2f}, {high:.2f}] in 10,000 (Garwood's interval). {verdict}",
        *(["\n".join(found)] if found else []),
    ]


def _fault_row(run: Run, runs: Sequence[Run]) -> list[str]:
    shows, named = shown_in(run, runs), _first(run)
    then = list(dict.fromkeys(name for step, name, _ in run["alerts"] if step >= run["onset"]))
    began = "nothing" if named is None else f"`{named[1]}`"
    return [
        run["script"],
        run["family"],
        "never" if shows is None else str(shows - run["onset"]),
        began,
        "–" if named is None else str(named[0] - run["onset"]),
        ", ".join(f"`{name}`" for name in then if named and name != named[1]) or "–",
    ]


def _first(run: Run) -> tuple[int, str] | None:
    """Return the step of the first alert since the onset, and the kind that the report names as its beginning."""
    alerts = [(step, CAUSES.index(name), name) for step, name, _ in run["alerts"] if step >= run["onset"]]
    return (min(alerts)[0], min(alerts)[2]) if alerts else None


def _order(run: Run, runs: Sequence[Run]) -> tuple[bool, bool, str]:
    return _first(run) is None, shown_in(run, runs) is None, run["script"]


def _silence(faulty: Sequence[Run], runs: Sequence[Run]) -> str:
    shown_ones = [run for run in faulty if shown_in(run, runs) is not None]
    silent = [run for run in shown_ones if _first(run) is None]
    harmless = [run for run in faulty if shown_in(run, runs) is None]
    kinds = "; ".join(dict.fromkeys(run["script"] for run in silent)) or "none"
    return (
        f"Of {len(faulty)} runs with a fault {len(shown_ones)} show it in the loss; {len(shown_ones) - len(silent)} of "
        f"those raise an alert. Silent although the loss shows them: {kinds}. Of the {len(harmless)} that do not show, "
        f"{sum(_first(run) is not None for run in harmless)} raise an alert."
    )
