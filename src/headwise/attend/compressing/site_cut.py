"""The cut of a site's products, and the layers that replace its projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.attend.projections import Block, Projections


class NarrowRows(nn.Module):
    """A linear layer (..., in) to (..., out): `inner` computes the outputs listed in `rows`, the others are 0."""

    rows: Tensor

    def __init__(self, in_features: int, out_features: int, kept: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.inner = nn.Linear(in_features, kept, bias=bias)
        self.register_buffer("rows", torch.arange(kept))

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = self.inner(x)
        return outputs.new_zeros(*outputs.shape[:-1], self.out_features).index_copy(-1, self.rows, outputs)

    def extra_repr(self) -> str:
        """Return the outer sizes of the layer for its repr."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.rows)}"


class NarrowColumns(nn.Module):
    """A linear layer (..., in) to (..., out) that reads only the inputs listed in `columns`."""

    columns: Tensor

    def __init__(self, in_features: int, out_features: int, kept: int, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.inner = nn.Linear(kept, out_features, bias=bias)
        self.register_buffer("columns", torch.arange(kept))

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs."""
        return self.inner(x.index_select(-1, self.columns))

    def extra_repr(self) -> str:
        """Return the outer sizes of the layer for its repr."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kept={len(self.columns)}"


Narrow = NarrowRows | NarrowColumns


def narrow_like(kind: type[NarrowRows] | type[NarrowColumns], plain: nn.Module, kept: int) -> Narrow:
    """Return a narrow layer with uninitialized weights to replace a plain Linear or transformers' Conv1D."""
    weight = plain.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = weight.shape if isinstance(plain, nn.Linear) else weight.shape[::-1]
    # On the meta device, because initial weights would be drawn from torch's generator and shift later random draws.
    with torch.device("meta"):
        layer = kind(inputs, outputs, kept, bias=getattr(plain, "bias", None) is not None)
    layer.to_empty(device=weight.device)
    layer.inner.to(dtype=weight.dtype).requires_grad_(weight.requires_grad)
    return layer.train(plain.training)


# tolerance for singular values that are above 0 only by the rounding of weights in single precision
ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Cut:
    """The factors of one group after the cut: AᵀB ≈ ownᵀ · shared for each head of the group.

    Attributes:
        own: (heads of the group, rank, C).
        shared: (rank, C'), of the keys or values that the heads share.
    """

    own: Tensor
    shared: Tensor

    @property
    def rank(self) -> int:
        """Return the number of rows kept of each factor."""
        return self.shared.shape[0]


def cut(own: Tensor, shared: Tensor, energy: float | None) -> list[Cut]:
    """Return the products own_hᵀ · shared_g cut to their pseudo-rank, as balanced factors, a group of heads at a time.

    Eckart and Young 1936, doi 10.1007/BF02288367: no other factors of that rank are closer to the product. The
    pseudo-rank is that of Kobayashi et al. 2024, arXiv 2410.23819: singular values are summed, not squared.

    Args:
        own: (H, d, C), the factor that each head has for itself: queries or output.
        shared: (G, d, C'), keys or values; G divides H.
        energy: the share of the singular values' sum to keep; None keeps all of them, also those that are 0.
    """
    groups = own.double().unflatten(0, (len(shared), -1))
    return [_cut(heads, keys, energy) for heads, keys in zip(groups, shared.double(), strict=True)]


def _cut(own: Tensor, shared: Tensor, energy: float | None) -> Cut:
    heads, _, channels = own.shape
    # (heads · C, d): all products of the group, stacked
    left, left_root = torch.linalg.qr(own.transpose(1, 2).flatten(0, 1))
    right, right_root = torch.linalg.qr(shared.mT)
    u, values, vt = torch.linalg.svd(left_root @ right_root.mT, full_matrices=False)
    rank = len(values) if energy is None else pseudo_rank(values, energy)
    root = values[:rank].sqrt()
    balanced = (left @ u[:, :rank] * root).view(heads, channels, rank)
    return Cut(balanced.transpose(1, 2), (right @ vt.mT[:, :rank] * root).mT)


def pseudo_rank(values: Tensor, energy: float) -> int:
    """Return the least number of singular values, largest first, that hold the share `energy` of the sum; 1 or more."""
    reached = values.cumsum(0)
    return min(int((reached < energy * reached[-1] * (1 - ROUNDING)).sum()) + 1, len(values))


# the blocks of each product: first the factor of each head, then the one that a group shares
FACTORS = {"qk": ("q", "k"), "vo": ("o", "v")}


@dataclass(frozen=True, eq=False)
class SiteCut:
    """The cut of one site.

    Attributes:
        layers: qualified name of each replaced projection to its replacement.
        ranks: for "qk" and "vo", the rank of each head, or of each group of heads that share keys and values.
        size: for "qk" and "vo", the head size.
    """

    layers: dict[str, Narrow]
    ranks: dict[str, tuple[int, ...]]
    size: dict[str, int]


def cut_site(layout: Projections, parts: tuple[str, ...], energy: float | None, idle: tuple[int, ...] = ()) -> SiteCut:
    """Return the cut of a site's products; one of full rank keeps its weights, unless `energy` is None.

    The products of the heads `idle` count as zero; they keep no rows of queries and output.
    """
    products = {part: _cut_product(layout, part, energy, idle) for part in parts}
    size = {part: _blocks(layout, part)[0].head_dim for part in parts}
    ranks = {part: tuple(group.rank for group in cuts) for part, cuts in products.items()}
    factors: dict[str, list[Tensor]] = {}
    for part, cuts in products.items():
        if energy is None or idle or min(ranks[part]) < size[part]:
            own, shared = FACTORS[part]
            heads = [head for group in cuts for head in group.own]
            # The factor of an idle head's own is zero, whatever the rank of the keys or values that it shares. A layer
            # keeps one row in any case.
            none = 0 if len(idle) < len(heads) else 1
            factors[own] = [head[:none] if index in idle else head for index, head in enumerate(heads)]
            factors[shared] = [group.shared for group in cuts]
    layers: dict[str, Narrow] = {}
    if layout.o is not None and "o" in factors:
        layers[layout.o.maker] = _output(layout.o, factors["o"])
    for maker in {block.maker: block.module for block in layout.blocks if block.kind in factors and block.kind != "o"}:
        blocks = [block for block in layout.blocks if block.maker == maker and block.kind != "o"]
        layers[maker] = _input([(block, factors[block.kind]) for block in blocks if block.kind in factors])
    return SiteCut(layers, ranks, size)


def _blocks(layout: Projections, part: str) -> tuple[Block, Block]:
    own, shared = (getattr(layout, kind) for kind in FACTORS[part])
    return own, shared


def _cut_product(layout: Projections, part: str, energy: float | None, idle: tuple[int, ...]) -> list[Cut]:
    own, shared = (_with_bias(block) for block in _blocks(layout, part))
    if idle:
        own = own.index_fill(0, torch.tensor(idle), 0.0)
    return cut(own, shared, energy)


def _with_bias(block: Block) -> Tensor:
    """Return the weights as (heads, head_dim, C); for q, k and v the bias is an additional last column."""
    # on the CPU, because not every device has double precision
    weight, bias = block.by_head(None).detach().cpu().double(), block.bias()
    if block.kind == "o" or bias is None:
        return weight
    return torch.cat([weight, bias.detach().cpu().double().view(*weight.shape[:2], 1)], dim=2)


def _places(block: Block) -> Tensor:
    """Return the indices of each head's rows (for o: columns) in the parameter: (heads, head_dim)."""
    rows = block.rows
    flat = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.cpu()
    return flat.view(block.heads, block.head_dim)


def _input(changes: list[tuple[Block, list[Tensor]]]) -> NarrowRows:
    """Return the replacement of a layer that makes q, k, v or several of them; rows of other use do not change."""
    block = changes[0][0]
    weight = block.by_rows(_parameter(block.module, "weight"))
    bias = _parameter(block.module, "bias") if block.bias_module is not None else None
    kept = torch.ones(len(weight), dtype=torch.bool)
    for block, heads in changes:
        for places, rows in zip(_places(block), heads, strict=True):
            first, rest = places[: len(rows)], places[len(rows) :]
            weight[first] = rows[:, : weight.shape[1]].to(weight)
            if bias is not None:
                bias[first] = rows[:, -1].to(bias)
            kept[rest] = False
    layer = narrow_like(NarrowRows, block.module, int(kept.sum()))
    assert isinstance(layer, NarrowRows)
    _fill(layer.inner, layer.rows, kept, weight[kept], None if bias is None else bias[kept])
    return layer


def _output(block: Block, heads: list[Tensor]) -> NarrowColumns:
    columns = block.by_rows(_parameter(block.module, "weight"))
    kept = torch.ones(len(columns), dtype=torch.bool)
    for places, rows in zip(_places(block), heads, strict=True):
        columns[places[: len(rows)]] = rows.to(columns)
        kept[places[len(rows) :]] = False
    layer = narrow_like(NarrowColumns, block.module, int(kept.sum()))
    assert isinstance(layer, NarrowColumns)
    bias = getattr(block.module, "bias", None)
    _fill(layer.inner, layer.columns, kept, columns[kept].t(), bias)
    return layer


def _parameter(module: nn.Module, name: str) -> Tensor:
    """Return a copy of a parameter on the CPU, in its own precision."""
    parameter = getattr(module, name)
    assert isinstance(parameter, Tensor)
    return parameter.detach().cpu().clone()


@torch.no_grad()
def _fill(inner: nn.Linear, places: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    inner.weight.copy_(weight)
    if bias is not None:
        inner.bias.copy_(bias)
    places.copy_(kept.nonzero()[:, 0])


def parameters_of(layers: Iterator[nn.Module]) -> int:
    """Return the number of parameters of layers, each counted once."""
    return sum(p.numel() for p in {id(p): p for layer in layers for p in layer.parameters()}.values())
