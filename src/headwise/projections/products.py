"""Products: the factors of W_Q W_K^T and W_O W_V, head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.projections.projections import ProjectionError, Projections

if TYPE_CHECKING:
    from headwise.core.site import Site


def factors(found: Projections, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Give the factors (A, B) of the products A^T B of each query head: keys and queries, output and values.

    Each (H, d, C): grouped keys and values are repeated, so that gradients of a shared one sum over its group.
    A site without an output projection has the first product only.
    """
    q, k = (block.by_head(dtype) for block in found.need("qk"))
    made = [(_repeated(k, len(q)), q)]
    if found.o is not None and found.v is not None:
        o, v = found.o.by_head(dtype), found.v.by_head(dtype)
        made.append((o, _repeated(v, len(o))))
    return made


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if len(x) == heads else x.repeat_interleave(heads // len(x), dim=0)


def refusal(site: Site, who: str) -> str | None:
    """Say why a method on the products has no meaning on a site, or None where it has."""
    try:
        site.projections().need("qkvo", who)
    except ProjectionError as error:
        return str(error)
    return None
