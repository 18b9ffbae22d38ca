"""The sizes of an attention layer's heads, from what its module declares and from the shapes of its weights."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from headwise.attend.projections.leaves import Leaf, still
from headwise.attend.projections.names import HEAD_DIM, KV_HEADS, PROJECTIONS, VALUE_DIM, first_number


class Sizes(NamedTuple):
    """The sizes of a layer's heads; None for one that neither a declaration nor a weight tells."""

    head_dim: int | None
    kv_heads: int | None
    value_dim: int | None


def sizes(module: nn.Module, heads: int | None, head_dim: int | None = None) -> Sizes:
    """Return the sizes of a module with this many query heads, without running it.

    Declared sizes come first. Separate projections tell the others by their numbers of outputs, and one matrix for
    queries, keys and values, or for keys and values, tells how many heads share keys.
    """
    with still(module):
        return _sizes(module, heads, head_dim)


def _sizes(module: nn.Module, heads: int | None, head_dim: int | None) -> Sizes:
    direct = [leaf for leaf in Leaf.below(module, "") if leaf.weight.dim() == 2]
    named = {kind: [leaf for leaf in direct if leaf.name.lower() in names] for kind, names in PROJECTIONS.items()}
    q, k, v = (named[kind][0] if len(named[kind]) == 1 else None for kind in "qkv")
    head_dim = head_dim or first_number(module, HEAD_DIM) or (_whole(q.rows, heads) if q is not None else None)
    kv_heads, value_dim = first_number(module, KV_HEADS), first_number(module, VALUE_DIM)
    if kv_heads is None and heads is not None:
        if k is not None:
            kv_heads = _whole(k.rows, head_dim)
        else:
            rest = [leaf for leaf in direct if leaf.name.lower() not in PROJECTIONS["o"] and leaf is not q]
            kv_heads = _of_fused(rest[0], heads, head_dim, q is not None) if len(rest) == 1 else None
        # Grouped queries divide evenly: other numbers come from a matrix that makes more than these.
        kv_heads = None if kv_heads is None or heads % kv_heads else kv_heads
    if value_dim is None and v is not None:
        value_dim = _whole(v.rows, kv_heads)
    return Sizes(head_dim, kv_heads, value_dim)


def _of_fused(fused: Leaf, heads: int, head_dim: int | None, apart: bool) -> int | None:
    """Return the heads of keys in one matrix for keys and values, or for queries too if these are not made `apart`."""
    size = head_dim or _whole(fused.columns, heads)
    units = _whole(fused.rows, size)
    return None if units is None else _whole(units - (0 if apart else heads), 2)


def _whole(number: int, by: int | None) -> int | None:
    """Return number / by if it is a positive whole number, else None."""
    return number // by if by and number > 0 and number % by == 0 else None
