"""The result of a script's run: curves, outcomes and evidence of pairs from its records, or an error."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from headwise.lab.files.script_run import TOLD, VARIABLE, read_told
from headwise.lab.training.divergence import Smoothed
from headwise.lab.training.job import ScriptOrder
from headwise_verdict import StudyError
from headwise_verdict.files import restore_lines
from headwise_verdict.results import Divergence, EpochLine, RunResult

# points of a curve that the report draws; more are averaged
POINTS = 200


class Telling:
    """The records of all starts of a run; of several points at one step, the latest counts."""

    def __init__(self, folder: Path, leave_out: Path | None = None) -> None:
        streams = sorted((folder / TOLD).glob("*.jsonl"), key=lambda path: int(path.stem))
        streams = [stream for stream in streams if stream != leave_out]
        self.starts = [read_told(stream) for stream in streams]
        self.last = self.starts[-1] if self.starts else []

    def logs(self) -> list[dict[str, Any]]:
        """Return the points by step; those of a resumed start replace earlier ones from its first step on."""
        points: list[dict[str, Any]] = []
        for lines in self.starts:
            logged = [line for line in lines if line["told"] == "log"]
            if logged:
                first = min(line["step"] for line in logged)
                points = [line for line in points if line["step"] < first] + logged
        return list({line["step"]: line for line in points}.values())

    def records(self) -> dict[str, dict[str, float]]:
        """Return the last start's recorded figures by split; evaluated ones count if not recorded."""
        figures: dict[str, dict[str, float]] = {}
        for line in self.last:
            if line["told"] == "evaluate":
                figures.setdefault(line["split"], {}).update(line["figures"])
        for line in self.last:
            if line["told"] == "record":
                figures.setdefault(line["split"], {}).update(line["figures"])
        return figures

    def evidence(self) -> dict[str, str]:
        """Return the digests of the initial weights, as first recorded, and of the first 1, 2, 4, … batches.

        A resumed start trains again on the batches after its checkpoint, so its digests replace earlier ones.
        """
        digests: dict[str, str] = {}
        for lines in self.starts:
            weights = next((line["digest"] for line in lines if line["told"] == "weights"), None)
            if weights is not None:
                digests.setdefault("weights", weights)
            digests |= {f"data/{line['count']}": line["digest"] for line in lines if line["told"] == "saw"}
        return digests

    def first(self, kind: str) -> dict[str, Any] | None:
        """Return the first record of a kind in any start, or None."""
        return next((line for lines in self.starts for line in lines if line["told"] == kind), None)


