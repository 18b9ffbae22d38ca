"""Integration with transformers.Trainer: penalties in its loss, its optimizer steps, counters in its checkpoints."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.regularizing.handle_place import Handle, kept_handle
from headwise.attend.regularizing.saving import describe_checkpoint
from headwise.borders import LABELS, forward_pre_hooks_of, hook_first
from headwise.files.callers import callers
from headwise.files.user_warnings import warn

# The losses that transformers computes from logits and labels only; the POOLED ones name the logits pooled_logits.
PLAIN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
POOLED = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
REMEDY = "pass the task's loss to compute_loss_func() as base=function(outputs, labels, num_items_in_batch=None)"


def compute_loss_func(handle: Handle, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Return a `compute_loss_func` for transformers.Trainer that adds the handle's `loss()` to the task's loss.

    Without penalties the task's loss is the plain Trainer's, with label smoothing, gradient accumulation and processes:
    the model gets its labels as it would there and computes its own loss. Under gradient accumulation the penalties'
    gradient is that of the mean over the micro batches, also in an epoch's last step with fewer of them, and over
    processes that of their joined batch. Evaluation adds nothing.

    Args:
        handle: of the regularized model.
        base: the task's loss, `base(outputs, labels, num_items_in_batch=None)`, scaled as Trainer requires of a
            `compute_loss_func`: a sum divided by `num_items_in_batch`, if that is given. None uses the host model's
            own loss.

    Raises:
        ValueError: from the loss function, if base is None and the model's own loss cannot be identified, or if base
            is used together with a label_smoothing_factor.
    """
    returned = Labels(handle)
    hooks = forward_pre_hooks_of(handle.model).values()
    if base is None and not any(isinstance(hook, Labels) for hook in hooks):
        handle.hooks.append(hook_first(handle.model, returned, with_kwargs=True))
    returned = next((hook for hook in hooks if isinstance(hook, Labels)), returned)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        caller = _find_loss_call()
        training = torch.is_grad_enabled() and handle.model.training
        divisor = 1 if caller is None else _divisor(caller.trainer, num_items_in_batch, training)
        if base is not None:
            _refuse_smoothing(caller)
            task = base(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif caller is not None and (
            labels is None or returned.taken(labels) or caller.trainer.label_smoother is not None
        ):
            task = _plain_loss(caller.trainer, outputs, labels, num_items_in_batch, training)
        else:
            if caller is not None:
                _refuse_source_tokens(handle.model, caller.inputs)
            task, summed = _loss_of_logits(handle.model, outputs, labels, num_items_in_batch)
            task = task if summed else task / divisor
        return task + handle.loss().to(task.device) / divisor if training else task

    return loss


class Labels:
    """A hook that gives the model its labels, which Trainer removes from the batch if it has a `compute_loss_func`.

    Sequence-to-sequence models make their decoder's input from the labels, and each model computes its own loss. Under
    torch.compile the callers are not visible, and the loss is computed from the logits.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.latest: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return None
        caller = _find_loss_call()
        if caller is None or caller.labels is None or "labels" in kwargs or caller.trainer.label_smoother is not None:
            return None
        if not _is_whole(caller.trainer.model, self.handle):
            return None
        self.latest = caller.labels
        return args, {**kwargs, "labels": caller.labels}

    def taken(self, labels: Any) -> bool:
        """Return whether the model's last forward got these labels; true once for each forward."""
        latest, self.latest = self.latest, None
        return latest is labels

    def __deepcopy__(self, memo: dict[int, Any]) -> Labels:
        return Labels(copy.deepcopy(self.handle, memo))


def _is_whole(model: nn.Module, handle: Handle) -> bool:
    """Return whether a Trainer's model is the regularized one, possibly with adapters, and not a larger model."""
    config = getattr(model, "active_peft_config", None)
    # With prompt learning the adapter puts prompts before the tokens and extends the labels itself.
    if getattr(config, "is_prompt_learning", False):
        return False
    try:
        return kept_handle(model) is handle
    except ValueError:
        return False


def _plain_loss(trainer: Any, outputs: Any, labels: Any, items: Tensor | int | None, training: bool) -> Tensor:
    """Return the plain Trainer's loss of these outputs, such that Trainer's later scaling gives the plain number."""
    # The plain Trainer counts items only for models that accept their number.
    counted = items is not None and trainer.model_accepts_loss_kwargs
    if trainer.label_smoother is not None and labels is not None:
        task = trainer.label_smoother(
            outputs, labels, shift_labels=_shifts(trainer), num_items_in_batch=items if counted else None
        )
    else:
        task = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
    if task is None:
        raise ValueError(f"{type(trainer.model).__name__} returned no loss and its batch has no labels; {REMEDY}")
    if counted:
        return task
    # Trainer divides a plain mean by the number of micro batches, but not the result of a compute_loss_func.
    divides = training and trainer.loss_is_scaled_for_ga is None
    return task / (_processes(trainer, items) * (trainer.current_gradient_accumulation_steps if divides else 1))


def _shifts(trainer: Any) -> bool:
    """Return whether the plain Trainer's label smoothing shifts the labels; like Trainer, by the class's name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _refuse_smoothing(caller: LossCall | None) -> None:
    if caller is not None and caller.trainer.label_smoother is not None:
        raise ValueError(
            f"label_smoothing_factor={caller.trainer.args.label_smoothing_factor} has no effect with "
            "compute_loss_func(base=...): smooth the labels in base and set label_smoothing_factor=0, or leave base out"
        )


def _refuse_source_tokens(model: Any, inputs: Any) -> None:
    """Raise ValueError if a sequence-to-sequence model got neither labels nor decoder tokens.

    Some such models would silently use the tokens of the source.
    """
    if inputs is None or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    if not any(name.startswith("decoder_input") for name in inputs):
        raise ValueError(
            f"{type(model).__name__} was called without labels and without decoder_input_ids (torch.compile, threads "
            "or a model around it withhold the labels): add decoder_input_ids to the batch, as "
            "DataCollatorForSeq2Seq(tokenizer, model=model) does"
        )


def _divisor(trainer: Any, items: Tensor | int | None, training: bool) -> int:
    """Return the divisor of a micro batch's mean, such that with Trainer's own scaling gradients add up to a mean."""
    # With None and True, Trainer expects that a compute_loss_func has scaled its loss, and does not divide it.
    scaled = training and trainer.loss_is_scaled_for_ga is not False
    return _processes(trainer, items) * (trainer.current_gradient_accumulation_steps if scaled else 1)


def _processes(trainer: Any, items: Tensor | int | None) -> int:
    """Return the number of processes by which Trainer multiplies the loss, which is right for a sum, not for a mean."""
    args = trainer.args
    if not args.average_tokens_across_devices or items is None:
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size() if args.n_gpu <= 1 else args.n_gpu


@dataclass
class LossCall:
    """A Trainer's call for a loss: the Trainer, the labels it took out of the batch, and the rest if visible."""

    trainer: Any
    labels: Any = None
    inputs: Any = None


def _find_loss_call() -> LossCall | None:
    """Return the Trainer's call for a loss that is running now, or None.

    Trainer passes neither itself nor the number of micro batches of this step, so this reads the callers' frames.
    """
    if "transformers" not in sys.modules:
        return None
    from transformers import Trainer

    other = None
    for frame in callers():
        variables = frame.f_locals
        if frame.f_code is Trainer.compute_loss.__code__:
            return LossCall(variables["self"], variables.get(LABELS), variables["inputs"])
        # A subclass of Trainer may compute its own loss.
        if isinstance(variables.get("self"), Trainer):
            other = other or LossCall(variables["self"])
    return other


def _loss_of_logits(model: Any, outputs: Any, labels: Any, items: Tensor | int | None) -> tuple[Tensor, bool]:
    """Return the host model's own loss, and whether it is a sum divided by `items`."""
    if labels is None:
        # Trainer removes only "labels" from the batch: a model whose batch has none has seen its targets.
        loss = outputs.get("loss") if hasattr(outputs, "get") else outputs[0]
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss and its batch has no labels; {REMEDY}")
        return loss, False
    from transformers.loss.loss_utils import LOSS_MAPPING

    kind, logits, config = _loss_type(model, outputs), outputs["logits"], model.config
    arguments = {"labels": labels, "num_items_in_batch": items, "config": config, "vocab_size": logits.shape[-1]}
    function: Any = LOSS_MAPPING[kind]
    loss = function(**arguments, **({"pooled_logits": logits} if kind in POOLED else {"logits": logits}))
    mean = kind in POOLED and config.problem_type != "single_label_classification"
    return loss, items is not None and not mean


def _loss_type(model: Any, outputs: Any) -> str:
    """Return the name of the loss of a model's logits in transformers."""
    kind, name = getattr(model, "loss_type", None), type(model).__name__
    generates = kind in (None, "ForConditionalGeneration")
    if outputs.get("aux_loss") is not None:
        raise ValueError(f"{name} adds a loss of its experts to that of its logits; {REMEDY}")
    if generates and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # The labels belong to the decoder's own positions: as in a masked language model, nothing is shifted.
        return "ForMaskedLM"
    if kind == "ForConditionalGeneration" or (kind is None and name.endswith("LMHeadModel")):
        return "ForCausalLM"
    if kind not in (*PLAIN, *POOLED):
        raise ValueError(f"the loss of {name} (loss_type {kind!r}) cannot be computed from its logits alone; {REMEDY}")
    return kind


def callback(handle: Handle) -> Any:
    """Return a `transformers.TrainerCallback` that calls `handle.after_step()` after each optimizer step.

    The handle's step, draw counters and strengths are saved in the Trainer's checkpoints. They are loaded when a run is
    resumed or when it ends with the weights of its best checkpoint. `headwise.load_pretrained` reads a checkpoint.

    Raises:
        ImportError: if transformers is not installed; the message names the extra.
    """
    try:
        from transformers import TrainerCallback
        from transformers.trainer import TRAINER_STATE_NAME
        from transformers.trainer_callback import ExportableState
    except ImportError as error:
        raise ImportError("callback() is for transformers.Trainer: pip install headwise[hf]") from error

    class HeadwiseCallback(TrainerCallback, ExportableState):
        """A callback that reports optimizer steps to the handle and keeps its counters in checkpoints."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                self._load_own(state.stateful_callbacks)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Trainer has loaded the best checkpoint's weights: the strengths of that checkpoint belong to them.
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                path = Path(state.best_model_checkpoint, TRAINER_STATE_NAME)
                saved = json.loads(path.read_text(encoding="utf-8"))["stateful_callbacks"] if path.exists() else {}
                if not self._load_own(saved):
                    warn(f"{path} holds no state of {handle!r}: it keeps the strengths of the last step")

        def _load_own(self, saved: dict[str, Any] | None) -> bool:
            """Load the handle's own state from those that a Trainer saved, and return whether it was there."""
            states = (saved or {}).get(type(self).__name__, [])
            for entry in states if isinstance(states, list) else [states]:
                # If one Trainer has several regularized models, each finds its own entry by its sites.
                progress = entry["attributes"]["progress"]
                if progress["counters"].keys() == handle.state()["counters"].keys():
                    handle.load_state(progress)
                    return True
            return False

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handle.after_step()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                describe_checkpoint(handle, Path(args.output_dir, f"checkpoint-{state.global_step}"))

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"progress": handle.state()}}

    return HeadwiseCallback()
