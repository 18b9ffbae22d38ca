"""Penalties for the trainers of TRL, which compute their losses by themselves from one or several forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.method import Method
from headwise.regularizing.handle import Regularized

# Stages by which a method changes the model's outputs; penalties only read.
CHANGES = ("build", "hidden", "inputs", "logits", "weights", "output", "branch")
# Trainers that weight the samples of one forward by the probabilities of another.
SAMPLING = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
# Trainers that compare the model with a reference.
REFERRING = ("DPOTrainer", "KTOTrainer")


def is_trl(trainer: object) -> bool:
    """Return whether a Trainer is one of TRL's or a subclass of one."""
    return any(cls.__module__.split(".")[0] == "trl" for cls in type(trainer).__mro__)


def penalize(handle: Regularized, trainer: Any) -> None:
    """Let a trainer of TRL add the handle's penalties to its loss, in training only.

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
    unlike = next((m for m in handle.methods if any(m.overrides(s) for s in CHANGES if s != "build" or m.learns)), None)
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
