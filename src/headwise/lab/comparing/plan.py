"""The plan of a study and its rehearsal: every arm is checked, then trained for a few steps."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from headwise.lab.comparing.comparison import Comparison
from headwise.lab.comparing.order_queue import place_of
from headwise.lab.experiments.arm import Arm
from headwise.lab.experiments.configuration import BASELINE, SAME
from headwise.lab.experiments.recipe import Recipe
from headwise.lab.experiments.script import Script, source_of
from headwise.lab.experiments.study import Study
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task import Task
from headwise.lab.files.data_set import DataSet
from headwise.lab.training.job import Order, Rehearsal, ScriptOrder
from headwise.lab.training.preflight import check_task, evaluations_of
from headwise.lab.training.splits import examples_of
from headwise.lab.training.task_code import build_model
from headwise_verdict import StudyError
from headwise_verdict.files import count
from headwise_verdict.results import RunResult, why_no_pair

WIDTH = 80
# numbers of 4 bytes in a checkpoint for each parameter: the weight and Adam's two means
KEPT = 3
AGAIN = "Nothing was trained: repair it and start the same command again."


def check_arms(arms: Iterable[Arm], task: Subject) -> None:
    """Raise StudyError for an arm with an invalid task, missing layers, or other data than the baseline's.

    Models are built and data is read only for arms that need it; a script is checked when it is tried.

    Raises:
        StudyError: naming the arm.
    """
    if not isinstance(task, Task):
        return
    for arm in arms:
        check_task(arm.task(task))
        try:
            _check_where(arm, task)
            _check_data(arm, task)
        except StudyError as error:
            raise StudyError(f"{arm.text}: {error}") from error


def _check_where(arm: Arm, task: Task) -> None:
    if arm.where is None:
        return
    from headwise.attend import sites

    with torch.random.fork_rng(devices=[]):
        arm.where.check(sites(build_model(arm.task(task))))


def _check_data(arm: Arm, task: Task) -> None:
    names = [name for name, _ in arm.changes if name not in Recipe.model_fields]
    if not names:
        return
    changed = arm.task(task)
    if _trained(changed) != _trained(task):
        raise StudyError(
            f"its changes ({', '.join(names)}) train it on {', '.join(_trained(changed))}, the baseline on "
            f"{', '.join(_trained(task))}, so its runs would not be paired. Change this for all arms with --set."
        )
    for split in _splits(task):
        if not _equal(examples_of(task, split), examples_of(changed, split)):
            raise StudyError(
                f"its changes ({', '.join(names)}) give it other {split} examples than the baseline's, so its runs "
                "would not be paired. Change this for all arms with --set, or change what happens to a batch."
            )


def _splits(task: Task) -> list[str]:
    """Return the splits that runs of a task train on and are judged on."""
    judged = [evaluation.split for evaluation in evaluations_of(task)]
    # for an evaluation, "train" is the split that its phase trains on
    return list(dict.fromkeys([*_trained(task), "validation", *(split for split in judged if split != "train")]))


def _trained(task: Task) -> list[str]:
    return list(dict.fromkeys(phase.data for phase in task.phases()))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_values(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one is other or one == other)


def _same_values(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not one.is_floating_point():
        return False
    # NaN is not equal to itself: compare where it occurs, then the other values
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def rehearse(comparison: Comparison) -> list[str]:
    """Try every arm that has no started run, and return the lines of the plan; empty if there was nothing to try.

    With `plan_only`, the plan includes the times of finished runs, and says if nothing can be tried.

    Raises:
        StudyError: naming the arms that fail.
    """
    study, plan_only = comparison.study, comparison.plan_only
    orders = list(map(comparison.order, study.configurations()))
    results = [order.result() for order in orders]
    left = [order for order, result in zip(orders, results) if result is None]
    why_not = _why_not(comparison, left)
    if why_not:
        return _wrapped(f"plan:   {_runs(len(left), _trials(comparison))}{why_not}") if plan_only else []
    measured = {result.arm: _measured(result) for result in results if result is not None}
    begun = {order.configuration.arm for order in orders if not plan_only and (order.folder / "config.json").exists()}
    first = {order.configuration.arm: order for order in reversed(orders)}
    chosen = [first[arm] for arm in study.arms if arm not in begun and arm not in measured]
    tried: list[dict[str, Any]] = []
    if chosen and (plan_only or len(study.arms) > 1):
        comparison.listener.say(f"trying {count(len(chosen), 'arm')} for {_tried(study)} before the first run ...")
        for line in _forgotten(study):
            comparison.listener.say(line)
        tried = _of_task(comparison, chosen) if isinstance(study.task, Task) else _of_script(comparison, chosen)
    known = measured | {entry["arm"]: entry for entry in tried}
    return describe(comparison, [known[arm] for arm in study.arms if arm in known], left) if tried or plan_only else []


def _why_not(comparison: Comparison, left: list[Order]) -> str:
    """Return why no arm is tried, as text that follows the number of runs; "" if arms are tried."""
    if not left:
        return ": all are finished"
    if comparison.trials and (comparison.out / "trials").exists():
        return "; trials have begun: the same command without --plan resumes them"
    if not comparison.engine.rehearses:
        return (
            "; nothing was tried, as that would wait in the queue of Slurm. The same command without --engine and "
            "--slurm tries every arm here, and shows layers and minutes"
        )
    return ""


def _measured(result: RunResult) -> dict[str, Any]:
    """Return the costs of a finished run."""
    seconds, parameters = (result.metrics.get(f"cost/{name}") for name in ("seconds_per_step", "parameters"))
    costs = {"seconds": seconds, "parameters": parameters}
    return {"arm": result.arm, "layers": None, "of": 0, "steps": result.steps or None} | costs


def _of_task(comparison: Comparison, orders: list[Order]) -> list[dict[str, Any]]:
    first = orders[0]
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    arms = tuple(order.configuration for order in orders)
    comparison.engine.submit(Rehearsal(**fields | {"folder": first.folder.with_name("rehearsal")}, arms=arms))
    entries: list[dict[str, Any]] = []
    printed: set[str] = set()
    for event in comparison.engine.events():
        if event["event"] == "failed":
            raise StudyError("\n".join(filter(None, (event["reason"], event["trace"].rstrip(), AGAIN))))
        # the models of all arms print the same lines while loading here
        if (text := event.get("text", "")) not in printed:
            printed.add(text)
            _tell(comparison, event)
        if event["event"] == "done":
            entries = event["result"]
    return entries


def _of_script(comparison: Comparison, orders: list[Order]) -> list[dict[str, Any]]:
    """Start the script once for each arm, end it after its third step, and return the costs."""
    tried: dict[str, Order] = {}
    for number, order in enumerate(orders):
        assert isinstance(order, ScriptOrder)
        folder = comparison.out.resolve() / "rehearsal" / str(number)
        tried[order.identity] = dataclasses.replace(order, folder=folder, tries=True, watch=False)
        comparison.engine.submit(tried[order.identity])
    problems: dict[str, list[str]] = defaultdict(list)
    printed: dict[str, str] = {}
    entries = {}
    for event in comparison.engine.events():
        arm = tried[event["run"]].configuration.arm
        if event["event"] == "failed":
            reason = f"{event['reason']}{place_of(event['trace'])}"
            problems[reason].append(arm)
            printed.setdefault(reason, event.get("printed", ""))
        elif event["event"] == "done":
            entries[arm] = {"arm": arm, "of": 0, **event["result"]}
            entries[arm]["layers"] = len(event["result"]["layers"])
        else:
            _tell(comparison, event)
    if problems:
        lines = [f"{'; '.join(arms)}: {reason}{printed[reason]}" for reason, arms in problems.items()]
        raise StudyError("\n".join([*lines, AGAIN]))
    told = [entries[order.configuration.arm] for order in orders]
    for line in _unpaired(told):
        comparison.listener.say(line)
    return told


def _unpaired(entries: list[dict[str, Any]]) -> list[str]:
    """Return a note if arms that were tried with one seed began differently: the usual cause is a seed set too late."""
    base: dict[str, str] = next((entry["evidence"] for entry in entries if entry["arm"] == BASELINE), {})
    tried = {entry["arm"]: entry["evidence"] for entry in entries if entry["arm"] != SAME}
    differing = {arm: why for arm, own in tried.items() if (why := why_no_pair(base, own))}
    if not differing:
        return []
    arm, why = next(iter(differing.items()))
    others = len(differing) - 1
    more = f" (the same for {count(others, 'other arm')})" if others else ""
    text = (
        f"note: {arm} and {BASELINE} do not start alike with the same seed: {why}{more}. Call "
        "torch.manual_seed(run.seed) before the model is built and the data are shuffled; without pairs, differences "
        "are harder to detect."
    )
    return _wrapped(text, then="")


def _forgotten(study: Study) -> list[str]:
    """Return a note on a script that does not mention headwise: it would train to its end and give no outcome."""
    source = source_of(study.task.script) if isinstance(study.task, Script) else None
    if source is None or b"headwise" in source.read_bytes().lower():
        return []
    text = (
        f"note: {source} does not mention headwise. Unless a module that it imports calls headwise.run(), it trains to "
        "its end and has no outcome. It needs run = headwise.run(), run.regularize(model) and run.record(...)."
    )
    return _wrapped(text, then="")


def _tried(study: Study) -> str:
    return "a batch" if isinstance(study.task, Task) else "three steps"


def _tell(comparison: Comparison, event: dict[str, Any]) -> None:
    if event["event"] == "note":
        comparison.listener.say(f"note: {event['text']}")
    if event["event"] == "output":
        comparison.listener.say(event["text"])


def plan_without(absent: list[DataSet], study: Study, trials: int, took: str = "") -> list[str]:
    """Return the plan of a study whose data is not present: a plan downloads nothing.

    `took` is the sentence on how long its kept runs took, if any.
    """
    names = ", ".join(data.name for data in absent)
    sizes = [data.megabytes for data in absent if data.megabytes is not None]
    size = f" ({_bytes(int(sum(sizes) * 10**6))} unpacked)" if sizes else ""
    text = (
        f"{_runs(len(study.arms) * study.seeds, len(study.arms) * trials)}; layers and minutes are known once "
        f"{names} is here. Nothing was downloaded: the same command without --plan downloads it first{size}."
        + (f" {took}" if took else "")
    )
    return textwrap.wrap(text, WIDTH, initial_indent="plan:   ", subsequent_indent=" " * 8, break_long_words=False)


def _wrapped(text: str, begin: str = "", then: str = " " * 8) -> list[str]:
    """Return a line of the plan wrapped at 80 columns; a hard space keeps a number and its unit on one line."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=begin, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\u00a0", " ") for line in lines]


