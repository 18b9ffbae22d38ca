"""Regularize: fit methods onto the attention layers of a model that already exists."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import nn

from headwise.core.method import Method
from headwise.regularizing.handle import Regularized
from headwise.regularizing.plan import Plan, Where, by_text, plan


def regularize(
    model: nn.Module,
    *methods: Method,
    where: Where = None,
    example: Any = None,
    seed: int = 0,
    allow_none: bool = False,
    attention: str | None = None,
    **unknown: Never,
) -> Regularized:
    """Fit methods onto the attention layers of a model, in place, and give the handle.

    Args:
        model: any module whose attention goes through transformers' attention interface, `nn.MultiheadAttention`,
            `F.scaled_dot_product_attention` or `flex_attention`.
        methods: in order of action; stages act in their fixed order, methods within a stage as written.
        where: which sites change: a function of `Site`, or names of sites; None takes every site on which the methods
            have a meaning.
        example: a batch (tensor, tuple of arguments or dict of keywords). The model runs on it once, without gradients,
            with random state and buffers restored, where heads or shapes cannot be known otherwise.
        seed: of the methods' draws; they never touch torch's generators.
        allow_none: accept no methods at all (a handle that only reads).
        attention: who computes the attention of transformers' layers that were loaded with a kernel (flash, flex, one
            of the hub or of your own): None keeps the kernel, and methods that edit logits or weights are refused
            there; "headwise" computes it here, with every method. Layers without such a kernel are computed here either
            way.
        unknown: none; a name that is not known is told with the one that was meant.

    Raises:
        ValueError: with all problems at once, where a site asked for cannot be reached, a method has no meaning
            anywhere, names or settings are wrong; the model is untouched then.
        TypeError: for an argument of another name.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.DropHead(p=0.2), headwise.EntropyPenalty(strength=0.01))
        >>> handle
        Regularized(DropHead(p=0.2) + EntropyPenalty(strength=0.01), 2 sites)
        >>> loss = model(torch.randn(4, 8, 16)).square().mean() + handle.loss()
    """
    if unknown:
        raise TypeError(no_argument(next(iter(unknown))))
    compiled = False
    # torch.compile's wrapper has no layers of its own: names, hooks and the handle belong to the model inside.
    while isinstance(model, nn.Module) and (inside := model._modules.get("_orig_mod")) is not None:
        model, compiled = inside, True
    made = plan(model, list(methods), where, allow_none, example, attention)
    problems = _unknown(made)
    if problems:
        raise ValueError("\n".join(problems))
    fitted = Regularized(model, made, seed)
    if compiled or any(part._compiled_call_impl is not None for part in model.modules()):
        # a graph that was made before knows nothing of the methods
        torch.compiler.reset()
    # A batch is no part of a model.
    for found in made.found:
        found.site.example = None
    return fitted


# what others call it
OTHER_NAMES = {
    name: known
    for known, names in {
        "where": ("layers", "layer", "sites", "modules", "target_modules", "only", "include", "exclude", "filter"),
        "example": ("batch", "inputs", "example_inputs", "sample"),
        "seed": ("generator", "random_state"),
        "methods": ("method", "regularizers"),
    }.items()
    for name in names
}


def no_argument(name: str) -> str:
    """Say that `regularize` has no argument of this name, and which one serves."""
    remedies = {
        "where": 'choose layers with where=["name", ...] or where=lambda site: site.depth < 4; headwise.sites(model) '
        "lists them",
        "example": "pass a batch as example=batch",
        "seed": "methods draw by seed=0",
        "methods": "methods stand behind the model: regularize(model, headwise.DropHead(p=0.2))",
    }
    known = OTHER_NAMES.get(name)
    remedy = remedies[known] if known else "its arguments: model, methods, where, example, seed, allow_none, attention"
    return f"regularize() has no argument {name!r}: {remedy}"


def _unknown(made: Plan) -> list[str]:
    told = []
    for site, methods in made.chosen:
        learned = [m for m in methods if m.learns]
        missing = sorted({n for m in learned for n in m.shapes if getattr(site, n) is None})
        if missing:
            told.append(
                (
                    site.name,
                    f"{learned[0]!r} learns parameters, and their shapes ({', '.join(missing)}) cannot be known from "
                    "the module: pass example=batch to regularize(), a batch on which the model can run once",
                )
            )
    return by_text(told)
