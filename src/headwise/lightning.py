"""The callback that regularizes and watches the model of a `lightning.Trainer`, `HeadwiseCallback`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from headwise.attend import Method, Regularized, Where, regularize, sites
from headwise.health import Watch
from headwise.health import watch as start_watch

__all__ = ["HeadwiseCallback"]

# One library under two names, with separate classes.
NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """Return the class Callback of the Lightning package that the script imports."""
    for name in sorted(NAMES, key=lambda package: package not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as error:
            # An installed Lightning that lacks another library raises its own error.
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ImportError("headwise.lightning needs Lightning, which is not installed: pip install lightning")


Callback = _callback_class()


class HeadwiseCallback(Callback):  # type: ignore[misc, valid-type]
    """A callback that regularizes the model of a `lightning.Trainer`, adds penalties to its loss and watches it.

    `Trainer(callbacks=[HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})])`. Lightning's checkpoints contain the
    methods' learned parameters with the model, and steps, draws and strengths with the callback: `fit(ckpt_path=...)`
    continues with them, and `validate`, `test` and `predict` with a checkpoint and this callback run the regularized
    model. The health goes to the Trainer's loggers.

    Under manual optimization the user computes the loss: methods with penalties need
    `loss = loss + headwise.handle(self.model).loss()` before `self.manual_backward(loss)`.

    Args:
        methods: in order of action, as for `headwise.regularize`; without methods, the model is only watched.
        model: the name of the part of the LightningModule whose `forward` the training step calls, such as `"model"`;
            None means the only part with attention layers, or the LightningModule itself if there are several.
        watch: settings of `headwise.watch`; None means that the model is not watched.
        where: which sites are regularized, as in `headwise.regularize`.
        seed: of the methods' random draws.
        attention: who computes the attention of layers that have their own kernel, as in `headwise.regularize`.
        draws: what the methods' draws follow, as in `headwise.regularize`.

    Attributes:
        regularized: the handle, from the beginning of `fit`, `validate`, `test` or `predict` on.
        watch: the handle of the watched model, during and after the training.

    Raises:
        ValueError: from the Trainer's calls, if the LightningModule has no such part, or as from `headwise.regularize`;
            this includes layers that are made in `setup` or `configure_model`, which run later.
        RuntimeError: from `fit`, after the first step, if the training step did not call the regularized part, or
            optimizes manually and did not read the penalties.
    """

    def __init__(
        self,
        *methods: Method,
        model: str | None = None,
        watch: Mapping[str, Any] | None = None,
        where: Where = None,
        seed: int = 0,
        attention: str | None = None,
        draws: str = "counter",
    ) -> None:
        self.methods, self.model, self.where, self.seed, self.attention = methods, model, where, seed, attention
        self.draws = draws
        self.regularized: Regularized | None = None
        self.watch: Watch | None = None
        self._watching = watch
        self._model: nn.Module | None = None
        self._steps = 0
        self._hooks: list[Any] = []
        self._of_model: list[Any] = []
        self._stepped = False
        self._loss: Tensor | None = None

    @property
    def state_key(self) -> str:
        """Return the name of this callback's state in a checkpoint, which depends on the part."""
        return f"{type(self).__qualname__}{{'model': {self.model!r}}}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Regularize before weights are loaded and optimizers are made, which need the methods' parameters."""
        model = self._model = self._part(pl_module)
        handle = self.regularized
        if self.methods and (handle is None or handle.model is not model or (handle.removed and stage == "fit")):
            self.regularized = regularize(
                model, *self.methods, where=self.where, seed=self.seed, attention=self.attention, draws=self.draws
            )
            self._steps = 0
        if stage == "fit" and self.regularized is not None:
            Penalized.on(pl_module).handles.append(self.regularized)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook the optimizers that train the model, and start watching, at the step of a resumed training."""
        assert self._model is not None
        parameters = {id(parameter) for parameter in self._model.parameters()}
        training = [
            o for o in trainer.optimizers if any(id(p) in parameters for g in o.param_groups for p in g["params"])
        ]
        # For a frozen model with a trained head, count the head's steps.
        self._of_model = training or list(trainer.optimizers)
        self._hooks = [optimizer.register_step_post_hook(self._on_step) for optimizer in self._of_model]
        if self._watching is not None:
            logs = [self._watching.get("log"), *trainer.loggers]
            self.watch = start_watch(self._model, **{**self._watching, "log": logs})
            self.watch.step_to(self._steps)

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepped = True
        # Several optimizers that share the model's weights make one step together, which ends with the batch.
        if len(self._of_model) == 1:
            self._after_step()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Store the loss for the watch, unless a gradient scaler has multiplied it."""
        if self.watch is not None and getattr(trainer.precision_plugin, "scaler", None) is None:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the step of several optimizers."""
        if self._stepped:
            self._after_step()

    def _after_step(self) -> None:
        self._stepped = False
        if self.regularized is not None:
            self._check_called(self.regularized)
            self.regularized.after_step()
            if self._steps == 0 and (idle := self.regularized.idle()):
                raise RuntimeError(
                    f"{idle}. Under manual optimization the loss is yours: write loss = loss + "
                    "headwise.handle(model).loss() before self.manual_backward(loss)"
                )
        self._steps += 1
        if self.watch is not None:
            self.watch.step(self._loss)
        self._loss = None

    def _check_called(self, handle: Regularized) -> None:
        if not handle.seen_training:
            raise RuntimeError(
                f"training_step did not call the forward of the {type(handle.model).__name__} that was regularized: "
                "name the part that it calls, as in HeadwiseCallback(..., model='encoder')"
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop watching the model; the records stay readable."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Clean up as after a training that ended."""
        self._end()
        self._leave(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Restore the LightningModule's own training step; the model stays regularized."""
        self._leave(pl_module)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.watch is not None and not self.watch.removed:
            self.watch.remove()

    def _leave(self, pl_module: Any) -> None:
        step = pl_module.__dict__.get("training_step")
        if isinstance(step, Penalized) and self.regularized is not None:
            step.leave(self.regularized)

    def state_dict(self) -> dict[str, Any]:
        """Return steps, draws and strengths, as plain numbers and text, for Lightning's checkpoint."""
        handle = self.regularized
        return {"steps": self._steps, "progress": None if handle is None or handle.removed else handle.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an earlier training; the model is already regularized.

        Raises:
            ValueError: if the state belongs to another model or other methods.
        """
        self._steps = state_dict["steps"]
        if self.regularized is not None and state_dict["progress"] is not None:
            self.regularized.load_state(state_dict["progress"])

    def _part(self, pl_module: Any) -> nn.Module:
        """Return the part of a LightningModule that is regularized and watched."""
        if self.model is None:
            parts = [child for child in pl_module.children() if sites(child)]
            # A list of layers has no forward: the module around it calls the layers.
            callable_parts = [child for child in parts if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
            own = sum(len(sites(child)) for child in parts) == len(sites(pl_module))
            return callable_parts[0] if len(parts) == len(callable_parts) == 1 and own else pl_module
        try:
            return pl_module.get_submodule(self.model)  # type: ignore[no-any-return]
        except AttributeError:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"{type(pl_module).__name__} has no part {self.model!r} when the Trainer sets up: make it in "
                f"__init__; it has {names or 'none'}"
            ) from None


class Penalized:
    """A replacement of a LightningModule's training step that adds the penalties of the handles to its loss."""

    def __init__(self, module: Any) -> None:
        self.module, self.before = module, module.__dict__.get("training_step")
        self.inner: Callable[..., Any] = module.training_step
        self.handles: list[Regularized] = []
        # Lightning reads the signature.
        functools.update_wrapper(self, self.inner)

    @classmethod
    def on(cls, module: Any) -> Penalized:
        """Return the replacement on a module, after adding it if there is none."""
        step = module.__dict__.get("training_step")
        if not isinstance(step, cls):
            step = module.__dict__["training_step"] = cls(module)
        return step

    def leave(self, handle: Regularized) -> None:
        """Remove one handle, and restore the module's own step after the last."""
        self.handles = [other for other in self.handles if other is not handle]
        if self.handles:
            return
        if self.before is None:
            del self.module.__dict__["training_step"]
        else:
            self.module.__dict__["training_step"] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        if not self.module.automatic_optimization:
            return output
        # Lightning divides the sum by the number of accumulated batches. A skipped step drops its penalties too.
        penalties = [handle.loss() for handle in self.handles if not handle.removed]
        if isinstance(output, Tensor):
            return sum((penalty.to(output.device) for penalty in penalties), output)
        if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
            loss = output["loss"]
            return {**output, "loss": sum((penalty.to(loss.device) for penalty in penalties), loss)}
        return output
