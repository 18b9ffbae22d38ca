"""Build the optimizer of a recipe: torch's own, LARS beside them, with weight decay by group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise.experiments.recipe import Recipe
from headwise.files.errors import StudyError
from headwise.regularizing.parameter_groups import parameter_groups, undecayed
from headwise.training.lars import LARS

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lars": LARS,
    "adagrad": torch.optim.Adagrad,
}


def build_optimizer(recipe: Recipe, model: nn.Module, example: Any, device: torch.device) -> torch.optim.Optimizer:
    """Build the optimizer of `recipe` for `model`, whose methods are fitted already; `example` is a batch of inputs.

    Raises:
        StudyError: where a weight decay of its own was asked for and the weights it is meant for cannot be told.
    """
    settings: dict[str, Any] = recipe.optimizer_settings()
    if recipe.optimizer in ("adamw", "adam", "sgd"):
        settings["fused"] = device.type == "cuda"
    return KINDS[recipe.optimizer](decay_groups(recipe, model, example), lr=recipe.learning_rate, **settings)


def decay_groups(recipe: Recipe, model: nn.Module, example: Any) -> list[dict[str, Any]]:
    """Give the groups "attention", "mlp", "other" and "undecayed" of headwise.parameter_groups at the recipe's decays."""
    apart = {"attention": recipe.attention_weight_decay, "mlp": recipe.mlp_weight_decay}
    try:
        return parameter_groups(
            model,
            recipe.learning_rate,
            recipe.weight_decay,
            recipe.attention_weight_decay,
            mlp_weight_decay=recipe.mlp_weight_decay,
            example=example,
        )
    except ValueError as error:
        asked = [f"{name}_weight_decay={value:g}" for name, value in apart.items() if value is not None]
        if asked:
            raise StudyError(f"the weight decays {', '.join(asked)} cannot be given: {error}") from error
    # whose weights are whose changes no number where all decay alike
    kept = {id(parameter) for parameter in undecayed(model)}
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"name": "other", "params": [p for p in learned if id(p) not in kept], "weight_decay": recipe.weight_decay},
        {"name": "undecayed", "params": [p for p in learned if id(p) in kept], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
