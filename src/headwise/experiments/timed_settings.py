"""Schedules in the text of an arm: moments are steps, or shares of a training whose length only the run knows."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from headwise.core.schedule import ByDepth, Ramp, Schedule, VShape
from headwise.core.settings import suggest
from headwise.experiments.arm_settings import split
from headwise.files.errors import StudyError

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
ARROW = re.compile(rf"({NUMBER})\s*->\s*({NUMBER})(?:\s+at\s+(\S+))?(?:\s+over\s+(\S+))?$")
CALL = re.compile(r"(VShape|Ramp|ByDepth)\s*\((.*)\)$", re.DOTALL)
# marks that only the text of a schedule contains, even a misspelt one
LIKE = re.compile(r">|%|\bat\b|\bover\b|^\s*\w+\s*\(")
# numbers and moments that each call takes
CALLS = {
    "VShape": (("start", "end"), ("warmup", "total")),
    "Ramp": (("start", "end"), ("steps", "begin")),
    "ByDepth": (("first", "last"), ()),
}
EXAMPLES = (
    "'1.0 -> 0.1 at 50%', '0 -> 0.6 over 20%', '0 -> 0.6 at 66% over 5%', "
    "'VShape(start=0.2, end=0.2, warmup=10%, total=100%)', 'ByDepth(first=0.1, last=0)'"
)


@dataclass(frozen=True)
class Moment:
    """A number of optimizer steps, or a share of the training (0.5: half of it)."""

    value: float
    is_share: bool

    def steps(self, total: int) -> int:
        """Return the moment in steps of a training of `total` steps."""
        return round(self.value * total) if self.is_share else int(self.value)

    def __str__(self) -> str:
        return f"{100 * self.value:.12g}%" if self.is_share else f"{int(self.value)}"


@dataclass(frozen=True)
class Timed:
    """A schedule of an arm: two values, and the moments of the change between them."""

    kind: str
    first: float
    second: float
    moments: tuple[Moment, ...] = ()

    def schedule(self, total: int) -> Schedule:
        """Return the schedule in the steps of a training of `total` steps."""
        steps = [moment.steps(total) for moment in self.moments]
        if self.kind == "ByDepth":
            return ByDepth(self.first, self.second)
        if self.kind == "VShape":
            # keep the shape in a short training, where a share may round to 0 steps
            end = max(2, steps[1])
            return VShape(self.first, self.second, min(max(1, steps[0]), end - 1), end)
        if self.kind == "switch":
            return Ramp(self.first, self.second, steps=1, begin=steps[0] - 1)
        return Ramp(self.first, self.second, steps=max(1, steps[0]), begin=steps[1])

    @property
    def extremes(self) -> tuple[float, ...]:
        """Return the values that include the smallest and the largest of the schedule."""
        return (self.first, self.second, 0.0) if self.kind == "VShape" else (self.first, self.second)

    def __str__(self) -> str:
        if self.kind == "ByDepth":
            return f"ByDepth(first={self.first!r}, last={self.second!r})"
        if self.kind == "VShape":
            return (
                f"VShape(start={self.first!r}, end={self.second!r}, warmup={self.moments[0]}, total={self.moments[1]})"
            )
        arrow = f"{self.first!r} -> {self.second!r}"
        if self.kind == "switch":
            return f"{arrow} at {self.moments[0]}"
        over, begin = self.moments
        return f"{arrow} over {over}" if not begin.value else f"{arrow} at {begin} over {over}"


def is_timed(text: str) -> bool:
    """Return whether a setting's text is a schedule, even a misspelt one, and not a plain value."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError):
        return LIKE.search(text) is not None
    return False


def read_timed(text: str) -> Timed:
    """Return the schedule in a text.

    Raises:
        StudyError: if the text is no schedule, or its moments are not in order.
    """
    if match := CALL.match(text.strip()):
        return _call(match[1], match[2], text)
    if (called := re.match(r"(\w+)\s*\(", text.strip())) and suggest(called[1], list(CALLS)):
        raise StudyError(
            f"there is no schedule {called[1]!r}.{suggest(called[1], list(CALLS))} Write one of {EXAMPLES}."
        )
    match = ARROW.match(text.strip())
    if not match or not (match[3] or match[4]):
        raise StudyError(f"cannot read a schedule from {text!r}; write one of {EXAMPLES}.")
    first, second = float(match[1]), float(match[2])
    if not match[4]:
        return Timed("switch", first, second, (_moment(match[3], text),))
    begin = _moment(match[3], text) if match[3] else Moment(0, is_share=False)
    return Timed("Ramp", first, second, (_length(match[4], text), begin))


def _call(kind: str, inside: str, text: str) -> Timed:
    numbers, moments = CALLS[kind]
    arguments: dict[str, str] = {}
    for part in split(inside, ","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in numbers + moments or name in arguments:
            raise StudyError(f"{kind} takes {', '.join(f'{n}=' for n in numbers + moments)} once each; got {part!r}.")
        arguments[name] = value
    missing = [name for name in numbers + moments if name not in arguments and name != "begin"]
    if missing:
        raise StudyError(f"{kind} needs {', '.join(missing)} in {text!r}.")
    first, second = (_number(arguments[name], text) for name in numbers)
    if kind == "ByDepth":
        return Timed(kind, first, second)
    if kind == "Ramp":
        begin = _moment(arguments["begin"], text) if "begin" in arguments else Moment(0, is_share=False)
        return Timed(kind, first, second, (_length(arguments["steps"], text), begin))
    warmup, total = _length(arguments["warmup"], text), _length(arguments["total"], text)
    if warmup.is_share == total.is_share and warmup.value >= total.value:
        raise StudyError(f"VShape's warmup must end before total, got {warmup} and {total}.")
    return Timed(kind, first, second, (warmup, total))


def _moment(text: str, whole: str) -> Moment:
    is_share = text.endswith("%")
    value = _number(text.removesuffix("%"), whole)
    if is_share and 0 <= value <= 100:
        return Moment(value / 100, is_share=True)
    if not is_share and value >= 0 and value == int(value):
        return Moment(value, is_share=False)
    raise StudyError(
        f"{text!r} in {whole!r} is not a moment; write a share of the training (50%) or a number of steps (300)."
    )


def _length(text: str, whole: str) -> Moment:
    moment = _moment(text, whole)
    if not moment.value:
        raise StudyError(f"{text!r} in {whole!r} lasts no step; write more than 0, or 'at' for a switch.")
    return moment


def _number(text: str, whole: str) -> float:
    if not re.fullmatch(NUMBER, text):
        raise StudyError(f"{text!r} in {whole!r} is not a number.")
    return float(text)
