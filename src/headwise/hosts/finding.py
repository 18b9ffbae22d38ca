"""Finding: every attention-like module of a model, asked of each host in turn."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from headwise.core.remedies import LOAD_SDPA
from headwise.core.site import Site, number
from headwise.hosts import diffusers
from headwise.hosts.layers.candidate import Candidate
from headwise.hosts.layers.code import forward_of, names_used
from headwise.hosts.layers.declared import LIKE, is_cross, looks_like_attention, over_channels, without_softmax
from headwise.hosts.sdpa import adapter as sdpa
from headwise.hosts.torch_mha import adapter as torch_mha
from headwise.hosts.transformers import adapter as transformers
from headwise.projections.sharded import heads_split

EXPLICIT = (
    "it computes its attention by itself (explicit softmax, talking heads, a linear form or a kernel of its own) and "
    "calls neither F.scaled_dot_product_attention nor transformers' attention interface: switch its fused attention "
    f"on, {LOAD_SDPA}, or call F.scaled_dot_product_attention in it"
)
# for a layer that the user wrote, whose remedy is one line
BY_HAND = (
    "it computes its attention by itself, as in softmax(q @ k.T) @ v: in its forward call "
    "F.scaled_dot_product_attention(q, k, v) in the place of these lines, which computes the same "
    "(docs/training_script.md shows it)"
)
LIBRARIES = ("transformers", "timm", "diffusers")
PROCESSOR = (
    "its forward hands the attention to self.{name} ({kind}), an object that is no module, and headwise does not "
    "follow what runs "
    "there, fused attention or not: call F.scaled_dot_product_attention in the layer's own forward"
)


def find(model: nn.Module) -> list[Candidate]:
    """Find every attention-like module of a model, in the order in which it lists them: reachable, or not and why."""
    found: list[Candidate] = []
    # From the narrowest to the widest: transformers' own sdpa function and torch's layer both call the function that
    # the last host looks for, and what one host took is not taken again.
    for host in (torch_mha, transformers, diffusers, sdpa):
        taken = {inner for f in found for inner in f.site.module.modules()}
        found.extend(host.find(model, taken))
    # What looks like attention and belongs to no host is listed too, so that nothing is passed over in silence.
    known = {f.site.module for f in found}
    inside = {inner for module in known for inner in module.modules()}
    around = {m for m in model.modules() if any(inner in known for inner in m.modules())}
    for name, module in model.named_modules():
        if looks_like_attention(module) and module not in inside | around and not _wraps(module):
            reason = over_channels(module) or without_softmax(module) or _by_processor(module) or _explicit(module)
            found.append(Candidate(Site(name, module, is_cross=is_cross(name, module)), None, reason))
    order = {module: i for i, module in enumerate(model.modules())}
    found.sort(key=lambda f: order[f.site.module])
    number([f.site for f in found])
    for f in found:
        f.site.model = model
        if f.adapter is not None and (reason := heads_split(f.site.module, model)):
            f.adapter, f.reason = None, reason
    return found


def sites(model: nn.Module) -> list[Site]:
    """Return the reachable attention sites of a model, regularized or not; an empty list where none can be reached,
    and `regularize` then says why.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> headwise.sites(model)
        [Site(layers.0.self_attn, self, depth 0, 2 heads of 8), Site(layers.1.self_attn, self, depth 1, 2 heads of 8)]
    """
    return [f.site for f in find(model) if f.adapter is not None]


def _explicit(module: nn.Module) -> str:
    library = type(module).__module__.partition(".")[0]
    return EXPLICIT if library in LIBRARIES else BY_HAND


def _wraps(module: nn.Module) -> bool:
    # Of nested attention-like modules the innermost is the one to name.
    return any(looks_like_attention(inner) for inner in module.modules() if inner is not module)


def _by_processor(module: nn.Module) -> str:
    """Say that a layer has its attention computed by an object of its own, as diffusers' layers have; empty where it
    has none."""
    named = names_used(forward_of(module))
    for name, part in vars(module).items():
        called = getattr(type(part), "__call__", None)  # noqa: B004  # its code is read, not whether there is one
        if name in named and inspect.isfunction(called) and _attends(type(part), called):
            return PROCESSOR.format(name=name, kind=type(part).__name__)
    return ""


def _attends(cls: type, called: Any) -> bool:
    return bool(LIKE.search(cls.__name__)) or sdpa.NAME in names_used(called)
