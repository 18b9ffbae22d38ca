"""The function `regularize`, which fits methods onto the attention layers of an existing model."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import nn

from headwise.attend.core import Method
from headwise.attend.core.random_draws import DRAWS
from headwise.attend.regularizing.adapter_files import keep_with_adapters
from headwise.attend.regularizing.handle import Regularized
from headwise.attend.regularizing.plan import Plan, Where, by_text, plan
from headwise.borders import COMPILED_INSIDE, is_compiled, own_modules
from headwise.files.arguments import is_a, suggesting


@suggesting
def regularize(
    model: nn.Module,
    *methods: Method,
    where: Where = None,
    example: Any = None,
    seed: int = 0,
    allow_none: bool = False,
    attention: str | None = None,
    draws: str = "counter",
) -> Regularized:
    """Fit methods onto the attention layers of a model, in place, and return the handle.

    Args:
        model: any module whose attention goes through transformers' attention interface, `nn.MultiheadAttention`,
            `F.scaled_dot_product_attention` or `flex_attention`.
        methods: in order of action; stages act in their fixed order, methods within a stage as written.
        where: which sites change: a function of `Site`, or names of sites; None selects every site to which the
            methods apply.
        example: a batch (tensor, tuple of arguments or dict of keywords). The model runs on it once, without gradients
            and with random state and buffers restored, to learn heads and shapes that cannot be known otherwise.
        seed: of the methods' random draws; they never use torch's generators, unless `draws` says so.
        allow_none: accept a call without methods (the handle only reads then).
        attention: who computes the attention of transformers' layers that were loaded with a kernel (flash, flex, one
            of the hub or your own): with None the kernel does, and methods that edit logits or weights are refused
            there; with "headwise" this library does, for every method. It computes layers without such a kernel in
            both cases.
        draws: "counter": each pass draws by its number, whatever else draws. "torch": each pass of a layer with a
            method that draws takes one number from torch's generator on the CPU, so that a batch that runs again with
            the random state restored repeats its draws, as with dropout: under GradCache, the cached losses of
            sentence-transformers, reentrant checkpointing. Dropout on the CPU and the order of data change too.

    Raises:
        ValueError: if a requested site cannot be reached, a method applies nowhere, or names or settings are wrong.
            The message lists all problems at once, and the model is unchanged.
        TypeError: if an argument has an unknown name.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> handle = headwise.regularize(model, headwise.DropHead(p=0.2), headwise.EntropyPenalty(strength=0.01))
        >>> handle
        Regularized(DropHead(p=0.2) + EntropyPenalty(strength=0.01), 2 sites)
        >>> loss = model(torch.randn(4, 8, 16)).square().mean() + handle.loss()
    """
    is_a("seed", seed, int, "a whole number")
    is_a("allow_none", allow_none, bool, "True or False")
    if draws not in DRAWS:
        raise ValueError(f"draws must be one of {', '.join(map(repr, DRAWS))}, got {reprlib.repr(draws)}")
    compiled = False
    # torch.compile's wrapper has no layers: names, hooks and the handle belong to the model inside.
    while isinstance(model, nn.Module) and (inside := own_modules(model).get(COMPILED_INSIDE)) is not None:
        model, compiled = inside, True
    decisions = plan(model, list(methods), where, allow_none, example, attention)
    problems = _missing_shapes(decisions)
    if problems:
        raise ValueError("\n".join(problems))
    fitted = Regularized(model, decisions, seed, draws)
    keep_with_adapters(fitted)
    if compiled or any(is_compiled(part) for part in model.modules()):
        # a graph that was made before knows nothing of the methods
        torch.compiler.reset()
    # The example batch must not stay referenced by the model.
    for candidate in decisions.found:
        candidate.site.example = None
    return fitted


def _missing_shapes(decisions: Plan) -> list[str]:
    messages = []
    for site, methods in decisions.chosen:
        learned = [m for m in methods if m.learns]
        missing = sorted({n for m in learned for n in m.shapes if getattr(site, n) is None})
        if missing:
            messages.append(
                (
                    site.name,
                    f"{learned[0]!r} learns parameters, and their shapes ({', '.join(missing)}) cannot be known from "
                    "the module: pass example=batch to regularize(), a batch on which the model can run once",
                )
            )
    return by_text(messages)
