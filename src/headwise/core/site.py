"""Site: one attention layer of a host model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(eq=False)
class Site:
    """One attention layer of a host model, as methods, `where` and reports see it.

    Attributes:
        name: qualified name of the attention module in the model, such as `blocks.3.attn`.
        module: the attention module itself.
        depth: index among the sites of the same stack and kind, 0 for the first.
        stack: qualified name of the stack the layer belongs to, such as `encoder.layers`.
        is_cross: whether queries and keys come from different sequences.
        heads: query heads; None until the host or an example told.
        kv_heads: key/value heads (fewer under grouped queries).
        head_dim: size of one head's query and key.
        hidden: size of the tokens that enter the layer.
        layers: number of sites in the same stack and kind.
        causal: whether the host declares the layer causal; None where it does not say.
        host: "transformers", "torch", "diffusers" or "fused".
        windowed: whether a call sees windows of the sample instead of the whole of it.
        shifted: whether its windows are shifted, so that an additive mask of -100 keeps regions apart.
        row_order: how the rows of a call belong to samples where they are not one to one, as far as it was seen
            ("sample-major", "window-major", ...); empty where it was not.
        pooled: whether queries or keys are pooled, so that they are not the same tokens.
        qk_norm: whether the host normalises queries and keys itself.
        joint: whether tokens of an image and of a text enter apart and attend to each other as one sequence.
        rope: whether rotary positions stand between the projections and the scores.
        kernel: the name of the host's own kernel (flash, flex, one that a user registered), where the layer has one.
        own_attention: whether headwise computes the attention in its place, as `regularize(..., attention="headwise")`
            asks.
        model: the model the layer belongs to.
        example: a batch for it while methods are being fitted, None afterwards.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> first = headwise.sites(model)[0]
        >>> first.name, first.depth, first.heads
        ('layers.0.self_attn', 0, 2)
        >>> upper = headwise.regularize(model, headwise.DropHead(p=0.2), where=lambda site: site.depth > 0)
        >>> upper
        Regularized(DropHead(p=0.2), 1 sites)
    """

    name: str
    module: nn.Module
    depth: int = 0
    stack: str = ""
    is_cross: bool = False
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    layers: int = 1
    causal: bool | None = None
    host: str = ""
    windowed: bool = False
    shifted: bool = False
    row_order: str = ""
    pooled: bool = False
    qk_norm: bool = False
    rope: bool = False
    joint: bool = False
    kernel: str = ""
    own_attention: bool = False
    index: int = 0
    model: nn.Module | None = field(default=None, repr=False)
    example: Any = field(default=None, repr=False)

    @property
    def relative_depth(self) -> float:
        """Return the depth as a share of the stack, 0 at the first layer and 1 at the last."""
        return self.depth / (self.layers - 1) if self.layers > 1 else 0.0

    def __repr__(self) -> str:
        kind = "cross" if self.is_cross else "self"
        return f"Site({self.name}, {kind}, depth {self.depth}, {self.heads or '?'} heads of {self.head_dim or '?'})"


def stack_of(name: str) -> str:
    """Return the part of a qualified name before its last layer index: `encoder.layers.3.attn` lies in
    `encoder.layers`."""
    match = re.match(r"(.*?)\.?(?:^|(?<=\.))\d+(?:\..*)?$", name)
    found = [m.start() for m in re.finditer(r"(?:^|\.)\d+(?=\.|$)", name)]
    if not match or not found:
        return name.rpartition(".")[0]
    return name[: found[0]]


def number(sites: list[Site]) -> None:
    """Number the sites of each stack, self and cross attention apart, in the order in which the model lists them."""
    # A decoder's cross attentions are layers of their own count: depth 3 is the fourth of its kind.
    groups: dict[tuple[str, bool], list[Site]] = {}
    for index, site in enumerate(sites):
        site.index, site.stack = index, stack_of(site.name)
        groups.setdefault((site.stack, site.is_cross), []).append(site)
    for group in groups.values():
        for depth, site in enumerate(group):
            site.depth, site.layers = depth, len(group)
