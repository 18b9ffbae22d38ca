"""The queue of orders: it sends them to an engine, collects the results, and continues after failed runs."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.files.durable import write_bytes
from headwise.lab.comparing.comparison import Comparison, Engine
from headwise.lab.training.job import Order
from headwise_verdict import StudyError
from headwise_verdict.results import RunResult

# failures for the same reason, with no run finished, after which the other runs are not tried
SAME_FAILURES = 3

LOG = "failures.log"
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# parts of paths of code that is not the user's
NOT_OWN = ("site-packages", str(Path(__file__).parents[1]), sysconfig.get_paths()["stdlib"], "<frozen")
# an order and its last event, which contains the reason
Failure = tuple[Order, dict[str, Any]]


def run_orders(
    comparison: Comparison,
    orders: list[Order],
    then: Callable[[Order, RunResult], Order | None] = lambda order, result: None,
    *,
    total: int | None = None,
    finished: int = 0,
    after: int = 0,
) -> list[RunResult]:
    """Carry out orders except finished runs and return results; `then(order, result)` may add an order.

    `total` counts the runs if more follow than `orders` holds; `finished` counts those that were finished before;
    `after` counts the runs that follow trials.

    Raises StudyError if runs failed, after the others have ended.
    """
    queue = _Queue(comparison.engine, then)
    failures: list[Failure] = []
    for order in orders:
        queue.submit(order)
    comparison.listener.plan(total or len(orders), finished + len(queue.results), after)
    for event in comparison.engine.events():
        order = queue.known[event["run"]]
        if event["event"] == "failed":
            failures.append((order, event))
            if concern_all(failures, finished=len(queue.results)):
                break
            comparison.listener.say(f"{_name(order)}, failed; the others continue: {event['reason'].splitlines()[0]}")
            continue
        comparison.listener.hear(order, event)
        if event["event"] == "done":
            queue.done(order, event["result"])
    if failures:
        raise StudyError(describe_failures(failures))
    return [queue.results[order.identity] for order in orders]


class _Queue:
    """The orders sent to an engine and their results; an order may be followed by another."""

    def __init__(self, engine: Engine, then: Callable[[Order, RunResult], Order | None]) -> None:
        self.results: dict[str, RunResult] = {}
        self.known: dict[str, Order] = {}
        self._engine, self._then = engine, then

    def submit(self, order: Order) -> None:
        """Send an order to the engine, or, if it is already finished, the order that follows it."""
        following: Order | None = order
        while following is not None:
            order = following
            self.known[order.identity] = order
            result = order.result()
            if result is None:
                self._engine.submit(order)
                return
            self.results[order.identity] = result
            following = self._then(order, result)

    def done(self, order: Order, result: RunResult) -> None:
        """Store a result and submit the following order."""
        self.results[order.identity] = result
        following = self._then(order, result)
        if following is not None:
            self.submit(following)


def concern_all(failures: list[Failure], *, finished: int) -> bool:
    """Return whether continuing is useless: the disk is full, or all runs so far failed in the same way."""
    reasons = [event["reason"] for _, event in failures]
    same = len(reasons) >= SAME_FAILURES and len(set(reasons)) == 1 and not finished
    return same or failures[-1][1].get("fatal", False) or failures[-1][0].configuration.processes > 1


def describe_failures(failures: list[Failure]) -> str:
    """Return a message with the first failure in full and one line for each other; equal failures are listed once."""
    alike: dict[str, list[Failure]] = {}
    for failure in failures:
        alike.setdefault(failure[1]["reason"], []).append(failure)
    first, *others = (_describe_alike(reason, same) for reason, same in alike.items())
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
    """Write the traceback and last output of every failure into failures.log, and return its path."""
    path = failures[0][0].folder.parent.parent / LOG
    parts = [
        f"{_name(order)}: {event['reason']}{event.get('printed', '')}\n{event['trace'].rstrip()}\n"
        for order, event in failures
    ]
    write_bytes(path, "\n".join(parts).encode())
    return path


def place_of(trace: str) -> str:
    """Return where an error was raised: the last line in the user's own code, else the last line of the traceback."""
    frames = FRAME.findall(trace)
    own = [frame for frame in frames if not any(part in frame[0] for part in NOT_OWN)]
    if not frames:
        return ""
    file, line, function = (own or frames)[-1]
    return f" (line {line} of {Path(file).name}, in {function})"


def _describe_alike(reason: str, failures: list[Failure]) -> str:
    more = len(failures) - 1
    # a reason that already names its place has no trace
    reason += place_of(failures[0][1]["trace"])
    same = f" (the same in {more} other {'run' if more == 1 else 'runs'})" if more else ""
    return f"{_name(failures[0][0])}, could not continue: {reason}{same}{failures[0][1].get('printed', '')}"


def _name(order: Order) -> str:
    return f"{order.configuration.arm}, seed {order.configuration.seed}"
