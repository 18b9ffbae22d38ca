"""The parts of the factors of multi-head latent attention, as in DeepSeek and related models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.attend.projections.adapted import base_of
from headwise.attend.projections.block import Block, as_rows
from headwise.attend.projections.named import further
from headwise.attend.projections.names import HEADS, first_number

# Names of the factors: queries down and up (or one matrix), keys and values down, with the rotary key, and up.
DOWN_Q, UP_Q, WHOLE_Q, DOWN_KV, UP_KV = "q_a_proj", "q_b_proj", "q_proj", "kv_a_proj_with_mqa", "kv_b_proj"
SIZES, ROTARY = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), "qk_rope_head_dim"
# What each part computes; the factor that keys and values share counts for both.
MAKES = {"down_q": "q", "up_q": "q", "rotary_q": "q", "down_kv": "kv", "rotary_k": "k", "up_k": "k", "up_v": "v"}


@dataclass(eq=False)
class Piece:
    """Rows of a weight, and of its bias if it has one, in groups: one for each head, or one group of all rows.

    Attributes:
        kind: the part that the rows compute.
        where: qualified name of the weight.
        weight, bias: the module and the parameter's name; the bias is None if there is none.
        axis: the dimension of the weight along which the rows are counted.
        rows, bias_rows: indices (groups, rows of one group); at first on the CPU, then on the device of the last use.
    """

    kind: str
    where: str
    weight: tuple[nn.Module, str]
    axis: int
    rows: Tensor
    bias: tuple[nn.Module, str] | None = None
    bias_rows: Tensor | None = None

    def norms(self, weight: Tensor) -> Tensor:
        """Return the Frobenius norm of each group (groups,) of the full weight."""
        rows = weight.detach().transpose(0, self.axis).flatten(1)
        # moved once, without waiting for the device
        self.rows = self.rows.to(weight.device, non_blocking=True)
        return rows[self.rows].float().flatten(1).norm(dim=1)


def piece_of(block: Block) -> Piece:
    """Return the rows of a block by head."""

    def by_head(size: int, rows: slice | Tensor | None) -> Tensor:
        indices = torch.arange(size)
        chosen = indices if rows is None else indices[rows.cpu() if isinstance(rows, Tensor) else rows]
        return chosen.view(block.heads, -1)

    axis = 1 if block.transposed else 0
    bias, bias_rows = None, None
    if block.bias_module is not None:
        bias = (block.bias_module, block.bias_name)
        bias_rows = by_head(getattr(*bias).shape[0], block.bias_rows)
    size = getattr(block.module, block.name).shape[axis]
    return Piece(block.kind, block.where, (block.module, block.name), axis, by_head(size, block.rows), bias, bias_rows)


def pieces(module: nn.Module, name: str) -> dict[str, Piece] | None:
    """Return the parts of latent attention's factors that compute logits, by kind, or None for any other attention.

    "down_q", "down_kv" and "rotary_k" have one group; "up_q", "rotary_q" and "up_k" have one for each head. There is no
    "down_q" if queries are not factored, and no "rotary_q" and "rotary_k" without rotary positions.
    """
    rows = _rows(module)
    # values compute no logits
    return (
        None if rows is None else {kind: _piece(module, name, kind, *of) for kind, of in rows.items() if kind != "up_v"}
    )


def latent_blocks(module: nn.Module, name: str) -> dict[str, Block] | None:
    """Return the same parts and "up_v", of the values, as blocks; None if the module is not latent attention."""
    rows = _rows(module)
    if rows is None:
        return None
    blocks = {}
    for kind, (factor, index) in rows.items():
        layer = getattr(module, factor)
        block = Block(kind, layer, f"{name}.{factor}.weight", "weight", as_rows(index), *index.shape)
        block.beyond = further(layer)
        if layer.bias is not None:
            block.bias_module, block.bias_name, block.bias_rows = layer, "bias", block.rows
        blocks[kind] = block
    return blocks


def _rows(module: nn.Module) -> dict[str, tuple[str, Tensor]] | None:
    """Return for each part the name of its layer and its rows there, (groups, rows of one group)."""
    sizes = [first_number(module, (size,)) for size in SIZES]
    heads = first_number(module, HEADS)
    names = (DOWN_KV, UP_KV, *((DOWN_Q, UP_Q) if getattr(module, DOWN_Q, None) is not None else (WHOLE_Q,)))
    values_by_name = {factor: getattr(module, factor, None) for factor in names}
    bases = {factor: base_of(layer) for factor, layer in values_by_name.items() if isinstance(layer, nn.Module)}
    layers = {factor: base for factor, base in bases.items() if isinstance(base, nn.Linear)}
    if heads is None or None in sizes or len(layers) < len(names):
        return None
    latent, plain, values = (size or 0 for size in sizes)
    # 0 in layers without positions (GLM-5)
    rotary = first_number(module, (ROTARY,)) or 0
    up_q = names[-1]
    queries = torch.arange(heads * (plain + rotary)).view(heads, -1)
    keys = torch.arange(heads * (plain + values)).view(heads, -1)
    down = torch.arange(latent + rotary)[None]
    rows = {
        "up_q": (up_q, queries[:, :plain]),
        "rotary_q": (up_q, queries[:, plain:]),
        "up_k": (UP_KV, keys[:, :plain]),
        "up_v": (UP_KV, keys[:, plain:]),
        "down_kv": (DOWN_KV, down[:, :latent]),
        "rotary_k": (DOWN_KV, down[:, latent:]),
    }
    if DOWN_Q in names:
        rows["down_q"] = (DOWN_Q, torch.arange(layers[DOWN_Q].weight.shape[0])[None])
    expected = {UP_KV: keys.numel(), DOWN_KV: down.numel(), up_q: queries.numel()}
    if any(layers[factor].weight.shape[0] != size for factor, size in expected.items()):
        return None
    return {kind: (of, index) for kind, (of, index) in rows.items() if index.numel()}


def _piece(module: nn.Module, name: str, kind: str, of: str, rows: Tensor) -> Piece:
    layer: nn.Module = getattr(module, of)
    bias = (layer, "bias") if layer.bias is not None else None
    return Piece(kind, f"{name}.{of}.weight", (layer, "weight"), 0, rows, bias, None if bias is None else rows)
