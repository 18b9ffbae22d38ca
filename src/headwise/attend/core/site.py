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
        module: the attention module.
        depth: index among the sites of the same stack and kind, 0 for the first.
        stack: qualified name of the stack the layer belongs to, such as `encoder.layers`.
        is_cross: whether queries and keys come from different sequences.
        heads: number of query heads; None until known from the host or an example.
        kv_heads: number of key/value heads (fewer under grouped queries).
        head_dim: size of one head's queries and keys.
        value_dim: size of one head's values and output, which latent attention has apart; None if it is not known, and
            then taken for `head_dim`.
        hidden: size of the layer's input tokens.
        layers: number of sites in the same stack and kind.
        causal: whether the host declares the layer causal; None if it does not declare it.
        host: "transformers", "torch", "diffusers" or "fused".
        windowed: whether a call attends within windows of the sample instead of the whole sample.
        shifted: whether the windows are shifted, so that an additive mask of -100 separates regions.
        row_order: the order of a call's rows if a sample has several, once it has been observed ("sample-major",
            "window-major", ...); otherwise empty.
        pooled: whether queries or keys are pooled, so that they are not the same tokens.
        qk_norm: whether the host normalises queries and keys itself.
        joint: whether image and text tokens enter separately and attend to each other as one sequence.
        rope: whether rotary position embeddings are applied between the projections and the scores.
        kernel: name of the host's own kernel (flash, flex, one that a user registered), if the layer has one.
        own_attention: whether headwise computes the attention instead of that kernel, as requested by
            `regularize(..., attention="headwise")`.
        index: index among all sites of the model.
        model: the model the layer belongs to.
        example: an example batch for the model while methods are being fitted, None afterwards.

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
    value_dim: int | None = None
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
        """Return the depth as a fraction of the stack, 0 at the first layer and 1 at the last."""
        return self.depth / (self.layers - 1) if self.layers > 1 else 0.0

    def __repr__(self) -> str:
        kind = "cross" if self.is_cross else "self"
        return f"Site({self.name}, {kind}, depth {self.depth}, {self.heads or '?'} heads of {self.head_dim or '?'})"


def stack_of(name: str) -> str:
    """Return the part of a qualified name before its first layer index: `encoder.layers` for `encoder.layers.3.attn`.

    A name without an index belongs to the stack of its parent module.
    """
    index = re.search(r"(?:^|\.)\d+(?=\.|$)", name)
    return name[: index.start()] if index else name.rpartition(".")[0]


def number(sites: list[Site]) -> None:
    """Number the sites of each stack in the order of the model's modules.

    Self and cross attention are counted separately: depth 3 is the fourth layer of its kind.
    """
    groups: dict[tuple[str, bool], list[Site]] = {}
    for index, site in enumerate(sites):
        site.index, site.stack = index, stack_of(site.name)
        groups.setdefault((site.stack, site.is_cross), []).append(site)
    for group in groups.values():
        for depth, site in enumerate(group):
            site.depth, site.layers = depth, len(group)
