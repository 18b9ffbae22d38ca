"""Products: the factors of W_Q W_K^T and W_O W_V, head by head."""

from __future__ import annotations

from torch import Tensor

from headwise.core.precision import at_least_fp32
from headwise.core.site import Site
from headwise.projections.block import Block, ProjectionError
from headwise.projections.finding import of
from headwise.projections.site_projections import Projections


def factors(found: Projections) -> list[tuple[Tensor, Tensor]]:
    """Return the factors (A, B) of the products A^T B of each query head, in fp32 or wider: keys and queries, output and values.

    Each (H, d, C): grouped keys and values are repeated, so that gradients of a shared one sum over its group.
    A site without an output projection has the first product only.
    """
    q, k = (at_least_fp32(block.by_head(None)) for block in found.need("qk", of="patches"))
    made = [(_repeated(k, len(q)), q)]
    if found.o is not None and found.v is not None:
        o, v = (at_least_fp32(block.by_head(None)) for block in output_and_values(found))
        made.append((o, _repeated(v, len(o))))
    return made


def output_and_values(found: Projections, who: str = "this") -> tuple[Block, Block]:
    """Return the blocks of W_O W_V. Values may be made of patches; an output over several positions has no one product."""
    return found.need("o", who)[0], found.need("v", who, of="patches")[0]


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if len(x) == heads else x.repeat_interleave(heads // len(x), dim=0)


def refusal(site: Site, who: str) -> str | None:
    """Say why a method on the products has no meaning on a site, or None where it has."""
    try:
        found = of(site)
        blocks = (*found.need("qk", who, of="patches"), *output_and_values(found, who))
    except ProjectionError as error:
        return str(error)
    if not any(block.trains() for block in blocks):
        return f"{who} would change nothing: all weights of {site.name} are frozen (requires_grad=False)"
    return None
