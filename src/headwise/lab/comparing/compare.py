"""Carry out a study: plan it, lock its folder, run what is missing, and write its record."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from headwise.files.durable import write_json
from headwise.lab.comparing.comparison import Comparison
from headwise.lab.comparing.order_queue import run_orders
from headwise.lab.comparing.plan import check_arms, rehearse
from headwise.lab.comparing.tune import tune
from headwise.lab.experiments.configuration import BASELINE, SAME
from headwise.lab.experiments.study import Study
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task import Task
from headwise.lab.training.job import Order, is_first_process
from headwise.lab.training.phases import part_of
from headwise.lab.training.preflight import evaluations_of
from headwise_verdict import StudyError
from headwise_verdict.files import count, explain, read_json
from headwise_verdict.results import Claim, ClaimTest, Premise, RunResult, StudyFiles, StudyRecord, why_no_pair


def free_folder(folder: Path, study: Study, trials: int) -> Path:
    """Return `folder`, or a folder next to it named by the study's identity if `folder` holds anything else."""
    files = StudyFiles(folder)
    if other_study(folder, study, trials) is None and (files.known() is not None or files.may_be_claimed()):
        return folder
    return folder.with_name(f"{folder.name}-{study.identity(trials)[:6]}")


def refuse_other_study(folder: Path, study: Study, trials: int) -> None:
    """Raise StudyError if a folder holds another study, or more seeds of this one, which must not be overwritten.

    Raises:
        StudyError: with what the folder holds.
    """
    holds = other_study(folder, study, trials) or _more_seeds(folder, study)
    if holds:
        raise StudyError(
            f"{folder} holds {holds}. Its report must not be overwritten: choose another --out, or delete {folder}."
        )


def other_study(folder: Path, study: Study, trials: int) -> str | None:
    """Return a description of the other study that a folder holds, or None if it holds none or this one."""
    files = StudyFiles(folder)
    findings, known = read_json(files.findings), files.known()
    if isinstance(findings, dict):
        return f"the findings of the study {findings.get('name', '?')}"
    if known is None or known.get("identity") == study.identity(trials):
        return None
    arms = [arm for arm in known.get("arms", []) if isinstance(arm, str)]
    missing = [arm for arm in arms if arm not in study.arms]
    added = [arm for arm in study.arms if arm not in arms]
    if known.get("name") != study.name or (not missing and not added):
        return f"the study {known.get('name', '?')} with other settings{_changed_settings(known, study)}"
    parts = [f"with {', '.join(missing)}"] if missing else []
    parts += [f"without {', '.join(added)}"] if added else []
    return f"the study {study.name} {' and '.join(parts)}"


def _changed_settings(known: dict[str, Any], study: Study) -> str:
    settings, off = known.get("settings"), {"compile": "off"}
    if not isinstance(settings, dict):
        return ""
    before, now = off | settings, off | study.computing | study.task.model_dump(mode="json")
    changed = [f"{name} {before[name]}" for name, value in now.items() if name in before and before[name] != value]
    return f" ({', '.join(changed[:3])})" if changed else ""


def _more_seeds(folder: Path, study: Study) -> str | None:
    known = StudyFiles(folder).known()
    seeds = known.get("seeds") if known is not None else None
    if isinstance(seeds, list) and len(seeds) > study.seeds:
        return f"{len(seeds)} seeds of this study, and --seeds {study.seeds} would leave some out of its report"
    return None


def compare(comparison: Comparison) -> list[RunResult]:
    """Carry out the missing runs of a study and return all results; the folder stores everything.

    Raises StudyError if the task or an arm is invalid, if the folder is locked, full or not writable, or if runs
    failed, after the others are finished.

    Example:
        >>> import io, tempfile
        >>> from pathlib import Path
        >>> from headwise.lab.comparing.comparison import Comparison
        >>> from headwise.lab.engines.local import HereEngine
        >>> from headwise.lab.comparing.progress import PlainLines
        >>> from headwise.lab.comparing.compare import compare
        >>> from headwise.lab.studies.digits import STUDY
        >>> task = STUDY.task.model_copy(update={"epochs": 1, "train_size": 64, "test_size": 64})
        >>> study = STUDY.model_copy(update={"task": task, "methods": ("DropHead(p=0.2)",), "seeds": 1})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = compare(Comparison(study, Path(folder), HereEngine(), PlainLines(io.StringIO())))
        >>> [result.arm for result in results]
        ['baseline', 'DropHead(p=0.2)']
    """
    out = comparison.out
    check_arms(comparison.study.parsed.values(), comparison.study.task)
    try:
        # fails where `out` is a file
        out.mkdir(parents=True, exist_ok=True)
        if is_first_process():
            refuse_other_study(out, comparison.study, comparison.trials)
            StudyFiles(out).claim()
        with locked(out) if is_first_process() else nullcontext():
            refuse_other_study(out, comparison.study, comparison.trials)
            configurations = comparison.study.configurations()
            notes = list(comparison.study.notes)
            if comparison.trials and comparison.study.processes > 1:
                raise StudyError(
                    "--tune works with one process a run. Tune without `accelerate launch`, then run with it."
                )
            if comparison.rehearse or comparison.plan_only:
                _rehearse(comparison)
            if comparison.plan_only:
                return []
            if comparison.trials:
                configurations, tuning_notes = tune(comparison)
                notes += tuning_notes
            orders = [comparison.order(configuration) for configuration in configurations]
            _report_strangers(comparison, orders)
            _write_study(comparison, orders, notes)
            results = run_orders(comparison, orders, _pairs_wanted(comparison))
            # write it again: now every result records its environment
            _write_study(comparison, orders, notes)
            return results
    except OSError as error:
        raise explain(error, out) from error


