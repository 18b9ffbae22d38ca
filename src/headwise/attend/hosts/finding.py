"""Find every attention-like module of a model by trying each host in turn."""

from __future__ import annotations

import inspect

from torch import nn

from headwise.attend.core import Site
from headwise.attend.core.site import number
from headwise.attend.hosts import diffusers, torch_mha
from headwise.attend.hosts.layers.declared import (
    LIKE,
    Candidate,
    forward_of,
    is_cross,
    looks_like_attention,
    names_used,
    over_channels,
    without_softmax,
)
from headwise.attend.hosts.sdpa import adapter as sdpa
from headwise.attend.hosts.transformers import adapter as transformers
from headwise.attend.projections.sharded import heads_split
from headwise.files.arguments import is_a
from headwise.files.errors import LOAD_SDPA

EXPLICIT = (
    "it computes its own attention (explicit softmax, talking heads, a linear form or a custom kernel) and "
    "calls neither F.scaled_dot_product_attention nor transformers' attention interface: switch its fused attention "
    f"on, {LOAD_SDPA}, or call F.scaled_dot_product_attention in it"
)
# for layers that the user wrote, where the remedy is one line
BY_HAND = (
    "it computes its own attention, as in softmax(q @ k.T) @ v: in its forward call "
    "F.scaled_dot_product_attention(q, k, v) in place of these lines, which computes the same "
    "(docs/training_script.md shows it)"
)
LIBRARIES = ("transformers", "timm", "diffusers")
PROCESSOR = (
    "its forward hands the attention to self.{name} ({kind}), an object that is not a module, and headwise does not "
    "follow its code, fused attention or not: call F.scaled_dot_product_attention in the layer's own forward"
)


def find(model: nn.Module) -> list[Candidate]:
    """Return every attention-like module of a model, in the order of `model.modules()`.

    A module that cannot be reached has no adapter, and its `reason` says why.
    """
    candidates: list[Candidate] = []
    # From the most specific host to the most general one: transformers' own sdpa function and torch's layer both call
    # the function that the last host looks for. A module belongs to the first host that takes it.
    for host in (torch_mha, transformers, diffusers, sdpa):
        taken = {inner for candidate in candidates for inner in candidate.site.module.modules()}
        candidates.extend(host.find(model, taken))
    # Modules that look like attention and belong to no host are listed too, so that none is skipped silently.
    known = {candidate.site.module for candidate in candidates}
    inside = {inner for module in known for inner in module.modules()}
    around = {m for m in model.modules() if any(inner in known for inner in m.modules())}
    for name, module in model.named_modules():
        if looks_like_attention(module) and module not in inside | around and not _contains_attention(module):
            reason = over_channels(module) or without_softmax(module) or _by_processor(module) or _explicit(module)
            candidates.append(Candidate(Site(name, module, is_cross=is_cross(name, module)), None, reason))
    order = {module: i for i, module in enumerate(model.modules())}
    candidates.sort(key=lambda candidate: order[candidate.site.module])
    number([candidate.site for candidate in candidates])
    for candidate in candidates:
        candidate.site.model = model
        if candidate.adapter is not None and (reason := heads_split(candidate.site.module, model)):
            candidate.adapter, candidate.reason = None, reason
    return candidates


def sites(model: nn.Module) -> list[Site]:
    """Return the reachable attention sites of a model, regularized or not.

    The list is empty if no site can be reached; `regularize` then raises an error that says why.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> headwise.sites(model)
        [Site(layers.0.self_attn, self, depth 0, 2 heads of 8), Site(layers.1.self_attn, self, depth 1, 2 heads of 8)]
    """
    is_a("model", model, nn.Module, "a torch module")
    return [candidate.site for candidate in find(model) if candidate.adapter is not None]


def _explicit(module: nn.Module) -> str:
    library = type(module).__module__.partition(".")[0]
    return EXPLICIT if library in LIBRARIES else BY_HAND


def _contains_attention(module: nn.Module) -> bool:
    # Of nested attention-like modules only the innermost is listed.
    return any(looks_like_attention(inner) for inner in module.modules() if inner is not module)


def _by_processor(module: nn.Module) -> str:
    """Return the reason if a separate object computes the layer's attention, as in diffusers; else an empty string."""
    names = names_used(forward_of(module))
    for name, value in vars(module).items():
        call = getattr(type(value), "__call__", None)  # noqa: B004  # its code is read below
        if (
            name in names
            and inspect.isfunction(call)
            and (LIKE.search(type(value).__name__) or sdpa.NAME in names_used(call))
        ):
            return PROCESSOR.format(name=name, kind=type(value).__name__)
    return ""
