"""The loggers that people use: each takes the figures, pictures and alerts of a reading in a way of its own."""

from __future__ import annotations

import inspect
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Logger(ABC):
    """Takes what is shown of one reading."""

    @abstractmethod
    def figures(self, named: dict[str, float], step: int) -> None:
        """Take figures by name."""

    @abstractmethod
    def maps(self, named: dict[str, Tensor], step: int) -> None:
        """Take pictures (height, width, 3) of uint8 by name; a logger without pictures leaves them out."""

    @abstractmethod
    def alerts(self, named: dict[str, str], step: int) -> None:
        """Take alerts: what happened and what helps, by kind."""


class Writer(Logger):
    """A `SummaryWriter` of TensorBoard."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def figures(self, named: dict[str, float], step: int) -> None:
        for name, value in named.items():
            self.target.add_scalar(name, value, step)
        self.target.flush()

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        for name, picture in named.items():
            self.target.add_image(name, picture, step, dataformats="HWC")

    def alerts(self, named: dict[str, str], step: int) -> None:
        for kind, text in named.items():
            self.target.add_text(f"health/{kind}", text, step)
        self.target.flush()


class Run(Logger):
    """Anything with `log(dict, step)`: a run of wandb or trackio, or the module itself, or an object of one's own.

    A wandb run gets its figures at the step it is at: it drops what is older, and a later step would move the axis of
    the user's own curves. The figure `health/step` holds the optimizer's step there.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._by_name = _takes_step_by_name(target.log)

    def figures(self, named: dict[str, float], step: int) -> None:
        own = step_of_wandb(self.target)
        self._log(named if own is None else {**named, "health/step": float(step)}, step)

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        image = getattr(_library(self.target), "Image", None)
        if image is not None:
            self._log({name: image(picture.numpy()) for name, picture in named.items()}, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        alert = getattr(self.target, "alert", None) or getattr(_library(self.target), "alert", None)
        if not callable(alert):
            self._log({f"health/alert/{kind}": text for kind, text in named.items()}, step)
            return
        for kind, text in named.items():
            alert(title=f"attention: {kind}, step {step}", text=text)

    def _log(self, values: dict[str, Any], step: int) -> None:
        own = step_of_wandb(self.target)
        step = step if own is None else own
        if self._by_name:
            self.target.log(values, step=step)
        else:
            self.target.log(values, step)


class Tracked(Run):
    """An Accelerator: figures go by its own `log`, pictures and alerts to the trackers behind it."""

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        for inner in self._behind():
            inner.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        behind = self._behind()
        for inner in behind:
            inner.alerts(named, step)
        if not behind:
            super().alerts(named, step)

    def _behind(self) -> list[Logger]:
        inner = (getattr(tracker, "tracker", None) for tracker in self.target.trackers)
        return [found for one in inner if (found := logger_of(one)) is not None]


class Mlflow(Logger):
    """The module `mlflow` with its active run."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def figures(self, named: dict[str, float], step: int) -> None:
        self.target.log_metrics(named, step=step)

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        for name, picture in named.items():
            self.target.log_image(picture.numpy(), key=name, step=step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        for kind, text in named.items():
            self.target.log_text(text, f"health/step_{step}_{kind}.txt")


class MLflowRun(Logger):
    """A run of MLflow by its client: `log=headwise.MLflowRun(client, run_id)`.

    Args:
        client: an `mlflow.MlflowClient`.
        run_id: the run that takes figures, pictures and alerts.

    Example:
        >>> import headwise
        >>> # client: an MlflowClient; then headwise.watch(model, log=log)
        >>> log = headwise.MLflowRun(client=None, run_id="0f3c")
        >>> log.run_id
        '0f3c'
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self.client, self.run_id = client, run_id

    def figures(self, named: dict[str, float], step: int) -> None:
        """Log all figures at once."""
        metric: Any = sys.modules["mlflow"].entities.Metric
        now = int(time.time() * 1000)
        self.client.log_batch(self.run_id, metrics=[metric(name, value, now, step) for name, value in named.items()])

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        """Log each picture as an image of this step."""
        for name, picture in named.items():
            self.client.log_image(self.run_id, picture.numpy(), key=name, step=step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        """Log each alert as a text file of this step."""
        for kind, text in named.items():
            self.client.log_text(self.run_id, text, f"health/step_{step}_{kind}.txt")

    def __repr__(self) -> str:
        return f"MLflowRun({type(self.client).__name__}, {self.run_id!r})"


class Lightning(Logger):
    """Anything with `log_metrics(dict, step)`, as the loggers of Lightning have; what is behind it takes pictures and
    alerts."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def figures(self, named: dict[str, float], step: int) -> None:
        self.target.log_metrics(named, step=step)

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        inner = self._behind()
        if inner is not None:
            inner.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        inner = self._behind()
        if inner is not None:
            inner.alerts(named, step)
            return
        self.target.log_metrics({f"health/alert/{kind}": text for kind, text in named.items()}, step=step)

    def _behind(self) -> Logger | None:
        found, run = getattr(self.target, "experiment", None), getattr(self.target, "run_id", None)
        return MLflowRun(found, run) if _is_mlflow_client(found) and run else logger_of(found)


def logger_of(target: Any) -> Logger | None:
    """Return the way by which a logger takes figures, pictures and alerts; None for what is no logger.

    Raises:
        TypeError: for a client of MLflow without its run, and for a `log` that takes one figure by its name.
    """
    if isinstance(target, Logger):
        return target
    if _is_mlflow_client(target):
        raise TypeError("an MLflow client alone does not say which run is meant: give log=MLflowRun(client, run_id)")
    if callable(getattr(target, "add_scalar", None)):
        return Writer(target)
    if getattr(target, "__name__", None) == "mlflow":
        return Mlflow(target)
    if callable(getattr(target, "log_metrics", None)):
        return Lightning(target)
    log = getattr(target, "log", None)
    if not callable(log):
        return None
    if _takes_one_figure(log):
        raise TypeError(
            f"{type(target).__name__}.log(name, value) takes one figure at a time: give its loggers, for example "
            "log=trainer.loggers"
        )
    return Tracked(target) if isinstance(getattr(target, "trackers", None), list) else Run(target)


def step_of_wandb(target: Any) -> int | None:
    """Return the step a wandb run is at: the run itself, that of the module wandb, or one behind an Accelerator; else
    None."""
    runs = [target, getattr(target, "run", None)]
    runs += [getattr(tracker, "tracker", None) for tracker in getattr(target, "trackers", None) or ()]
    # By the class alone: a `step` of other objects counts other things, an Accelerator's its micro batches.
    ours = [run for run in runs if type(run).__module__.partition(".")[0] == "wandb"]
    return max((run.step for run in ours), default=None)


def _is_mlflow_client(target: Any) -> bool:
    return type(target).__name__ == "MlflowClient" and type(target).__module__.partition(".")[0] == "mlflow"


def _library(target: Any) -> Any:
    """Return the imported library that an object, or a module itself, belongs to."""
    name = target.__name__ if inspect.ismodule(target) else type(target).__module__
    return sys.modules.get(name.partition(".")[0])


def _parameters(log: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(log).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_one_figure(log: Callable[..., Any]) -> bool:
    return [one.name for one in _parameters(log)[:2]] == ["name", "value"]


def _takes_step_by_name(log: Callable[..., Any]) -> bool:
    """Return whether `step=` is a keyword of a `log`; some take it by keyword alone, some give it another name."""
    taken = _parameters(log)
    named = any(one.name == "step" and one.kind is not one.POSITIONAL_ONLY for one in taken)
    return named or not taken or any(one.kind is one.VAR_KEYWORD for one in taken)
