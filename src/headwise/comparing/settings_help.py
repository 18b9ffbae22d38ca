"""The settings of a study, as its `--help` lists them: name, value, what it means."""

from __future__ import annotations

import textwrap
from typing import Literal, get_args, get_origin

from headwise.comparing.arms.settings import write_setting
from headwise.comparing.choosing import find_study
from headwise.comparing.recipe import Recipe
from headwise.comparing.request import Request, Studies
from headwise.comparing.study import Study
from headwise.comparing.task import Task

WIDTH = 80


def describe_request(study: str | None, task: str | None, studies: Studies) -> str:
    """Describe the settings of a built-in study or of the user's own task."""
    return describe_settings(find_study(Request(study=study or "", task=task, studies=studies)))


def describe_settings(study: Study) -> str:
    """Describe every setting of a study's task, the recipe's after its own, in lines of 80 characters."""
    fields = type(study.task).model_fields
    own = [name for name in fields if name not in Recipe.model_fields and name not in Task.model_fields]
    shared = [name for name in Task.model_fields if name not in Recipe.model_fields]
    parts = [f"{study.name}: {study.title}"]
    for title, names in (
        (f"Settings of {type(study.task).__name__} (--set name=value, or in an arm after '|')", own),
        ("Settings of every task", shared),
        ("Recipe", list(Recipe.model_fields)),
    ):
        if names:
            parts.append("\n".join([f"{title}:", *(_line(study.task, name) for name in names)]))
    for name, scale in study.scales.items():
        changes = ", ".join(write_setting(key, value, study.task) for key, value in scale.settings.items())
        seeds = f", {scale.seeds} seeds" if scale.seeds else ""
        parts.append(textwrap.fill(f"--scale {name}: {changes or 'as above'}{seeds}", WIDTH, subsequent_indent="  "))
    return "\n\n".join(["", *parts])


def _meaning(kind: type[Task], name: str) -> str:
    """Give what a field's nearest description says (a task that only changes a default has none), else its choices."""
    fields = [
        base.model_fields[name] for base in kind.__mro__ if issubclass(base, Recipe) and name in base.model_fields
    ]
    described = next((field.description for field in fields if field.description), None)
    if described:
        return described.replace("None:", "none:")
    return " | ".join(map(str, get_args(fields[0].annotation))) if get_origin(fields[0].annotation) is Literal else ""


def _line(task: Task, name: str) -> str:
    written = write_setting(name, getattr(task, name), task)
    meaning = _meaning(type(task), name)
    begin = f"  {written:<36}"
    if len(begin) > 38:
        begin = begin.rstrip() + "  "
    return textwrap.fill(f"{begin}{meaning}", WIDTH, subsequent_indent=" " * 38, break_on_hyphens=False)