def _trials(comparison: Comparison) -> int:
    return len(comparison.study.arms) * comparison.trials


def _runs(runs: int, trials: int) -> str:
    return count(runs, "run") + (f" after {count(trials, 'trial')}" if trials else "")


def describe(comparison: Comparison, entries: list[dict[str, Any]], left: list[Order]) -> list[str]:
    """Return the plan in lines of 80 columns: runs, layers reached, time and disk space, as far as they are known."""
    runs: dict[str, int] = defaultdict(int)
    for order in left:
        runs[order.configuration.arm] += 1
    tried = any(entry["layers"] is not None for entry in entries)
    how = f"each arm tried for {_tried(comparison.study)}" if tried else "as finished ones took"
    lines = [f"plan:   {_runs(len(left), _trials(comparison))}, {how}"]
    disk = 0
    for entry in entries:
        arm, time = entry["arm"], entry["seconds"]
        methods = bool(comparison.study.arm(arm).methods)
        parts = [_layers(entry)] if methods and entry["layers"] is not None else []
        parts += [f"{_milli(time)} ms a step"] if time is not None else []
        parts += [f"{clock(time * entry['steps'])} a run"] if time is not None and entry["steps"] is not None else []
        joined = ", ".join(part.replace(" ", "\u00a0") for part in parts)
        lines += _wrapped(f"{arm}: {joined or 'as it is'}", " " * 8, " " * 10)
        disk += 4 * KEPT * int(entry["parameters"] or 0) * (runs[arm] + comparison.trials)
    lines += _time(comparison, entries, runs)
    if disk and comparison.script is not None:
        lines.append(f"disk:   {_bytes(disk)} if each run keeps one checkpoint with Adam's moments")
    elif disk:
        lines.append(f"disk:   at most {_bytes(disk)} of checkpoints")
    return lines


