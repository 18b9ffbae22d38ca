"""Comparison: one execution of a study, and its interfaces to engines and displays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headwise.files.provenance import describe_environment
from headwise.lab.experiments.configuration import RunConfiguration
from headwise.lab.experiments.study import Study
from headwise.lab.training.job import Order, ScriptOrder


class Engine(Protocol):
    """An engine that carries out orders and yields events; see headwise.lab.engines."""

    # whether runs share a processor with others
    parallel: bool
    # whether arms are rehearsed before any run; not if each order waits in a queue for hours
    rehearses: bool

    def submit(self, order: Order) -> None: ...

    def events(self) -> Iterator[dict[str, Any]]: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """A display of the progress of a study."""

    def plan(self, total: int, finished: int, after: int = 0) -> None: ...

    def hear(self, order: Order, event: dict[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass(frozen=True)
class Started:
    """How the script of a study is started: working folder, original variables, and timeout (seconds)."""

    folder: Path
    environment: dict[str, str | None] = field(default_factory=dict)
    timeout: float | None = None


@dataclass(frozen=True)
class Comparison:
    """One execution of a study: its folder and engine, whether it is watched, and the number of tuning trials an arm.

    `script` is set for a study of a script. With `require_pairs`, the study stops if arms of a seed are shown not to be
    paired.
    """

    study: Study
    out: Path
    engine: Engine
    listener: Listener
    data: Path | None = None
    watch: bool = False
    graphs: str = "auto"
    trials: int = 0
    command: str = "headwise compare"
    environment: dict[str, Any] = field(default_factory=describe_environment)
    script: Started | None = None
    require_pairs: bool = False
    # whether every arm is tried before the first run, and whether to stop after the plan
    rehearse: bool = True
    plan_only: bool = False
    # parallel runs, for the estimate of the plan
    jobs: int = 1

    def order(self, configuration: RunConfiguration, part: str = "runs") -> Order:
        """Return the order for one run of this study."""
        shared: dict[str, Any] = {
            "configuration": configuration,
            "folder": self.out.resolve() / part / configuration.identity,
            "task_place": self.study.task_place,
            "data": self.data,
            "watch": self.watch and part == "runs",
            "device": self.study.device,
            "graphs": self.graphs,
            "alone": not self.engine.parallel,
            "environment": self.environment,
        }
        if self.script is None:
            return Order(**shared)
        return ScriptOrder(
            **shared,
            started_in=self.script.folder,
            primary=self.study.task.primary(),
            outcomes=tuple(metric.name for metric in self.study.task.metrics),
            timeout=self.script.timeout,
            environment_before=self.script.environment,
        )
