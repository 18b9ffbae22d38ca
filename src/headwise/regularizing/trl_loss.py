"""TRL: the penalties beside the losses that its trainers compute by themselves, from one forward or from several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.regularizing.handle import Regularized

# Stages by which a method changes what the model gives; a penalty reads.
CHANGES = ("build", "hidden", "inputs", "logits", "weights", "output", "branch")
# Trainers that weigh what one forward sampled by the probabilities of another.
SAMPLING = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
# Trainers that compare the model with a reference.
REFERRING = ("DPOTrainer", "KTOTrainer")


def is_trl(trainer: object) -> bool:
    """Return whether a Trainer is one of TRL's, or made of one."""
    return any(cls.__module__.split(".")[0] == "trl" for cls in type(trainer).__mro__)


def penalize(handle: Regularized, trainer: Any) -> None:
    """Let a trainer of TRL add the handle's penalties to its loss, in training alone.

    They are those of the forwards with gradients in one `compute_loss`, each counted once; what a reference model
    gives, or any forward without gradients, adds none. Under gradient accumulation their gradient is that of the mean
    of the micro batches'.

    Raises:
        ValueError: if methods would change what a trainer compares: samples and their probabilities (GRPO, RLOO),
            or, in the first step, a reference that runs through the same methods (DPO and KTO without a ref_model).
    """
    names = {cls.__name__ for cls in type(trainer).__mro__}
    changing = next((m for m in handle.methods if any(map(m.overrides, CHANGES))), None)
    if changing is not None and names.intersection(SAMPLING):
        raise ValueError(
            f"{type(trainer).__name__} samples from the model in evaluation and weighs the samples by its "
            f"probabilities in training, and {changing!r} would make the two differ: take methods that only penalize "
            "or act after a step, or regularize in SFTTrainer"
        )
    inner = trainer.compute_loss

    def compute_loss(
        model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        training = torch.is_grad_enabled() and model.training
        if training and changing is not None and names.intersection(REFERRING):
            _refuse_same_reference(trainer, changing)
        given = inner(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        if not training:
            return given
        task, *outputs = given if return_outputs else (given,)
        divisor = trainer.current_gradient_accumulation_steps if _scaled(trainer, num_items_in_batch) else 1
        loss = task + handle.loss().to(task.device) / divisor
        return (loss, *outputs) if return_outputs else loss

    trainer.compute_loss = compute_loss


def _refuse_same_reference(trainer: Any, changing: Method) -> None:
    if getattr(trainer, "ref_model", None) is None and not getattr(trainer.args, "precompute_ref_log_probs", False):
        raise ValueError(
            f"{type(trainer).__name__} takes the regularized model itself, its adapters off, for the reference, which "
            f"{changing!r} would change: give a ref_model, or set precompute_ref_log_probs=True"
        )


def _scaled(trainer: Any, items: Tensor | int | None) -> bool:
    """Return whether Trainer takes the loss as divided by the micro batches already, and divides it by nothing."""
    told: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return told
    return bool(trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
