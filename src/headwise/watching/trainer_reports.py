"""Where a transformers.Trainer reports to: TensorBoard, wandb, MLflow and others that `report_to` names get the health
too."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from headwise.watching.alerts import HealthWarning
from headwise.watching.loggers import Logger, logger_of

# where the callbacks of transformers keep what they write to
BEHIND = ("tb_writer", "_wandb", "_trackio", "_ml_flow")


class Reports(Logger):
    """Passes figures to the reporting callbacks of a Trainer, and pictures and alerts to what stands behind them."""

    def __init__(self, reporters: list[Any], args: Any, state: Any, control: Any) -> None:
        self.reporters = reporters
        self._args, self._state, self._control = args, state, control

    def figures(self, named: dict[str, float], step: int) -> None:
        """Have every reporter log the figures, at the step of the reading."""
        at = copy.copy(self._state)
        at.global_step = step
        for reporter in self.reporters:
            reporter.on_log(self._args, at, self._control, logs=dict(named), model=None)

    def maps(self, named: dict[str, Any], step: int) -> None:
        """Return the pictures to what takes some."""
        for logger in self._behind():
            logger.maps(named, step)

    def alerts(self, named: dict[str, str], step: int) -> None:
        """Return the alerts to what takes some; the others have their number among the figures."""
        for logger in self._behind():
            logger.alerts(named, step)

    def _behind(self) -> list[Logger]:
        found = [getattr(reporter, name, None) for reporter in self.reporters for name in BEHIND]
        return [logger for one in found if (logger := logger_of(one)) is not None]

    def __repr__(self) -> str:
        return f"Reports({', '.join(type(reporter).__name__ for reporter in self.reporters)})"


def reports_of(callback: Any, args: Any, state: Any, control: Any) -> list[Reports]:
    """Return the reports of the Trainer that calls a callback: none where `report_to` names nothing."""
    handler = caller_of(callback, CallbackHandler)
    if handler is None:
        if args.report_to:
            warnings.warn(
                f"{type(callback).__name__} stands in no Trainer of its own, so that nothing of it goes to "
                f"report_to={args.report_to}: "
                "give it in callbacks=[...], or give log=...",
                HealthWarning,
                stacklevel=3,
            )
        return []
    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    reporters = [one for one in handler.callbacks if isinstance(one, kinds)]
    return [Reports(reporters, args, state, control)] if reporters else []


def caller_of(callback: Any, kind: type) -> Any:
    """Find the object of a kind that calls, or None: Trainer hands callbacks neither itself nor the other callbacks."""
    frame = sys._getframe(1)
    while frame is not None:
        known = frame.f_locals.get("self")
        if isinstance(known, kind) and known is not callback:
            return known
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return None
