"""From a request to a study: the task with its settings, the arms, the seeds, the device; and its `--help`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from headwise.files.errors import suggest
from headwise.lab.comparing.claim_check import canonical_claims, canonical_premises
from headwise.lab.comparing.comparison import Started
from headwise.lab.comparing.request import Request, Studies
from headwise.lab.engines.local import worker_environment
from headwise.lab.engines.slurm_options import read_slurm_options
from headwise.lab.experiments.arm import AnySubject, read_arms, refuse_equal_arms
from headwise.lab.experiments.arm_settings import read_settings, write_setting
from headwise.lab.experiments.recipe import Recipe
from headwise.lab.experiments.script import check_form, name_of, script_of, source_of
from headwise.lab.experiments.study import Study, read_sweep
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task, installed_task, load_task
from headwise_verdict import StudyError
from headwise_verdict.results import Claim


def choose_study(request: Request) -> Study:
    """Return the requested study with the changes of the command line.

    Raises:
        StudyError: naming the arm, the setting or the scale that is invalid.
    """
    if request.script is not None:
        return choose_script_study(request)
    original = study = find_study(request)
    if not isinstance(study.task, Task):
        raise StudyError(f"{study.name} is about a script. Give its command with --script.")
    if request.scale is not None:
        study = scaled(study, request.scale)
    # claims are checked on the original study, because the command line may leave anything out
    claims, premises = canonical_claims(study), canonical_premises(study)
    task = changed(study.task, request)
    sweeps = request.sweeps or (() if request.methods else study.sweeps)
    check_sweeps(sweeps, task)
    methods = read_arms(request.methods or (() if request.sweeps else study.methods), task)
    if request.methods:
        refuse_equal_arms(list(methods.values()), task)
    update = {
        "task": task,
        "claims": claims,
        "premises": premises,
        "scale": scale_of(original, task),
        "methods": tuple(methods),
        "sweeps": sweeps,
        "seeds": request.seeds or study.seeds,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "device": _device_of_jobs(request) if request.engine == "slurm" else choose_device(request.device),
        "compile": request.compile,
        "watch": request.watch or study.watch,
    }
    chosen = study.model_copy(update=update)
    if request.graphs == "on":
        _refuse_uncaptured(chosen)
    return chosen


def _refuse_uncaptured(study: Study) -> None:
    """Raise StudyError if no step can be captured as a CUDA graph, before any run is tried."""
    import torch

    from headwise.lab.training.step_graphs import captures

    assert isinstance(study.task, Task)
    captures("on", study.task, torch.device(study.device), study.processes)


def find_study(request: Request) -> Study:
    """Return the built-in study of the request, or one of the user's own task, without changes."""
    if request.task is None:
        return request.studies.load(request.study).STUDY
    text = installed_task(request.task) or request.task
    place, _, name = text.rpartition(":")
    place = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else text
    kind = load_task(request.task)
    return Study(
        name=name, title=kind.title or name, question=kind.question, task=build_task(kind, {}), task_place=place
    )


def scaled(study: Study, name: str) -> Study:
    """Return the study at one of its scales; raise StudyError if it has no such scale."""
    if name not in study.scales:
        known = list(study.scales)
        have = f"Scales: {', '.join(known)}." if known else "The study has none; change its settings with --set."
        raise StudyError(f"--scale {name}: {study.name} has no such scale.{suggest(name, known)} {have}")
    scale = study.scales[name]
    task = build_task(type(study.task), study.task.model_dump() | scale.settings)
    return study.model_copy(update={"task": task, "seeds": scale.seeds or study.seeds})


def scale_of(study: Study, task: Subject) -> str:
    """Return the name of the scale with the settings of `task`; "default" for the study's own, else "other"."""
    for name, scale in study.scales.items():
        if build_task(type(study.task), study.task.model_dump() | scale.settings).model_dump() == task.model_dump():
            return name
    return "default" if task.model_dump() == study.task.model_dump() else "other"


def check_sweeps(texts: tuple[str, ...], task: Subject) -> None:
    """Raise StudyError for a text that is not an axis, and for two texts of the same axis."""
    known: dict[tuple[str, ...], str] = {}
    for text in texts:
        arms = tuple(read_sweep(text, task)[0].arms)
        if arms in known:
            raise StudyError(f"--sweep {known[arms]!r} and {text!r} are the same axis. Give one of them.")
        known[arms] = text


def changed(task: AnySubject, request: Request) -> AnySubject:
    changes: dict[str, Any] = {name: value for name, value in request.changes.items() if value is not None}
    for text in request.settings:
        try:
            settings = read_settings(text, task)
        except StudyError as error:
            raise StudyError(f"--set {text!r}: {error}") from error
        for name in settings:
            if name in changes:
                raise StudyError(f"--set {text!r}: {name} is given twice on the command line. Give it once.")
        changes |= settings
    return build_task(type(task), task.model_dump() | changes)


def _device_of_jobs(request: Request) -> str:
    """Return cpu or cuda for cluster jobs: their options decide, not the devices of the submitting machine."""
    if request.device == "cuda":
        return "cuda"
    gpu = request.device is None and read_slurm_options(request.slurm).wants_gpu
    return "cuda" if gpu else choose_device("cpu" if request.device is None else request.device)


