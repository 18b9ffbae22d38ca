"""transformers.Trainer: a callback that takes the optimizer's steps, and a loss function that adds the penalties."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.regularizing.handle import Regularized

# The losses that transformers computes from logits and labels alone, by the keyword under which they take the logits.
PLAIN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
POOLED = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification", "ForAudioClassification")
REMEDY = "pass the task's loss to compute_loss_func() as base=function(outputs, labels, num_items_in_batch=None)"


def callback(handle: Regularized) -> Any:
    """Give a `transformers.TrainerCallback` that calls `handle.after_step()` after each optimizer step.

    The handle's step and draw counters are saved with the Trainer's checkpoints and read when a run is resumed.

    Raises:
        ImportError: naming the extra, where transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
        from transformers.trainer_callback import ExportableState
    except ImportError as error:
        raise ImportError("callback() is for transformers.Trainer: pip install headwise[hf]") from error

    class HeadwiseCallback(TrainerCallback, ExportableState):
        """Takes the optimizer's steps to the handle, and the handle's counters to the checkpoint and back."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept = (state.stateful_callbacks or {}).get(type(self).__name__, [])
            for entry in kept if isinstance(kept, list) else [kept]:
                # Of several regularized models in one Trainer, each finds its own entry by its sites.
                progress = entry["attributes"]["progress"]
                if state.global_step and progress["counters"].keys() == handle.state()["counters"].keys():
                    handle.load_state(progress)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handle.after_step()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"progress": handle.state()}}

    return HeadwiseCallback()


def compute_loss_func(handle: Regularized, base: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """Give a `compute_loss_func` for transformers.Trainer that adds the handle's `loss()` to the task's loss.

    Under gradient accumulation the gradient is that of the mean of the micro batches' penalties, also where the last
    step of an epoch has fewer of them, and over processes that of their joined batch. Evaluation adds nothing.

    Args:
        handle: of the regularized model.
        base: the task's loss, `base(outputs, labels, num_items_in_batch=None)`, scaled as Trainer asks of a
            `compute_loss_func`: a sum over `num_items_in_batch`, where that is given. None takes the host model's own.

    Raises:
        ValueError: from the loss function, where base is None and the model's own loss cannot be told.
    """

    def loss(outputs: Any, labels: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        training = torch.is_grad_enabled() and handle.model.training
        divisor = _divisor(num_items_in_batch, training)
        if base is not None:
            task = base(outputs, labels, num_items_in_batch=num_items_in_batch)
        else:
            task, summed = _own(handle.model, outputs, labels, num_items_in_batch)
            task = task if summed else task / divisor
        return task + handle.loss().to(task.device) / divisor if training else task

    return loss


def _divisor(items: Tensor | int | None, training: bool) -> float:
    """Give by what a mean over one micro batch is divided, so that with Trainer's own scaling gradients add to a mean."""
    trainer = _trainer()
    if trainer is None:
        return 1.0
    args, divisor = trainer.args, 1.0
    # None and True: Trainer takes what a compute_loss_func gives as scaled already, and divides by nothing.
    if training and trainer.loss_is_scaled_for_ga is not False:
        divisor *= trainer.current_gradient_accumulation_steps
    if args.average_tokens_across_devices and items is not None:
        # Trainer multiplies by the processes, over which gradients are averaged then: right for a sum, not for a mean.
        divisor *= trainer.accelerator.num_processes // trainer.get_tp_size() if args.n_gpu <= 1 else args.n_gpu
    return divisor


def _trainer() -> Any:
    """Find the Trainer that asks for the loss.

    It hands over neither itself nor the number of micro batches of this step, which it alone knows: the callers' frames
    tell.
    """
    from transformers import Trainer

    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _own(model: Any, outputs: Any, labels: Any, items: Tensor | int | None) -> tuple[Tensor, bool]:
    """Give the host model's own loss, and whether it is a sum over `items`."""
    if labels is None:
        # Trainer takes "labels" out of the batch, and nothing else: a model without them has seen its targets.
        loss = outputs.get("loss") if hasattr(outputs, "get") else outputs[0]
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss and its batch has no labels; {REMEDY}")
        return loss, False
    from transformers.loss.loss_utils import LOSS_MAPPING

    kind, logits, config = _kind(model, outputs), outputs["logits"], model.config
    given = {"labels": labels, "num_items_in_batch": items, "config": config, "vocab_size": logits.shape[-1]}
    loss = LOSS_MAPPING[kind](**given, **({"pooled_logits": logits} if kind in POOLED else {"logits": logits}))
    mean = kind in POOLED and config.problem_type != "single_label_classification"
    return loss, items is not None and not mean


def _kind(model: Any, outputs: Any) -> str:
    """Give the name under which transformers keeps the loss of a model's logits."""
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