class DivergenceCheck:
    """A check of a run's logged losses, in their order, by the study's divergence rule."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.divergence_factor: float | None = settings.get("divergence_factor")
        self.divergence_smoothing: float = settings.get("divergence_smoothing", 0.95)
        self._smoothed = Smoothed()

    def hear(self, points: list[dict[str, Any]]) -> Divergence | None:
        """Add points; return the first divergence, or None."""
        for point in points:
            if "loss" in point["figures"]:
                divergence = self._smoothed.first_bad(self, [float(point["figures"]["loss"])], point["step"] - 1)
                if divergence is not None:
                    return divergence
        return None


def result_of(order: ScriptOrder, divergence: Divergence | None) -> RunResult:
    """Write the curves of a run that ended and return its result.

    Raises:
        StudyError: if the script recorded nothing, not the requested outcomes, an outcome twice, or never fitted the
            arm's methods.
    """
    telling = Telling(order.folder)
    logs = telling.logs()
    epochs = curve(logs if divergence is None else [line for line in logs if line["step"] <= divergence.step])
    restore_lines(order.files.metrics, [line.model_dump(mode="json") for line in epochs])
    metrics: dict[str, float | None] = {}
    if divergence is None:
        metrics |= _outcomes(order, telling)
    metrics.setdefault(order.primary, None)
    if order.watch:
        # imports torch, which a script that is not watched need not have
        from headwise.lab.training.heads import alert_outcomes

        metrics |= alert_outcomes(order.files.health, divergence)
    metrics |= _costs(telling, logs)
    return order.ended(
        metrics,
        divergence,
        steps=max((line["step"] for line in logs), default=0),
        epochs=len(epochs),
        phases=["train"] if epochs else [],
        evidence=telling.evidence(),
    )


def _outcomes(order: ScriptOrder, telling: Telling) -> dict[str, float]:
    records, configuration = telling.records(), order.configuration
    trial = configuration.purpose == "trial"
    if configuration.methods and telling.first("regularized") is None:
        raise StudyError(
            f"{configuration.arm} was requested and never acted: the script never called run.regularize(model)."
        )
    if configuration.methods and telling.first("acted") is None:
        raise StudyError(
            f"{configuration.arm} was requested and never acted: the model that run.regularize fitted was not trained."
        )
    if not records:
        raise told_nothing(order, telling)
    seen: set[tuple[str, str]] = set()
    for line in telling.last:
        names = {(line["split"], name) for name in line["figures"]} if line["told"] == "record" else set()
        if seen & names:
            raise StudyError(
                f"it recorded {'/'.join(min(seen & names))} twice. Call run.record() once, when the "
                "training has ended, and only in the process with RANK=0."
            )
        seen |= names
    outcomes = {f"{split}/{name}": value for split, figures in records.items() for name, value in figures.items()}
    if trial:
        # tuning never sees test figures
        outcomes = {name: value for name, value in outcomes.items() if name.startswith("validation/")}
    deciding, _, primary = order.primary.partition("/")
    requested = (
        [f"validation/{primary}"] if trial else [order.primary, *(f"{deciding}/{name}" for name in order.outcomes)]
    )
    for name in requested:
        # a Trainer prints as eval_loss what its callback records as loss
        if name not in outcomes and (recorded := name.replace("/eval_", "/", 1)) in outcomes:
            outcomes[name] = outcomes.pop(recorded)
    missing = next((name for name in requested if name not in outcomes), None)
    if missing is not None:
        split, _, name = missing.partition("/")
        other = ", ".join(f"{split}/{name}" for split, figures in records.items() for name in figures)
        call = _call(name, f'split="{split}", ' if split != "test" else "")
        raise StudyError(f"it recorded {other}, and the study asks for {missing}. Call {call}, or change --outcome.")
    for name in sorted({name for figures in records.values() for name in figures}):
        if f"train/{name}" in outcomes and f"test/{name}" in outcomes:
            outcomes[f"gap/{name}"] = outcomes[f"train/{name}"] - outcomes[f"test/{name}"]
    return outcomes


def told_nothing(order: ScriptOrder, telling: Telling) -> StudyError:
    """Return the error of a script that ended normally and recorded nothing."""
    call = _call(order.primary.partition("/")[2])
    if telling.first("begin") is None:
        return StudyError(
            f"it ended and recorded nothing: it never called headwise.run(), or was started without {VARIABLE} in its "
            f"environment, as in a container. Call run = headwise.run(), and {call} at the end."
        )
    return StudyError(f"it ended without an outcome. Call {call} when the training has ended.")


def _call(name: str, split: str = "") -> str:
    """Return the call that records a figure; a name such as eval/loss is no keyword of Python."""
    return f"run.record({split}{name}=...)" if name.isidentifier() else f"run.record({split}**{{{name!r}: ...}})"


def _costs(telling: Telling, logs: list[dict[str, Any]]) -> dict[str, float | None]:
    weights = telling.first("weights")
    costs: dict[str, float | None] = {} if weights is None else {"cost/parameters": weights["parameters"]}
    # only within one start: there is a pause between two
    times = [
        (after["at"] - before["at"]) / (after["step"] - before["step"])
        for before, after in itertools.pairwise(logs)
        if after["step"] > before["step"] and after["at"] > before["at"]
    ]
    return costs | ({"cost/seconds_per_step": statistics.median(times)} if times else {})


def curve(logs: list[dict[str, Any]]) -> list[EpochLine]:
    """Return a run's points as at most 200 lines, each the mean of consecutive points."""
    logs = sorted(logs, key=lambda line: line["step"])
    width = max(1, -(-len(logs) // POINTS))
    lines, before = [], 0
    for number, at in enumerate(range(0, len(logs), width), 1):
        part = logs[at : at + width]
        names = dict.fromkeys(name for line in part for name in line["figures"])
        metrics = {
            _outcome(name): _mean([line["figures"][name] for line in part if name in line["figures"]]) for name in names
        }
        last = part[-1]["step"]
        seconds = max(0.0, part[-1]["at"] - (logs[at - 1]["at"] if at else part[0]["at"]))
        lines.append(
            EpochLine(
                epoch=number,
                phase="train",
                step=last,
                steps=max(0, last - before),
                seconds=round(seconds, 4),
                metrics=metrics,
            )
        )
        before = last
    return lines


def _outcome(name: str) -> str:
    """Return a figure's name in the curves as an outcome name; one without a split belongs to training."""
    split, mark, rest = name.partition("_")
    return f"{split}/{rest}" if mark and split in ("train", "validation", "test") else f"train/{name}"


def _mean(values: list[float | str]) -> float | None:
    numbers = [float(value) for value in values]
    mean = math.fsum(numbers) / len(numbers) if all(map(math.isfinite, numbers)) else math.nan
    return mean if math.isfinite(mean) else None