def choose_script_study(request: Request) -> Study:
    """Return the study of a script: its arms are methods and changes of its arguments.

    Raises:
        StudyError: naming the arm, the outcome or the form of arguments that is invalid.
    """
    assert request.script is not None
    check_form(request.arguments or "argparse")
    source, name = source_of(request.script), name_of(request.script)
    kind = script_of(request.outcomes)
    task = changed(build_task(kind, {"script": request.script, "arguments": request.arguments or "argparse"}), request)
    check_sweeps(request.sweeps, task)
    arms = read_arms(request.methods, task)
    if not arms and not request.sweeps:
        raise StudyError(
            f"--script {request.script!r}: there is nothing to compare. Give arms: --method 'DropHead(p=0.1)'."
        )
    refuse_equal_arms(list(arms.values()), task)
    return Study(
        name=name,
        title=name,
        question=task.question,
        task=task,
        # a module or a program is identified by the command alone
        task_place=f"{source.resolve()}:{name}" if source is not None else f"headwise.script:{name}",
        methods=tuple(arms),
        sweeps=request.sweeps,
        seeds=request.seeds or 10,
        device=request.device or "its own",
        watch=request.watch,
    )


def started(request: Request) -> Started:
    """Return how the script is started: in this folder, with the current variables."""
    before = {name: os.environ.get(name) for name in worker_environment(1)}
    return Started(Path.cwd(), before, request.timeout)


def choose_device(requested: str | None) -> str:
    """Return cpu or cuda: the requested device if available, else the GPU if there is one."""
    import torch

    if requested not in (None, "cpu", "cuda"):
        raise StudyError(f"--device {requested!r} is not known. Devices: cpu, cuda.")
    if requested == "cuda" and not torch.cuda.is_available():
        raise StudyError("--device cuda: torch finds no CUDA device here. Use --device cpu, or install torch for CUDA.")
    return requested or ("cuda" if torch.cuda.is_available() else "cpu")


WIDTH = 80


def describe_request(study: str | None, task: str | None, scale: str | None, studies: Studies) -> str:
    """Return the settings of a built-in study, at the named scale if any, or of the user's own task, as text."""
    chosen = find_study(Request(study=study or "", task=task, studies=studies))
    return describe_settings(chosen if scale is None else scaled(chosen, scale), scale)


def describe_settings(study: Study, scale: str | None = None) -> str:
    """Return a study's description in lines of 80 characters: arms, claims, then settings, the recipe's last."""
    fields = type(study.task).model_fields
    own = [name for name in fields if name not in Recipe.model_fields and name not in Task.model_fields]
    shared = [name for name in Task.model_fields if name not in Recipe.model_fields]
    at = f", at the scale {scale}" if scale else ""
    parts = [_fill(f"{study.name}: {study.title}{at}, {study.seeds} seeds")]
    parts.append("\n".join(["Arms:", *(_fill(f"  {arm}") for arm in study.arms)]))
    if study.claims:
        parts.append("\n".join(["Claims:", *(_fill(line) for claim in study.claims for line in _claim(claim))]))
    for title, names in (
        (f"Settings of {type(study.task).__name__} (--set name=value, or in an arm after '|')", own),
        ("Settings of every task", shared),
        ("Recipe", list(Recipe.model_fields)),
    ):
        if names:
            parts.append("\n".join([f"{title}:", *(_line(study.task, name) for name in names)]))
    for name, size in study.scales.items():
        changes = ", ".join(write_setting(key, value, study.task) for key, value in size.settings.items())
        seeds = f", {size.seeds} seeds" if size.seeds else ""
        parts.append(_fill(f"--scale {name}: {changes or 'as the study is written'}{seeds}"))
    return "\n\n".join(["", *parts])


def _fill(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)


def _claim(claim: Claim) -> Iterator[str]:
    """Yield the lines of a claim: its text and source, then its tests."""
    yield f"  {claim.text}" + (f" ({claim.source})" if claim.source else "")
    for test in claim.tests:
        against = "" if test.along_axis else f" against {test.against}"
        amount = "" if test.by is None else f" by {test.by:+g}"
        yield f"    {test.arm}: {test.says}{amount} in {test.outcome}{against}"


def _meaning(kind: type[Subject], name: str) -> str:
    """Return a field's description, from the nearest class that has one, else its choices."""
    fields = [
        base.model_fields[name] for base in kind.__mro__ if issubclass(base, Recipe) and name in base.model_fields
    ]
    described = next((field.description for field in fields if field.description), None)
    if described:
        return described.replace("None:", "none:")
    return " | ".join(map(str, get_args(fields[0].annotation))) if get_origin(fields[0].annotation) is Literal else ""


def _line(task: Subject, name: str) -> str:
    written = write_setting(name, getattr(task, name), task)
    meaning = _meaning(type(task), name)
    begin = f"  {written:<36}"
    if len(begin) > 38:
        begin = begin.rstrip() + "  "
    return textwrap.fill(f"{begin}{meaning}", WIDTH, subsequent_indent=" " * 38, break_on_hyphens=False)
