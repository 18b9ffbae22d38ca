"""Sweeps: one text with `{a,b,c}` in it is an axis of arms."""

from __future__ import annotations

import math
import re

from headwise.experiments.arm import Arm, read_arm
from headwise.experiments.configuration import BASELINE
from headwise.experiments.subject import Subject
from headwise.files.errors import StudyError
from headwise.results.records import AxisRecord

VALUES = re.compile(r"([\w.-]+)\s*=\s*\{([^{}]*)\}")


def read_sweep(text: str, task: Subject) -> tuple[AxisRecord, dict[str, Arm]]:
    """Read `NeuTRENO(strength={0,0.1,0.2})` or `baseline | learning_rate={0.001,0.01}`: an axis, and its arms by label.

    Raises:
        StudyError: where the text has no values or more than one place for them, or a value is no number.
    """
    found = VALUES.findall(text)
    if len(found) != 1 or text.count("{") != 1 or text.count("}") != 1:
        raise StudyError(f"--sweep {text!r} needs one setting with values in braces, such as strength={{0,0.1,0.2}}.")
    name, inside = found[0]
    values = [_number(value.strip(), text) for value in inside.split(",")]
    if len(values) < 2 or len(set(values)) < len(values):
        raise StudyError(f"--sweep {text!r} needs at least two values, each once.")
    arms: list[Arm] = []
    for value in sorted(values):
        try:
            arms.append(_plain(read_arm(VALUES.sub(f"{name}={_written(value)}", text), task), task))
        except StudyError as error:
            raise StudyError(f"--sweep {text!r}, at {name}={_written(value)}: {error}") from error
    labels = [arm.text for arm in arms]
    return AxisRecord(name=name, values=sorted(values), arms=labels, text=text), dict(zip(labels, arms))


def _written(value: float) -> str:
    """Write a value with all of its digits, a whole number without a point: a field may take no other."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _plain(arm: Arm, task: Subject) -> Arm:
    """Return the baseline where the value is the task's own: the same runs need not be made twice."""
    return Arm(BASELINE) if arm.name == BASELINE and arm.task(task) == task else arm


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    except ValueError:
        raise StudyError(
            f"--sweep {text!r}: {value!r} is no finite number, and an axis has an order. Give each as an arm: --method."
        ) from None
