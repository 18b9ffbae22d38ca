"""The queue of orders: they go to an engine, their results come back, and a run that fails lets the others go on."""

from __future__ import annotations

from collections.abc import Callable

from headwise.comparing.comparison import Comparison, Engine
from headwise.comparing.failures import Failure, concern_all, describe_failures
from headwise.files.errors import StudyError
from headwise.results.records import RunResult
from headwise.training.job import Order


def run_orders(
    comparison: Comparison,
    orders: list[Order],
    then: Callable[[Order, RunResult], Order | None] = lambda order, result: None,
    *,
    total: int | None = None,
    finished: int = 0,
    after: int = 0,
) -> list[RunResult]:
    """Carry out orders, leaving out finished runs; `then(order, result)` may give the order that follows one.

    `total` counts the runs when more follow than `orders` holds; `finished` those that were finished before; `after`
    the runs that follow trials. Raises StudyError when runs failed, after the others have ended.
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
            comparison.listener.say(
                f"{order.configuration.arm}, seed {order.configuration.seed}, failed; the others go on"
            )
            continue
        comparison.listener.hear(order, event)
        if event["event"] == "done":
            queue.done(order, event["result"])
    if failures:
        raise StudyError(describe_failures(failures))
    return [queue.results[order.identity] for order in orders]


class _Queue:
    """Hold the orders that were given to an engine and the results there are; an order may be followed by another."""

    def __init__(self, engine: Engine, then: Callable[[Order, RunResult], Order | None]) -> None:
        self.results: dict[str, RunResult] = {}
        self.known: dict[str, Order] = {}
        self._engine, self._then = engine, then

    def submit(self, order: Order) -> None:
        """Return an order to the engine, or, where it is finished already, the one that follows it."""
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
        """Keep a result and submit what follows."""
        self.results[order.identity] = result
        following = self._then(order, result)
        if following is not None:
            self.submit(following)
