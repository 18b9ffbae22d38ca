"""The settings of a study, as listed by its `--help`: name, value and meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from headwise.comparing.choosing import find_study, scaled
from headwise.comparing.request import Request, Studies
from headwise.experiments.arm_settings import write_setting
from headwise.experiments.recipe import Recipe
from headwise.experiments.study import Study
from headwise.experiments.subject import Subject
from headwise.experiments.task import Task
from headwise.results.records import Claim

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
        yield f"    {test.arm}: {test.says} in {test.outcome}{against}"


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
