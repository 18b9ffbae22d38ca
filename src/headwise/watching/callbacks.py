"""Callbacks of the Hugging Face Trainer: `WatchCallback` and `HeadwiseCallback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headwise.core.method import Method
from headwise.regularizing.handle import Regularized
from headwise.regularizing.plan import Where
from headwise.regularizing.regularize import regularize
from headwise.regularizing.trl_loss import is_trl, penalize
from headwise.watching.logs import logs_of
from headwise.watching.rules import Thresholds
from headwise.watching.trainer_reports import caller_of, reports_of
from headwise.watching.watch import OnAlert, Watch, watch
from headwise.watching.whole_model import Loss

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("WatchCallback needs transformers: pip install 'headwise[hf]'") from error



class WatchCallback(TrainerCallback):
    """Watches the model of a `transformers.Trainer`; takes what `headwise.watch` takes.

    Steps are the trainer's optimizer steps, gradient accumulation included. `callback.watch` is the handle during and after
    the training: its records stay readable. What `report_to` of the Trainer names gets the health beside the loss, each reading at its
    own step; `log` is for other places, and `report=False` keeps it from there.

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

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Start to watch; a resumed training goes on at its step."""
        # A training that an exception ended never came to `on_train_end`.
        self.on_train_end(args, state, control)
        reports = reports_of(self, args, state, control) if self.report else []
        self.watch = watch(model, **{**self.settings, "log": [*logs_of(self.settings["log"]), *reports]})
        self.watch.step_to(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Note an optimizer step."""
        if self.watch is not None:
            self.watch.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take the watch off the model."""
        if self.watch is not None and not self.watch.removed:
            self.watch.remove()


class HeadwiseCallback(TrainerCallback):
    """Regularizes the model of a `transformers.Trainer`, adds the penalties to its loss and watches it.

    `Trainer(model, args, callbacks=[HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})])`. The health goes to whatever
    `report_to` names; step, draws and strengths go into the Trainer's checkpoints and come back when a run is resumed.

    Args:
        methods: in order of action, as `headwise.regularize` takes them; none: the model is only watched.
        watch: settings of `headwise.watch`; None: the model is not watched.
        where: which sites are regularized, as in `headwise.regularize`.
        attention: who computes the attention of layers with a kernel of their own, as in `headwise.regularize`.
        seed: of the methods' draws.
        base: the task's loss, as `compute_loss_func` of the handle takes it; None: the Trainer's own `compute_loss_func`, or the
            model's loss.

    Raises:
        ValueError: from `Trainer(...)`, where it makes its model itself (`model_init`), or as `headwise.regularize` does.
        RuntimeError: from `Trainer.train()`, where the callback was not among those that `Trainer(...)` was made with.

    Example:
        >>> from headwise import DropHead, HeadwiseCallback
        >>> callback = HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})  # Trainer(model, args, callbacks=[callback])
        >>> callback.methods
        (DropHead(p=0.2),)
    """

    def __init__(
        self,
        *methods: Method,
        watch: Mapping[str, Any] | None = None,
        where: Where = None,
        seed: int = 0,
        base: Callable[..., Tensor] | None = None,
        attention: str | None = None,
    ) -> None:
        self.methods, self.where, self.seed, self.base = methods, where, seed, base
        self.attention = attention
        self.regularized: Regularized | None = None
        self._watching = None if watch is None else WatchCallback(**watch)
        self._stands = False

    @property
    def watch(self) -> Watch | None:
        """Return the handle of the watched model, during and after the training."""
        return None if self._watching is None else self._watching.watch

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Regularize the model before the optimizer is made, which has to hold what methods learn."""
        from transformers import Trainer

        trainer = caller_of(self, Trainer)
        if trainer is None:
            return
        if self.methods and trainer.model_init is not None:
            raise ValueError(
                "HeadwiseCallback regularizes the model that Trainer was given, and Trainer(model_init=...) makes others: call "
                "headwise.regularize in model_init, and give callbacks=[handle.callback()] and compute_loss_func=handle.compute_loss_func()"
            )
        self._stands = True
        if self.methods:
            settings = {"where": self.where, "seed": self.seed, "attention": self.attention}
            self.regularized = regularize(model, *self.methods, **settings)
            self._add_penalties(trainer, self.regularized)
            trainer.add_callback(self.regularized.callback())
        if self._watching is not None:
            trainer.add_callback(self._watching)

    def _add_penalties(self, trainer: Any, regularized: Regularized) -> None:
        if not is_trl(trainer):
            trainer.compute_loss_func = regularized.compute_loss_func(self.base or trainer.compute_loss_func)
            return
        try:
            if self.base is not None:
                raise ValueError(
                    f"{type(trainer).__name__} computes its loss by itself: leave base= out, and override its compute_loss for another one"
                )
            penalize(regularized, trainer)
        except ValueError:
            # A refusal changes nothing.
            regularized.remove()
            raise

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Refuse a training that this callback came too late for."""
        if not self._stands:
            raise RuntimeError(
                "HeadwiseCallback was added after the Trainer was made: give it as Trainer(..., callbacks=[HeadwiseCallback(...)])"
            )
