"""`HeadwiseCallback`: regularizes the model of a Trainer of transformers or TRL, and carries out a run of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.attend import Method, Regularized, Where, regularize
from headwise.files.arguments import is_a, suggesting
from headwise.health import Watch, WatchCallback
from headwise.lab.files.script_run import current
from headwise.lab.training.script_run import Run, run

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("HeadwiseCallback needs transformers: pip install 'headwise[hf]'") from error

# keywords of a model that are inputs
BATCH = "input_ids inputs_embeds pixel_values input_values input_features attention_mask decoder_input_ids".split()
# names of an evaluation's own timings
TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


class HeadwiseCallback(TrainerCallback):
    """A callback that regularizes the model of a `transformers.Trainer`, adds the penalties to its loss and watches it.

    `Trainer(model, args, callbacks=[HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})])`. The health is logged
    to the `report_to` of the Trainer; its checkpoints store step, draws and strengths, for a run that is resumed. With
    `Trainer(model_init=...)`, also in a hyperparameter search, each model is regularized when it is made, and
    `regularized` is the handle of the latest.

    In a script that `headwise compare --script` started, `HeadwiseCallback()` finds the run: it fits the methods of the
    run's arm, reports the initial weights, the order of the batches and the loss, and records the metrics of the last
    `evaluate` without their prefix `eval_` (another `metric_key_prefix`, such as `validation`, names their split).

    Args:
        methods: in order of action, as for `headwise.regularize`; none: those of the run's arm; without a run, the
            model is only watched.
        watch: settings of `headwise.watch`; None: the model is not watched.
        where: which sites are regularized, as for `headwise.regularize`.
        seed: seed of the methods' draws.
        attention: what computes the attention of layers with their own kernel, as for `headwise.regularize`.
        draws: what the methods' draws follow, as for `headwise.regularize`.
        base: the task's loss, as for the handle's `compute_loss_func`; None: the Trainer's own
            `compute_loss_func`, or the model's loss.

    Raises:
        TypeError: if an argument has an unknown name.
        ValueError: from `Trainer(...)`, as `headwise.regularize` does.
        RuntimeError: from `Trainer.train()`, if the callback was not given to `Trainer(...)`.

    Example:
        >>> from headwise import DropHead, HeadwiseCallback
        >>> callback = HeadwiseCallback(DropHead(p=0.2), watch={"every": 100})  # given in Trainer(callbacks=[...])
        >>> callback.methods
        (DropHead(p=0.2),)
    """

    @suggesting
    def __init__(
        self,
        *methods: Method,
        watch: Mapping[str, Any] | None = None,
        where: Where = None,
        seed: int = 0,
        base: Callable[..., Tensor] | None = None,
        attention: str | None = None,
        draws: str = "counter",
    ) -> None:
        is_a("seed", seed, int, "a whole number")
        for method in methods:
            is_a("each of methods", method, Method, "a method, such as DropHead(p=0.2)")
        self.methods, self.where, self.seed, self.base = methods, where, seed, base
        self.attention, self.draws = attention, draws
        self.regularized: Regularized | None = None
        self._of_handle: Any = None
        self._watching = None if watch is None else WatchCallback(**watch)
        self._initialized = False
        self._run: Run | None = None

    @property
    def watch(self) -> Watch | None:
        """Return the handle of the watched model, during and after the training."""
        return None if self._watching is None else self._watching.watch

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Regularize the model before the optimizer is made, which must contain the methods' parameters."""
        trainer = WatchCallback.trainer_of(self)
        if trainer is None:
            return
        self._initialized = True
        if trainer.model_init is None:
            self._fit(model, trainer, args)
        else:
            self._fit_each(model, trainer, args)
        if self._watching is not None:
            trainer.add_callback(self._watching)

    def _fit(self, model: Any, trainer: Any, args: Any) -> None:
        if self.methods:
            self.regularized = regularize(
                model, *self.methods, where=self.where, seed=self.seed, attention=self.attention, draws=self.draws
            )
        elif current().path is not None:
            self._follow(run(), trainer, model, args)
        if self.regularized is not None:
            self._add_penalties(trainer, self.regularized)
            self._of_handle = self.regularized.callback()
            trainer.add_callback(self._of_handle)

    def _fit_each(self, model: Any, trainer: Any, args: Any) -> None:
        """Fit the first model of a `model_init`, and let the Trainer fit each later one as it makes it."""
        made, before = trainer.call_model_init, trainer.compute_loss_func

        def call_model_init(trial: Any = None) -> Any:
            # The Trainer keeps what belongs to the model that this one replaces.
            if self.regularized is not None:
                trainer.remove_callback(self._of_handle)
                trainer.compute_loss_func = before
                trainer.__dict__.pop("compute_loss", None)
                self.regularized = None
            another = made(trial)
            self._fit(another, trainer, trainer.args)
            return another

        trainer.call_model_init = call_model_init
        # A run of a study follows the model that is trained, which train() makes.
        if self.methods:
            self._fit(model, trainer, args)

    def _add_penalties(self, trainer: Any, regularized: Regularized) -> None:
        if not computes_own_loss(trainer):
            trainer.compute_loss_func = regularized.compute_loss_func(self.base or trainer.compute_loss_func)
            return
        try:
            if self.base is not None:
                raise ValueError(
                    f"{type(trainer).__name__} computes its own loss: leave base= out, and override its "
                    "compute_loss for another one"
                )
            penalize(regularized, trainer)
        except ValueError:
            # A refusal changes nothing.
            regularized.remove()
            raise

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Raise RuntimeError if this callback was added after the Trainer was made."""
        if not self._initialized:
            raise RuntimeError(
                "HeadwiseCallback was added after the Trainer was made: give it as "
                "Trainer(..., callbacks=[HeadwiseCallback(...)])"
            )
        if self._run is not None:
            self._run.takes(state.max_steps)

    def _follow(self, followed: Run, trainer: Any, model: Any, args: Any) -> None:
        """Fit the arm of a study's run, and record the batches that the model is trained on."""
        if args.seed != followed.seed:
            raise ValueError(
                f"the Trainer's seed is {args.seed} and the run's is {followed.seed}, so that arms and seeds would not "
                "be paired: TrainingArguments(seed=headwise.run().seed)"
            )
        self._run = followed
        handle = followed.regularize(model, steps=args.max_steps if args.max_steps > 0 else None)
        self.regularized = handle if isinstance(handle, Regularized) else None
        model.register_forward_pre_hook(self._saw, with_kwargs=True)

    def _saw(self, module: Any, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled() and self._run is not None:
            # labels may be absent, if the loss is computed outside the model
            self._run.saw([*args, {name: value for name, value in kwargs.items() if name in BATCH}])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        """Add the loss to the run's curves."""
        if self._run is not None and state.is_world_process_zero and "loss" in (logs or {}):
            self._run.log(step=state.global_step, loss=logs["loss"])

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        """Record the metrics of an evaluation; of several evaluations of one split, the last counts."""
        if self._run is None:
            return
        by_split: dict[str, dict[str, float]] = {}
        for key, value in (metrics or {}).items():
            prefix, _, name = key.partition("_")
            if name and name not in TIMES and isinstance(value, (int, float)):
                by_split.setdefault("test" if prefix == "eval" else prefix, {})[name] = float(value)
        for split, figures in by_split.items():
            self._run.evaluated(split, figures)


# Stages by which a method changes the model's outputs; penalties only read.
CHANGES = ("build", "hidden", "inputs", "logits", "weights", "output", "branch")
# Trainers that weight the samples of one forward by the probabilities of another.
SAMPLING = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
# Trainers that compare the model with a reference.
REFERRING = ("DPOTrainer", "KTOTrainer")


# Packages whose trainers compute their own loss, call `compute_loss_func` with other arguments, or set it once they are
# made: TRL, ms-swift and LlamaFactory.
OWN_LOSS = ("trl", "swift", "llamafactory")


def computes_own_loss(trainer: object) -> bool:
    """Return whether a Trainer is one of `OWN_LOSS` or a subclass of one, to whose loss `penalize` adds penalties."""
    return any(cls.__module__.split(".")[0] in OWN_LOSS for cls in type(trainer).__mro__)


def penalize(handle: Regularized, trainer: Any) -> None:
    """Let a trainer that computes its own loss add the handle's penalties to it, in training only.

    The penalties are those of the forwards with gradients in one `compute_loss`, each counted once. A reference model,
    or any forward without gradients, adds none. Under gradient accumulation the gradient is that of the mean over the
    micro batches.

    Raises:
        ValueError: if methods would change what a trainer compares: samples and their probabilities (GRPO, RLOO), or,
            in the first step, a reference that runs through the same methods (DPO and KTO without a ref_model).
    """
    names = {cls.__name__ for cls in type(trainer).__mro__}
    changing = next((m for m in handle.methods if any(map(m.overrides, CHANGES))), None)
    # What only prepares something in `build` and learns nothing acts after the optimizer's step alone (QKClip).
    unlike = next(
        (m for m in handle.methods if any(m.overrides(s) for s in CHANGES if s != "build" or m.has_parameters())), None
    )
    if unlike is not None and names.intersection(SAMPLING):
        raise ValueError(
            f"{type(trainer).__name__} samples from the model in evaluation and weights the samples by its "
            f"probabilities in training, and {unlike!r} would make the two differ: use methods that only penalize "
            "or act after a step, or regularize in SFTTrainer"
        )
    inner = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        training = torch.is_grad_enabled() and model.training
        if training and changing is not None and names.intersection(REFERRING):
            _refuse_same_reference(trainer, changing)
        result = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not training:
            return result
        task, *outputs = result if return_outputs else (result,)
        divisor = trainer.current_gradient_accumulation_steps if _scaled(trainer, num_items_in_batch) else 1
        loss = task + handle.loss().to(task.device) / divisor
        return (loss, *outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss


def _refuse_same_reference(trainer: Any, changing: Method) -> None:
    if getattr(trainer, "ref_model", None) is None and not getattr(trainer.args, "precompute_ref_log_probs", False):
        raise ValueError(
            f"{type(trainer).__name__} uses the regularized model itself without its adapters as the reference, which "
            f"{changing!r} would change: pass a ref_model, or set precompute_ref_log_probs=True"
        )


def _scaled(trainer: Any, items: Tensor | int | None) -> bool:
    """Return whether Trainer expects a loss that is already divided by the number of micro batches."""
    scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if scaled is not None:
        return scaled
    return bool(trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
