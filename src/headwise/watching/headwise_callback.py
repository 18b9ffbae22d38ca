"""One callback of transformers.Trainer for all: methods, penalties, watching."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headwise.core.method import Method
from headwise.regularizing.handle import Regularized
from headwise.regularizing.plan import Where
from headwise.regularizing.regularize import regularize
from headwise.watching.trainer_reports import caller_of
from headwise.watching.watch import Watch
from headwise.watching.watch_callback import TrainerCallback, WatchCallback


class HeadwiseCallback(TrainerCallback):
    """Regularizes the model of a `transformers.Trainer`, adds the penalties to its loss and watches it.

    `Trainer(model, args, callbacks=[HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})])`. The health goes to whatever
    `report_to` names; step, draws and strengths go into the Trainer's checkpoints and come back when a run is resumed.

    Args:
        methods: in order of action, as `headwise.regularize` takes them; none: the model is only watched.
        watch: settings of `headwise.watch`; None: the model is not watched.
        where: which sites are regularized, as in `headwise.regularize`.
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
    ) -> None:
        self.methods, self.where, self.seed, self.base = methods, where, seed, base
        self.regularized: Regularized | None = None
        self._watching = None if watch is None else WatchCallback(**watch)
        self._stands = False

    @property
    def watch(self) -> Watch | None:
        """Give the handle of the watched model, during and after the training."""
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
            self.regularized = regularize(model, *self.methods, where=self.where, seed=self.seed)
            trainer.compute_loss_func = self.regularized.compute_loss_func(self.base or trainer.compute_loss_func)
            trainer.add_callback(self.regularized.callback())
        if self._watching is not None:
            trainer.add_callback(self._watching)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Refuse a training that this callback came too late for."""
        if not self._stands:
            raise RuntimeError(
                "HeadwiseCallback was added after the Trainer was made: give it as Trainer(..., callbacks=[HeadwiseCallback(...)])"
            )
