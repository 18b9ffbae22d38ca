"""Callback of the Hugging Face Trainer that watches: `WatchCallback`."""

from __future__ import annotations

from typing import Any

from headwise.watching.logs import logs_of
from headwise.watching.rules import Thresholds
from headwise.watching.trainer_losses import StepLosses, losses_of
from headwise.watching.trainer_reports import reports_of
from headwise.watching.watch import OnAlert, Watch, watch
from headwise.watching.whole_model import Loss

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("WatchCallback needs transformers: pip install 'headwise[hf]'") from error


class WatchCallback(TrainerCallback):
    """Watches the model of a `transformers.Trainer`; takes what `headwise.watch` takes.

    Steps are the trainer's optimizer steps, gradient accumulation included, and so is each step's loss.
    `callback.watch` is the handle during and after the training: its records stay readable. What `report_to` of the
    Trainer names gets the health beside the loss, each reading at its own step; `log` is for other places, and
    `report=False` keeps it from there.

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
        loss: Loss | None = None,
        log_heads: bool = False,
        report: bool = True,
    ) -> None:
        self.settings = {
            "every": every,
            "log": log,
            "on_alert": on_alert,
            "rows": rows,
            "where": where,
            "statistics": statistics,
            "thresholds": thresholds,
            "loss": loss,
            "log_heads": log_heads,
        }
        self.report = report
        self.watch: Watch | None = None
        self._losses: StepLosses | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Start to watch; a resumed training goes on at its step."""
        # A training that an exception ended never came to `on_train_end`.
        self.on_train_end(args, state, control)
        reports = reports_of(self, args, state, control) if self.report else []
        self.watch = watch(model, **{**self.settings, "log": [*logs_of(self.settings["log"]), *reports]})
        self.watch.step_to(state.global_step)
        self._losses = losses_of(self)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note an optimizer step."""
        if self.watch is not None:
            self.watch.step(None if self._losses is None else self._losses.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take the watch off the model."""
        if self._losses is not None:
            self._losses.leave()
            self._losses = None
        if self.watch is not None and not self.watch.removed:
            self.watch.remove()