def _layers(entry: dict[str, Any]) -> str:
    if not entry["layers"]:
        return "no attention layer: its methods act on the rest of the model"
    return f"{entry['layers']} of {count(entry['of'], 'layer')}" if entry["of"] else count(entry["layers"], "layer")


def _time(comparison: Comparison, entries: list[dict[str, Any]], runs: dict[str, int]) -> list[str]:
    """Return the line on the duration of the study, or on how to learn it."""
    at_once = f", {comparison.jobs} at a time" if comparison.jobs > 1 else ""
    repeats = [(runs[entry["arm"]] + comparison.trials) / comparison.jobs for entry in entries]
    steps, seconds = ([entry[name] for entry in entries] for name in ("steps", "seconds"))
    if not entries or (comparison.script is None and None in (*steps, *seconds)):
        return []
    if None in seconds:
        return _wrapped("time:   not known: no step was seen. run.log(step=..., loss=...) after each step shows them")
    if None in steps:
        thousand = clock(sum(1000 * time * times for time, times in zip(seconds, repeats)))
        return _wrapped(
            f"time:   about {thousand} in total if each run has 1,000 steps{at_once}; run.regularize(model, steps=N) "
            "gives the total for N"
        )
    whole = clock(sum(time * number * times for time, number, times in zip(seconds, steps, repeats)))
    timed = ", each phase timed as the first" if any(entry.get("phases", 1) > 1 for entry in entries) else ""
    return _wrapped(f"time:   about {whole} of training{at_once}{timed}, without evaluations")


def clock(seconds: float) -> str:
    """Return a duration in the unit that fits."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{_digits(seconds / size, 3)} {unit}"
    return f"{_digits(max(seconds, 0.1), 2)} s"


def _digits(number: float, digits: int) -> str:
    """Return a number with so many digits, never with a power of ten."""
    return f"{number:,.0f}" if number >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def _milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _bytes(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1000:.3g} kB"
