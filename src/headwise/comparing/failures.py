"""Runs that failed: whether the others are still tried, and what is told of them at the end."""

from __future__ import annotations

from typing import Any

from headwise.training.job import Order

# runs that fail for the same reason, none having finished, before the others are not tried
SAME_FAILURES = 3

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
    order, event = failures[0]
    lines = [first, event["trace"].rstrip(), *others]
    lines += [f"{len(failures)} runs failed."] if len(failures) > 1 else []
    lines.append(
        f"The folder of {_name(order)}, is {order.folder}. "
        "Finished runs and checkpoints are kept: repair the cause and start the same command again."
    )
    return "\n".join(filter(None, lines))


def _describe_alike(reason: str, failures: list[Failure]) -> str:
    more = len(failures) - 1
    same = f" (the same in {more} other {'run' if more == 1 else 'runs'})" if more else ""
    return f"{_name(failures[0][0])}, could not go on: {reason}{same}"


def _name(order: Order) -> str:
    return f"{order.configuration.arm}, seed {order.configuration.seed}"