def _rehearse(comparison: Comparison) -> None:
    for line in rehearse(comparison):
        comparison.listener.say(line)


def _pairs_wanted(comparison: Comparison) -> Callable[[Order, RunResult], None]:
    """Return a check of each result; with --require-pairs, it stops the study at the first arms that are not paired."""
    known: dict[tuple[str, int], RunResult] = {}

    def check_pair(order: Order, result: RunResult) -> None:
        known[result.arm, result.seed] = result
        if not comparison.require_pairs:
            return
        base = known.get((BASELINE, result.seed))
        for one in [result] if result.arm != BASELINE else [r for (_, seed), r in known.items() if seed == result.seed]:
            if base is not None and one.arm != SAME and (why := why_no_pair(base.evidence, one.evidence)):
                raise StudyError(
                    f"{one.arm} and {BASELINE}, seed {one.seed}, are not paired: {why}. Seed the script with run.seed "
                    "before the model is built and the data are shuffled, or leave --require-pairs out: they are then "
                    "judged as not paired."
                )

    return check_pair


def _write_study(comparison: Comparison, orders: list[Order], notes: list[str]) -> None:
    if is_first_process():
        results = [result for order in orders if (result := order.result())]
        StudyFiles(comparison.out).write(describe(comparison, orders, notes), results)


def _report_strangers(comparison: Comparison, orders: list[Order]) -> None:
    if is_first_process():
        for stranger in StudyFiles(comparison.out).strangers([order.identity for order in orders]):
            comparison.listener.say(f"note: {stranger} is not a run of this study and is omitted")


def describe(comparison: Comparison, orders: list[Order], notes: list[str]) -> StudyRecord:
    """Return the record of the study with its present runs, in this environment."""
    study, task = comparison.study, comparison.study.task
    arms = list(dict.fromkeys(order.configuration.arm for order in orders))
    here = comparison.environment
    # plain data, which the record checks
    metrics: list[Any] = [dataclasses.asdict(metric) for metric in task.all_metrics()]
    runs: list[Any] = [
        {"hash": order.identity, "arm": order.configuration.arm, "seed": order.configuration.seed} for order in orders
    ]
    return StudyRecord(
        format=2,
        name=study.name,
        scale=study.scale,
        identity=study.identity(comparison.trials),
        title=study.title,
        question=study.question,
        arms=arms,
        baseline=arms[0],
        seeds=list(range(study.seeds)),
        primary=task.primary(),
        metrics=metrics,
        evaluations=_evaluations(task),
        margin=study.margin,
        # tuning changes the values of arms, so that they are no longer on the axis
        axes=[axis for axis in study.axes if set(axis.arms) <= set(arms)],
        claims=_as_run(study, arms, study.claims),
        premises=_as_run(study, arms, study.premises),
        settings=_settings(comparison),
        runs=runs,
        command=comparison.command,
        commit=here.get("commit"),
        versions=here.get("versions"),
        hardware=here.get("hardware"),
        notes=notes,
    )


Stated = TypeVar("Stated", Claim, Premise)


def _as_run(study: Study, arms: list[str], statements: Sequence[Stated]) -> list[Stated]:
    """Return claims or premises whose tests name the arms as run: tuning changes their values."""
    run = dict(zip(study.arms, arms))

    def named(test: ClaimTest) -> ClaimTest:
        names = {"arm": run.get(test.arm, test.arm), "against": run.get(test.against, test.against)}
        return test.model_copy(update=names)

    return [claim.model_copy(update={"tests": tuple(map(named, claim.tests))}) for claim in statements]


def _evaluations(subject: Subject) -> list[str]:
    if isinstance(subject, Task):
        return [evaluation.name for evaluation in evaluations_of(subject)]
    # splits that a script may record: the deciding one last, as for a task
    return list(dict.fromkeys(("train", "validation", subject.decides_on)))


def _settings(comparison: Comparison) -> dict[str, Any]:
    study = comparison.study
    shared = {"task": study.task_place.rpartition(":")[2], **study.task.model_dump(mode="json")}
    parts = phases_in_words(study.task) if isinstance(study.task, Task) else ""
    if parts:
        shared = {name: value for name, value in shared.items() if name not in ("epochs", "steps")} | {"phases": parts}
    return shared | study.computing | {"seeds": study.seeds, "trials_per_arm": comparison.trials}


def phases_in_words(task: Task) -> str:
    """Return the length of each phase in words, or an empty string for a single phase."""
    parts = [part_of(task, number) for number in range(len(task.phases()))]
    lengths = [
        count(part.task.steps, "step") if part.task.steps else count(part.task.epochs, "epoch") for part in parts
    ]
    words = [f"{part.phase.name} {length}" for part, length in zip(parts, lengths)]
    return ", then ".join(words) if len(words) > 1 else ""


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Lock the folder for one process; the system releases the lock when the process ends for any reason."""
    holder = out / ".lock.json"
    try:
        with FileLock(out / ".lock", timeout=0):
            write_json(holder, {"process": os.getpid(), "host": platform.node(), "since": time.strftime("%H:%M:%S")})
            yield
    except Timeout:
        owner = read_json(holder) or {}
        named = f"process {owner.get('process', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"
        raise StudyError(
            f"another headwise is working in {out} ({named}). Wait for it to end, or choose another --out."
        ) from None
