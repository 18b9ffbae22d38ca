"""Layers of diffusers: an object beside the weights, the processor, computes their attention, and is followed to the
call it makes.

A processor calls `F.scaled_dot_product_attention`, or the library's own `dispatch_attention_fn`, which calls the same
for torch's backends. So the calls are served as those of any other module that makes them; what is told here is where
they are made, and which tokens meet: in joint attention those of a text stand beside those of an image.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from torch import nn

from headwise.core.site import Site
from headwise.hosts.diffusers import dispatch
from headwise.hosts.diffusers.tokens import OtherTokens, text_first
from headwise.hosts.layers.candidate import Candidate
from headwise.hosts.layers.code import forward_of, names_used, reached
from headwise.hosts.layers.declared import is_cross, without_softmax
from headwise.hosts.sdpa.adapter import NAME, SdpaAdapter
from headwise.projections.adapted import base_of
from headwise.projections.names import HEAD_DIM, HEADS, QK_NORMS, first_number

DEPTH = 2
SET = (
    "call {model}.set_attn_processor(...) with one that calls F.scaled_dot_product_attention, such as diffusers' "
    "{known}"
)


def find(model: nn.Module, taken: set[nn.Module]) -> list[Candidate]:
    """Find the layers of diffusers that have their attention computed by a processor."""
    if "diffusers" not in sys.modules:
        return []
    found = []
    for name, module in model.named_modules():
        processor = processor_of(module)
        if processor is None or module in taken:
            continue
        site = _describe(name, module, processor)
        if reason := _unreachable(module, processor, type(model).__name__):
            found.append(Candidate(site, None, reason))
        else:
            tokens = OtherTokens(module, _around(model, name), text_first(_code(processor)))
            found.append(Candidate(site, SdpaAdapter(site, tokens, dispatch.stand_in, dispatch.step_aside)))
    return found


def processor_of(module: nn.Module) -> Any:
    """Return the object that computes the attention of a layer of diffusers, or None for any other module."""
    if not any(base.__module__.startswith("diffusers.") for base in type(module).__mro__):
        return None
    processor = vars(module).get("processor", module._modules.get("processor"))
    return processor if callable(processor) and "processor" in names_used(forward_of(module)) else None


def _code(processor: Any) -> Any:
    """Return the function that a processor runs."""
    own = type(processor).__dict__.get("__call__")
    return (
        own
        if inspect.isfunction(own)
        else forward_of(processor)
        if isinstance(processor, nn.Module)
        else type(processor).__call__
    )


def _functions(processor: Any) -> list[Any]:
    return list(reached(_code(processor), type(processor), DEPTH))


def _around(model: nn.Module, name: str) -> nn.Module | None:
    above = name.rpartition(".")[0]
    return model.get_submodule(above) if above else None


def _describe(name: str, module: nn.Module, processor: Any) -> Site:
    site = Site(name, module, host="diffusers", is_cross=_is_cross(name, module))
    query, key = (
        base_of(layer) if isinstance(layer, nn.Module) else None
        for layer in (getattr(module, n, None) for n in ("to_q", "to_k"))
    )
    site.heads, site.head_dim = first_number(module, HEADS), first_number(module, HEAD_DIM)
    if isinstance(query, nn.Linear):
        site.hidden = query.in_features
        if site.heads and not site.head_dim:
            site.head_dim = query.out_features // site.heads
    if isinstance(key, nn.Linear) and site.head_dim:
        site.kv_heads = key.out_features // site.head_dim
    site.qk_norm = any(_acts(getattr(module, norm, None)) for norm in QK_NORMS)
    words = {word for f in _functions(processor)[:1] for word in (*names_used(f), *f.__code__.co_varnames)}
    site.rope = any(re.search("rotary|rope", word) for word in words)
    # The same classes serve layers of one stream, which have no projections for a text then.
    site.joint = text_first(_code(processor)) is not None and getattr(module, "added_kv_proj_dim", 0) is not None
    return site


def _is_cross(name: str, module: nn.Module) -> bool:
    declared = getattr(module, "is_cross_attention", None)
    # Blocks keep self attention as attn1 and cross attention as attn2.
    return declared if isinstance(declared, bool) else is_cross(name, module) or name.rpartition(".")[2] == "attn2"


def _acts(norm: Any) -> bool:
    return isinstance(norm, nn.Module) and not isinstance(norm, nn.Identity)


def _unreachable(module: nn.Module, processor: Any, model: str) -> str:
    """Say why what a processor computes cannot be served, or give an empty text."""
    kind = type(processor).__name__
    used = set().union(*(names_used(function) for function in _functions(processor)))
    known = "JointAttnProcessor2_0" if getattr(module, "add_q_proj", None) is not None else "AttnProcessor2_0"
    remedy = SET.format(model=model, known=known)
    if isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None:
        return (
            f"its processor {kind} holds weights and attends to tokens of its own (an IP-Adapter, custom diffusion): "
            f"unload it, or {remedy}"
        )
    if used & {NAME, dispatch.NAME}:
        return ""
    if reason := without_softmax(module) or ("Linear" in kind and "a linear form"):
        return (
            reason
            if "softmax" in reason
            else f"its processor {kind} computes {reason} of attention, which has no softmax: leave it as it is"
        )
    what = "an explicit softmax" if "get_attention_scores" in used else "its attention by a kernel of its own"
    return f"its processor {kind} computes {what} and calls neither F.{NAME} nor {dispatch.NAME}: {remedy}"
