"""transformers.Trainer: the penalties beside its loss, its optimizer's steps, and counters in its checkpoints."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.regularizing.handle_place import Handle, kept_handle

# The losses that transformers computes from logits and labels alone, by the keyword under which they take the logits.
PLAIN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
POOLED = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
REMEDY = "pass the task's loss to compute_loss_func() as base=function(outputs, labels, num_items_in_batch=None)"


def compute_loss_func(handle: Handle, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Return a `compute_loss_func` for transformers.Trainer that adds the handle's `loss()` to the task's loss.

    Without penalties the task's loss is the plain Trainer's, label smoothing, gradient accumulation and processes
    included: the model gets its labels as it would there and computes its own loss. Under gradient accumulation the
    penalties' gradient is that of the mean of the micro batches' penalties, also where the last step of an epoch has
    fewer of them, and over processes that of their joined batch. Evaluation adds nothing.

    Args:
        handle: of the regularized model.
        base: the task's loss, `base(outputs, labels, num_items_in_batch=None)`, scaled as Trainer asks of a
            `compute_loss_func`: a sum over `num_items_in_batch`, where that is given. None takes the host model's own.

    Raises:
        ValueError: from the loss function, where base is None and the model's own loss cannot be told, or where base
            stands beside a label_smoothing_factor.
    """
    given = Labels(handle)
    known = handle.model._forward_pre_hooks.values()
    if base is None and not any(isinstance(hook, Labels) for hook in known):
        handle.hooks.append(handle.model.register_forward_pre_hook(given, with_kwargs=True, prepend=True))
    given = next((hook for hook in known if isinstance(hook, Labels)), given)

    def loss(outputs: Any, labels: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        asked = _asked()
        training = torch.is_grad_enabled() and handle.model.training
        divisor = 1 if asked is None else _divisor(asked.trainer, num_items_in_batch, training)
        if base is not None:
            _refuse_smoothing(asked)
            task = base(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif asked is not None and (labels is None or given.taken(labels) or asked.trainer.label_smoother is not None):
            task = _plain(asked.trainer, outputs, labels, num_items_in_batch, training)
        else:
            if asked is not None:
                _refuse_source_tokens(handle.model, asked.inputs)
            task, summed = _own(handle.model, outputs, labels, num_items_in_batch)
            task = task if summed else task / divisor
        return task + handle.loss().to(task.device) / divisor if training else task

    return loss


class Labels:
    """Return the labels back to the model: Trainer takes them out of the batch where a `compute_loss_func` is set.

    Sequence-to-sequence models make their decoder's input of them, and each model knows best what its loss is. Under
    torch.compile the callers cannot be seen: the loss is computed from the logits there.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.latest: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if torch.compiler.is_compiling():
            return None
        asked = _asked()
        if asked is None or asked.labels is None or "labels" in kwargs or asked.trainer.label_smoother is not None:
            return None
        if not _is_whole(asked.trainer.model, self.handle):
            return None
        self.latest = asked.labels
        return args, {**kwargs, "labels": asked.labels}

    def taken(self, labels: Any) -> bool:
        """Return whether the model's last forward got these labels, once."""
        latest, self.latest = self.latest, None
        return latest is labels

    def __deepcopy__(self, memo: dict[int, Any]) -> Labels:
        return Labels(copy.deepcopy(self.handle, memo))


def _is_whole(model: nn.Module, handle: Handle) -> bool:
    """Return whether a Trainer's model is the regularized one, adapters around it aside, and not a larger one around
    it."""
    config = getattr(model, "active_peft_config", None)
    # Prompts that are learned are put before the tokens, and the adapter itself makes labels for them.
    if getattr(config, "is_prompt_learning", False):
        return False
    try:
        return kept_handle(model) is handle
    except ValueError:
        return False


def _plain(trainer: Any, outputs: Any, labels: Any, items: Tensor | int | None, training: bool) -> Tensor:
    """Return the plain Trainer's loss of these outputs, scaled so that what Trainer does to it ends at the plain
    Trainer's number."""
    # Where the model takes no number of items, the plain Trainer counts none.
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
    # Trainer divides a plain mean by the micro batches, but not what a compute_loss_func gives.
    divides = training and trainer.loss_is_scaled_for_ga is None
    return task / (_processes(trainer, items) * (trainer.current_gradient_accumulation_steps if divides else 1))


def _shifts(trainer: Any) -> bool:
    """Return whether the plain Trainer smooths labels of the next token: as it does, by the class's name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _refuse_smoothing(asked: Asked | None) -> None:
    if asked is not None and asked.trainer.label_smoother is not None:
        raise ValueError(
            f"label_smoothing_factor={asked.trainer.args.label_smoothing_factor} does nothing beside "
            "compute_loss_func(base=...): "
            "smooth the labels in base and set label_smoothing_factor=0, or leave base out"
        )


def _refuse_source_tokens(model: Any, inputs: Any) -> None:
    """Refuse a sequence-to-sequence model that saw neither labels nor decoder tokens: some take the source's
    instead."""
    if inputs is None or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return
    if not any(name.startswith("decoder_input") for name in inputs):
        raise ValueError(
            f"{type(model).__name__} was called without labels and without decoder_input_ids (torch.compile, threads "
            "or a model around it keep the labels from it): add decoder_input_ids to the batch, as "
            "DataCollatorForSeq2Seq(tokenizer, model=model) does"
        )


def _divisor(trainer: Any, items: Tensor | int | None, training: bool) -> int:
    """Return by what a mean over one micro batch is divided, so that with Trainer's own scaling gradients add to a
    mean."""
    # None and True: Trainer takes what a compute_loss_func gives as scaled already, and divides by nothing.
    scaled = training and trainer.loss_is_scaled_for_ga is not False
    return _processes(trainer, items) * (trainer.current_gradient_accumulation_steps if scaled else 1)


def _processes(trainer: Any, items: Tensor | int | None) -> int:
    """Return by what Trainer multiplies: the processes, over which gradients are averaged; right for a sum, not for a
    mean."""
    args = trainer.args
    if not args.average_tokens_across_devices or items is None:
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size() if args.n_gpu <= 1 else args.n_gpu


@dataclass
class Asked:
    """A Trainer that asks for a loss, the labels it took out of the batch, and the rest of it where that can be
    seen."""

    trainer: Any
    labels: Any = None
    inputs: Any = None


def _asked() -> Asked | None:
    """Find the Trainer that asks for the loss.

    It hands over neither itself nor the number of micro batches of this step, which it alone knows: the callers' frames
    tell.
    """
    if "transformers" not in sys.modules:
        return None
    from transformers import Trainer

    other = None
    frame = sys._getframe(1)
    while frame is not None:
        known = frame.f_locals
        if frame.f_code is Trainer.compute_loss.__code__:
            return Asked(known["self"], known.get("labels"), known["inputs"])
        # A subclass that computes its loss by itself.
        if isinstance(known.get("self"), Trainer):
            other = other or Asked(known["self"])
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return other


def _own(model: Any, outputs: Any, labels: Any, items: Tensor | int | None) -> tuple[Tensor, bool]:
    """Return the host model's own loss, and whether it is a sum over `items`."""
    if labels is None:
        # Trainer takes "labels" out of the batch, and nothing else: a model without them has seen its targets.
        loss = outputs.get("loss") if hasattr(outputs, "get") else outputs[0]
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss and its batch has no labels; {REMEDY}")
        return loss, False
    from transformers.loss.loss_utils import LOSS_MAPPING

    kind, logits, config = _kind(model, outputs), outputs["logits"], model.config
    given = {"labels": labels, "num_items_in_batch": items, "config": config, "vocab_size": logits.shape[-1]}
    function: Any = LOSS_MAPPING[kind]
    loss = function(**given, **({"pooled_logits": logits} if kind in POOLED else {"logits": logits}))
    mean = kind in POOLED and config.problem_type != "single_label_classification"
    return loss, items is not None and not mean


def _kind(model: Any, outputs: Any) -> str:
    """Return the name under which transformers keeps the loss of a model's logits."""
    kind, name = getattr(model, "loss_type", None), type(model).__name__
    generates = kind in (None, "ForConditionalGeneration")
    if outputs.get("aux_loss") is not None:
        raise ValueError(f"{name} adds a loss of its experts to that of its logits; {REMEDY}")
    if generates and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # Labels are those of the decoder's own positions: nothing is shifted, as in a masked language model.
        return "ForMaskedLM"
    if kind == "ForConditionalGeneration" or (kind is None and name.endswith("LMHeadModel")):
        return "ForCausalLM"
    if kind not in (*PLAIN, *POOLED):
        raise ValueError(f"the loss of {name} (loss_type {kind!r}) cannot be computed from its logits alone; {REMEDY}")
    return kind


def callback(handle: Handle) -> Any:
    """Return a `transformers.TrainerCallback` that calls `handle.after_step()` after each optimizer step.

    The handle's step, draw counters and strengths are saved with the Trainer's checkpoints, and read when a run is
    resumed or ends with the weights of its best checkpoint.

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
        """Takes the optimizer's steps to the handle, and the handle's counters to the checkpoint and back."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                self._take(state.stateful_callbacks)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Trainer has put the best checkpoint's weights into the model: their strengths belong to them.
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                kept = Path(state.best_model_checkpoint, TRAINER_STATE_NAME)
                saved = json.loads(kept.read_text(encoding="utf-8"))["stateful_callbacks"] if kept.exists() else {}
                if not self._take(saved):
                    warnings.warn(
                        f"{kept} holds no state of {handle!r}: its strengths stay those of the last step", stacklevel=2
                    )

        def _take(self, saved: dict[str, Any] | None) -> bool:
            """Find the handle's own state among those that a Trainer saved; tell whether it was there."""
            kept = (saved or {}).get(type(self).__name__, [])
            for entry in kept if isinstance(kept, list) else [kept]:
                # Of several regularized models in one Trainer, each finds its own entry by its sites.
                progress = entry["attributes"]["progress"]
                if progress["counters"].keys() == handle.state()["counters"].keys():
                    handle.load_state(progress)
                    return True
            return False

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handle.after_step()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"progress": handle.state()}}

    return HeadwiseCallback()
