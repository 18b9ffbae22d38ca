"""Adapters that pass the figures, pictures and alerts of a reading to common logging libraries."""

from __future__ import annotations

import inspect
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from headwise.files.arguments import is_a


class Logger(ABC):
    """Destination for the figures, pictures and alerts of a reading."""

    @abstractmethod
    def figures(self, named: dict[str, float], step: int) -> None:
        """Log figures by name."""

    @abstractmethod
    def maps(self, named: dict[str, Tensor], step: int) -> None:
        """Log pictures (height, width, 3) of uint8 by name; a logger without pictures ignores them."""

    @abstractmethod
    def alerts(self, named: dict[str, str], step: int) -> None:
        """Log one text for each kind of alert, with what happened and the remedy."""


class Writer(Logger):
    """Logger for a `SummaryWriter` of TensorBoard."""

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


class RunLogger(Logger):
    """Logger for any object with `log(dict, step)`: a run of wandb or trackio, one of these modules, or your own class.

    A wandb run gets its figures at its own current step: wandb drops figures of older steps, and a later step would
    shift the axis of the user's curves. There the figure `health/step` is the optimizer's step.
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


class Tracked(RunLogger):
    """Logger for an Accelerator: figures go through its `log`, pictures and alerts to its trackers."""

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        for logger in self._loggers():
            logger.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        loggers = self._loggers()
        for logger in loggers:
            logger.alerts(named, step)
        if not loggers:
            super().alerts(named, step)

    def _loggers(self) -> list[Logger]:
        targets = (getattr(tracker, "tracker", None) for tracker in self.target.trackers)
        return [logger for target in targets if (logger := logger_of(target)) is not None]


class Mlflow(Logger):
    """Logger for the module `mlflow` and its active run."""

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
    """Logger for an MLflow run that is written through a client: `log=headwise.MLflowRun(client, run_id)`.

    Args:
        client: an `mlflow.MlflowClient`.
        run_id: the run that gets figures, pictures and alerts.

    Example:
        >>> import headwise
        >>> # client: an MlflowClient; then headwise.watch(model, log=log)
        >>> log = headwise.MLflowRun(client=None, run_id="0f3c")
        >>> log.run_id
        '0f3c'
    """

    def __init__(self, client: Any, run_id: str) -> None:
        is_a("run_id", run_id, str, "the id of a run")
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
    """Logger for any object with `log_metrics(dict, step)`, such as Lightning's loggers.

    Pictures and alerts go to its `experiment`; without one, alerts are logged as texts and pictures are left out.
    """

    def __init__(self, target: Any) -> None:
        self.target = target

    def figures(self, named: dict[str, float], step: int) -> None:
        self.target.log_metrics(named, step=step)

    def maps(self, named: dict[str, Tensor], step: int) -> None:
        logger = self._experiment_logger()
        if logger is not None:
            logger.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        logger = self._experiment_logger()
        if logger is not None:
            logger.alerts(named, step)
            return
        self.target.log_metrics({f"health/alert/{kind}": text for kind, text in named.items()}, step=step)

    def _experiment_logger(self) -> Logger | None:
        experiment, run = getattr(self.target, "experiment", None), getattr(self.target, "run_id", None)
        return MLflowRun(experiment, run) if _is_mlflow_client(experiment) and run else logger_of(experiment)


def logger_of(target: Any) -> Logger | None:
    """Return the `Logger` for an object of a logging library; None if the object is not a logger.

    Raises:
        TypeError: for an MLflow client without a run, and for a `log(name, value)` that takes a single figure.
    """
    if isinstance(target, Logger):
        return target
    if _is_mlflow_client(target):
        raise TypeError("an MLflow client does not identify a run: pass log=headwise.MLflowRun(client, run_id)")
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
            f"{type(target).__name__}.log(name, value) takes one figure at a time: pass its loggers instead, for "
            "example log=trainer.loggers"
        )
    return Tracked(target) if isinstance(getattr(target, "trackers", None), list) else RunLogger(target)


def step_of_wandb(target: Any) -> int | None:
    """Return the current step of a wandb run, or None without one.

    The run is `target` itself, the active run of the module wandb, or a tracker of an Accelerator.
    """
    runs = [target, getattr(target, "run", None)]
    runs += [getattr(tracker, "tracker", None) for tracker in getattr(target, "trackers", None) or ()]
    # Recognised by class: `step` of other objects counts other things, such as an Accelerator's micro batches.
    wandb_runs = [run for run in runs if type(run).__module__.partition(".")[0] == "wandb"]
    return max((run.step for run in wandb_runs), default=None)


def _is_mlflow_client(target: Any) -> bool:
    return type(target).__name__ == "MlflowClient" and type(target).__module__.partition(".")[0] == "mlflow"


def _library(target: Any) -> Any:
    """Return the imported top-level package of a module or of an object's class."""
    name = target.__name__ if inspect.ismodule(target) else type(target).__module__
    return sys.modules.get(name.partition(".")[0])


def _parameters(log: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(log).parameters.values())
    except (TypeError, ValueError):
        return []


def _takes_one_figure(log: Callable[..., Any]) -> bool:
    return [parameter.name for parameter in _parameters(log)[:2]] == ["name", "value"]


def _takes_step_by_name(log: Callable[..., Any]) -> bool:
    """Return whether a `log` accepts `step=` as a keyword; some accept it only so, some give it another name."""
    parameters = _parameters(log)
    named = any(p.name == "step" and p.kind is not p.POSITIONAL_ONLY for p in parameters)
    return named or not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters)
