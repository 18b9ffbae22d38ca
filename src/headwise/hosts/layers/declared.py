"""Read what a module declares before any call: from its class, its names, its settings and its code."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from torch import nn

from headwise.hosts.layers.code import forward_of, names_used, speaks_of_attention

LIKE = re.compile(r"attention|attn|mhsa|gpsa", re.IGNORECASE)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module has parameters and looks like attention by its class name or its forward.

    A forward with local variables such as q, k and v counts as attention, whatever the name of its class.
    """
    if next(module.parameters(), None) is None:
        return False
    return bool(LIKE.search(type(module).__name__)) or speaks_of_attention(module)


def over_channels(module: nn.Module) -> str:
    """Return why no method applies to a layer that attends over channels; an empty string for others."""
    if re.search(r"^XCA$|channel_?att", type(module).__name__, re.IGNORECASE):
        return (
            "it attends from channel to channel, not from token to token, where no method has a meaning: leave it as "
            "it is"
        )
    return ""


def without_softmax(module: nn.Module) -> str:
    """Return why no method applies to a layer with a recurrent state, not a softmax; an empty string for others."""
    kind = type(module).__name__
    if re.search(r"delta|linear_?att|lightning|retention|mamba|gla(?![a-z])", kind, re.IGNORECASE):
        return (
            f"it is a {kind}, which carries a state from token to token in the place of a softmax over keys: there are "
            "no attention weights, so that no method has a meaning; methods stand on layers with full attention"
        )
    return ""


def is_cross(name: str, module: nn.Module) -> bool:
    """Return whether a module is cross attention, by its declared kind or its name."""
    if getattr(module, "is_cross_attention", False):
        return True
    # The name within its layer: in `encoder.layer.0.crossattention.self` only the parent's name shows it.
    within = re.split(r"(?:^|\.)\d+\.", name)[-1] if re.search(r"(?:^|\.)\d+\.", name) else name.rpartition(".")[2]
    words = f"{within} {type(module).__name__}".lower().replace("multiheadattention", "")
    return bool(re.search(r"cross|encoder_?attn|encdec|enc_dec|multihead_attn", words))


def attends_across(name: str, module: nn.Module) -> bool:
    """Return whether the keys are tokens other than the queries: cross attention, class attention, or a pool with
    latent queries."""
    if is_cross(name, module):
        return True
    if re.search(r"class_?att|att(entio)?n_?pool|resampler|perceiver", type(module).__name__, re.IGNORECASE):
        return True
    parameters = inspect.signature(forward_of(module)).parameters.values()
    required = {p.name for p in parameters if p.default is p.empty}
    return bool(required & {"context", "memory", "kv", "key_value", "encoder_hidden_states"})


def shifts_windows(modules: Iterable[nn.Module]) -> bool:
    """Return whether one of the modules, an attention layer and its blocks, shifts windows, as every second block of
    Swin does."""
    # target_shift_size: the shift that timm uses again when the input grows.
    sizes = (getattr(module, name, 0) for module in modules for name in ("shift_size", "target_shift_size"))
    return any(any(size) if isinstance(size, tuple | list) else isinstance(size, int) and size > 0 for size in sizes)


def other_positions(module: nn.Module) -> bool:
    """Return whether a layer whose code supports rotary positions is configured for others: Falcon with ALiBi, ESM
    with absolute positions."""
    config = getattr(module, "config", None)
    if getattr(config, "alibi", False) is True:
        return True
    used = names_used(forward_of(module))
    for name in ("position_embedding_type", "position_embeddings_type"):
        kind = getattr(module, name, None) or getattr(config, name, None)
        if name in used and isinstance(kind, str):
            return not re.search("rot|rope", kind)
    return False
