"""Runs that failed: whether the others are still tried, and what is told of them at the end."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path
from typing import Any

from headwise.training.job import Order

# runs that fail for the same reason, none having finished, before the others are not tried
SAME_FAILURES = 3

LOG = "failures.log"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# of paths of code that is no user's
NOT_OWN = ("site-packages", str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], "<frozen")
# an order and its last event, with the reason
Failure = tuple[Order, dict[str, Any]]


def concern_all(failures: list[Failure], *, finished: int) -> bool:
    """Return whether to go on makes no sense: the disk is full, or all that was tried fails in the same way."""
    reasons = [event["reason"] for _, event in failures]
    same = len(reasons) >= SAME_FAILURES and len(set(reasons)) == 1 and not finished
    return same or failures[-1][1].get("fatal", False) or failures[-1][0].configuration.processes > 1


def describe_failures(failures: list[Failure]) -> str:
    """Describe the first failure whole and the others in a line; what several have in common is told once."""
    alike: dict[str, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(failure[1]["reason"], []).append(failure)
    first, *others = (_describe_alike(reason, found) for reason, found in alike.items())
    order, _ = failures[0]
    lines = [first, *others]
    lines += [f"{len(failures)} runs failed."] if len(failures) > 1 else []
    if any(event["trace"] for _, event in failures):
        lines.append(f"Details: {write_log(failures)}.")
    lines.append(
        f"The folder of {_name(order)}, is {order.folder}. "
        "Finished runs and checkpoints are kept: repair the cause and start the same command again."
    )
    return "\n".join(filter(None, lines))


def write_log(failures: list[Failure]) -> Path:
    """Write what every failure left of its place in the code into failures.log, and give its path."""
    path = failures[0][0].folder.parent.parent / LOG
    parts = [
        f"{_name(order)}: {event['reason']}{event.get('printed', '')}\n{event['trace'].rstrip()}\n"
        for order, event in failures
    ]
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def place_of(trace: str) -> str:
    """Say where something was raised: the last line of the user's own code, else the last line there is."""
    frames = FRAME.findall(trace)
    own = [frame for frame in frames if not any(part in frame[0] for part in NOT_OWN)]
    if not frames:
        return ""
    file, line, function = (own or frames)[-1]
    return f" (line {line} of {Path(file).name}, in {function})"


def _describe_alike(reason: str, failures: list[Failure]) -> str:
    more = len(failures) - 1
    # a reason that says its place itself has none in the trace
    reason += place_of(failures[0][1]["trace"])
    same = f" (the same in {more} other {'run' if more == 1 else 'runs'})" if more else ""
    return f"{_name(failures[0][0])}, could not go on: {reason}{same}{failures[0][1].get('printed', '')}"


def _name(order: Order) -> str:
    return f"{order.configuration.arm}, seed {order.configuration.seed}"
