"""Comparison: one carrying-out of a study, and what it asks of an engine and of whoever listens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headwise.experiments.configuration import RunConfiguration
from headwise.experiments.study import Study
from headwise.files.provenance import describe_environment
from headwise.training.job import Order


class Engine(Protocol):
    """Carry out orders and give events; see headwise.engines."""

    # whether runs share a processor with others
    parallel: bool
    # whether arms are rehearsed before any run; not where each order waits in a queue for hours
    rehearses: bool

    def submit(self, order: Order) -> None: ...

    def events(self) -> Iterator[dict[str, Any]]: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """Show how a study goes on."""

    def plan(self, total: int, finished: int) -> None: ...

    def hear(self, order: Order, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Comparison:
    """Hold one carrying-out of a study: where, with what, watched or not, tuned with how many trials an arm."""

    study: Study
    out: Path
    engine: Engine
    listener: Listener
    data: Path | None = None
    watch: bool = False
    trials: int = 0
    command: str = "headwise compare"
    environment: dict[str, Any] = field(default_factory=describe_environment)

    def order(self, configuration: RunConfiguration, part: str = "runs") -> Order:
        """Return the order for one run of this study."""
        return Order(
            configuration,
            folder=self.out.resolve() / part / configuration.identity,
            task_place=self.study.task_place,
            data=self.data,
            watch=self.watch and part == "runs",
            device=self.study.device,
            alone=not self.engine.parallel,
            environment=self.environment,
        )
