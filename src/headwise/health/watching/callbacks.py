"""`WatchCallback` for the Hugging Face Trainer, with the loss of each step and the Trainer's reporting callbacks."""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

from torch import Tensor
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from headwise.borders import LOGGERS
from headwise.files.arguments import is_a
from headwise.files.callers import caller_of
from headwise.files.user_warnings import warn
from headwise.health.watching.alerts import HealthWarning
from headwise.health.watching.loggers import Logger, logger_of
from headwise.health.watching.rules import Thresholds
from headwise.health.watching.watch import OnAlert, Watch, watch
from headwise.health.watching.whole_model import Loss


class Reports(Logger):
    """Logger that passes figures to the reporting callbacks of a Trainer, and pictures and alerts to their loggers."""

    def __init__(self, reporters: list[Any], args: Any, state: Any, control: Any) -> None:
        self.reporters = reporters
        self._args, self._state, self._control = args, state, control

    def figures(self, named: dict[str, float], step: int) -> None:
        """Log the figures with every reporting callback, at the step of the reading."""
        state = copy.copy(self._state)
        state.global_step = step
        for reporter in self.reporters:
            reporter.on_log(self._args, state, self._control, logs=dict(named), model=None)

    def maps(self, named: dict[str, Any], step: int) -> None:
        """Pass the pictures to the loggers behind the callbacks."""
        for logger in self._loggers():
            logger.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        """Pass the alerts to the loggers behind the callbacks; the other callbacks get only their number, a figure."""
        for logger in self._loggers():
            logger.alerts(named, step)

    def _loggers(self) -> list[Logger]:
        targets = [getattr(reporter, name, None) for reporter in self.reporters for name in LOGGERS]
        return [logger for target in targets if (logger := logger_of(target)) is not None]

    def __repr__(self) -> str:
        return f"Reports({', '.join(type(reporter).__name__ for reporter in self.reporters)})"


def reports_of(callback: Any, args: Any, state: Any, control: Any) -> list[Reports]:
    """Return the `Reports` of the Trainer that calls a callback; an empty list if `report_to` names nothing."""
    handler = caller_of(callback, CallbackHandler)
    if handler is None:
        if args.report_to:
            warn(
                f"{type(callback).__name__} is not called by a Trainer, so nothing is reported to "
                f"report_to={args.report_to}: pass it to the Trainer in callbacks=[...], or pass log=...",
                HealthWarning,
            )
        return []
    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    reporters = [reporter for reporter in handler.callbacks if isinstance(reporter, kinds)]
    return [Reports(reporters, args, state, control)] if reporters else []


NAME = "training_step"


class StepLosses:
    """Sum, on the device, of the losses that a Trainer's `training_step` returns in one optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._previous = trainer, trainer.__dict__.get(NAME)
        self._sum: Tensor | None = None
        step = getattr(trainer, NAME)

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self._sum = loss.detach() if self._sum is None else self._sum + loss.detach()
            return loss

        self._wrapper = training_step
        setattr(trainer, NAME, training_step)

    def take(self) -> Tensor | None:
        """Return the loss of the step that ended, and reset the sum; None if `training_step` returned no loss."""
        loss, self._sum = self._sum, None
        return loss

    def leave(self) -> None:
        """Restore the Trainer's `training_step`, unless it has been wrapped again since."""
        if self._trainer.__dict__.get(NAME) is not self._wrapper:
            return
        if self._previous is None:
            delattr(self._trainer, NAME)
        else:
            setattr(self._trainer, NAME, self._previous)


def losses_of(callback: Any) -> StepLosses | None:
    """Return the `StepLosses` of the Trainer that calls a callback; None if no Trainer does."""
    trainer = WatchCallback.trainer_of(callback)
    return None if trainer is None else StepLosses(trainer)


try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("WatchCallback needs transformers: pip install 'headwise[hf]'") from error


class WatchCallback(TrainerCallback):
    """Callback that watches the model of a `transformers.Trainer`; it accepts the arguments of `headwise.watch`.

    Steps are the Trainer's optimizer steps; the loss of a step covers all its batches under gradient accumulation.
    `callback.watch` is the handle during and after the training, so that its records stay readable. The loggers in
    `report_to` of the Trainer get the health figures with the loss, each reading at its own step, unless
    `report=False`; `log` adds other loggers.

    Example:
        >>> import headwise
        >>> watching = headwise.WatchCallback(every=50, on_alert=None)  # Trainer(..., callbacks=[watching])
        >>> watching.watch is None  # the handle comes when the training begins
        True
    """

    def __init__(
        self,
        every: int = 50,
        log: Any = (),
        on_alert: OnAlert = "warn",
        rows: int | None = None,
        where: Any = None,
        statistics: list[str] | None = None,
        thresholds: Thresholds | None = None,
        closer: int | None = 10,
        loss: Loss | None = None,
        log_heads: bool = False,
        report: bool = True,
    ) -> None:
        is_a("every", every, int, "a whole number of steps")
        self.settings: dict[str, Any] = {"every": every, "log": log, "on_alert": on_alert, "rows": rows, "where": where}
        self.settings |= {"statistics": statistics, "thresholds": thresholds, "loss": loss, "log_heads": log_heads}
        self.settings["closer"] = closer
        self.report = report
        self.watch: Watch | None = None
        self._losses: StepLosses | None = None

    @staticmethod
    def trainer_of(callback: TrainerCallback) -> Any:
        """Return the Trainer that calls a callback; None if none does."""
        module = sys.modules.get("transformers.trainer")
        return None if module is None else caller_of(callback, module.Trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Start to watch; a resumed training continues at its step."""
        # A training that ended with an exception never reached `on_train_end`.
        self.on_train_end(args, state, control)
        reports = reports_of(self, args, state, control) if self.report else []
        self.watch = watch(model, **{**self.settings, "log": [self.settings["log"], *reports]})
        self.watch.step_to(state.global_step)
        self._losses = losses_of(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Record an optimizer step."""
        if self.watch is not None:
            self.watch.step(None if self._losses is None else self._losses.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Remove the watch from the model."""
        if self._losses is not None:
            self._losses.leave()
            self._losses = None
        if self.watch is not None and not self.watch.removed:
            self.watch.remove()
