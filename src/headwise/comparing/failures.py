"""Runs that failed: whether the others are still tried, and what is told of them at the end."""

from __future__ import annotations

import json
from typing import Any

from headwise.training.job import Order

# runs that fail for the same reason, none having finished, before the others are not tried
SAME_FAILURES = 3

# an order and its last event, with the reason
Failure = tuple[Order, dict[str, Any]]


def concern_all(failures: list[Failure], *, finished: int) -> bool:
    """Tell whether to go on makes no sense: the disk is full, or all that was tried fails in the same way."""
    reasons = [event["reason"] for _, event in failures]
    same = len(reasons) >= SAME_FAILURES and len(set(reasons)) == 1 and not finished
    return same or failures[-1][1].get("fatal", False) or failures[-1][0].configuration.processes > 1


def describe_failures(failures: list[Failure]) -> str:
    """Describe the first failure whole, and name the runs of the others with their reasons."""
    (order, event), *others = failures
    lines = [f"{o.configuration.arm}, seed {o.configuration.seed}: {e['reason']}" for o, e in others]
    more = [f"{len(failures)} runs failed; the others:", *lines] if others else []
    return "\n".join([_describe_failure(order, event), *more])


def _describe_failure(order: Order, event: dict[str, Any]) -> str:
    configuration = order.configuration
    trace = f"\n{event['trace'].rstrip()}" if event["trace"] else ""
    settings = json.dumps(configuration.settings)
    return (
        f"{configuration.arm}, seed {configuration.seed}, could not go on: {event['reason']}{trace}\n"
        f"Its folder is {order.folder}; its settings: {settings}. "
        "Finished runs and checkpoints are kept: repair the cause and start the same command again."
    )
