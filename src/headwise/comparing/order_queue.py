"""Order queue: hand the orders of a study to its engine, take up what follows them, and say which failed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from headwise.comparing.comparison import Comparison
from headwise.comparing.results.records import RunResult
from headwise.comparing.run.job import Order
from headwise.files.errors import StudyError

# runs that fail for the same reason, none having finished, before the others are not tried
SAME_FAILURES = 3


def run_orders(
    comparison: Comparison,
    orders: list[Order],
    then: Callable[[Order, RunResult], Order | None] = lambda order, result: None,
    *,
    total: int | None = None,
    finished: int = 0,
) -> list[RunResult]:
    """Carry out orders, leaving out finished runs; `then(order, result)` may give the order that follows one.

    `total` counts the runs when more follow than `orders` holds; `finished` those that were finished before. Raises StudyError
    when runs failed, after the others have ended.
    """
    results: dict[str, RunResult] = {}
    known: dict[str, Order] = {}
    failures: list[tuple[Order, dict[str, Any]]] = []

    def submit(order: Order) -> None:
        known[order.identity] = order
        while (result := order.result()) is not None:
            results[order.identity] = result
            following = then(order, result)
            if following is None:
                return
            order = following
            known[order.identity] = order
        comparison.engine.submit(order)

    for order in orders:
        submit(order)
    comparison.listener.plan(total or len(orders), finished + len(results))
    for event in comparison.engine.events():
        order = known[event["run"]]
        if event["event"] == "failed":
            failures.append((order, event))
            if _concerns_all(failures, results):
                break
            comparison.listener.say(
                f"{order.configuration.arm}, seed {order.configuration.seed}, failed; the others go on"
            )
            continue
        comparison.listener.hear(order, event)
        if event["event"] == "done":
            results[order.identity] = event["result"]
            following = then(order, event["result"])
            if following is not None:
                submit(following)
    if failures:
        raise StudyError(_describe_failures(failures))
    return [results[order.identity] for order in orders]


def _concerns_all(failures: list[tuple[Order, dict[str, Any]]], results: dict[str, RunResult]) -> bool:
    """Tell whether to go on makes no sense: the disk is full, or all that was tried fails in the same way."""
    reasons = [event["reason"] for _, event in failures]
    same = len(reasons) >= SAME_FAILURES and len(set(reasons)) == 1 and not results
    return same or failures[-1][1].get("fatal", False) or failures[-1][0].configuration.processes > 1


def _describe_failures(failures: list[tuple[Order, dict[str, Any]]]) -> str:
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
