"""The factors of the products W_Q W_K^T and W_O W_V, head by head.

The tokens of a factor are the vectors that its weight is multiplied with. In latent attention these are the latents
after their norms and, for the rotary key, the layer's input: q = [W_UQ; W_QR]·c_Q and k = [W_UK·c_KV; W_KR·x], so that
the keys have one matrix for (c_KV, x). In joint attention they are pairs of an image and a text token with separate
weights, which are concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headwise.attend.core import MethodState, Site
from headwise.attend.projections.block import Block, ProjectionError, by_heads
from headwise.attend.projections.finding import of
from headwise.attend.projections.gram_penalty import Weighted
from headwise.attend.projections.site_projections import Projections


def factors(projections: Projections) -> list[tuple[Tensor, Tensor]]:
    """Return the factors (A, B) of the products A^T B of each query head: (keys, queries) and (output, values).

    Each is (H, d, C) in fp32 or wider. Grouped keys and values are repeated, so that gradients of a shared head sum
    over its group. A site without an output projection has only the first product.
    """
    kinds: list[Literal["qk", "vo"]] = ["qk"]
    if projections.o is not None and (projections.v is not None or projections.latent):
        kinds.append("vo")
    chosen = [[_parts(stream, kind, "this") for stream in projections.streams()] for kind in kinds]
    read = by_heads(block for streams in chosen for parts in streams for block in parts.values())
    products = [_joined(projections.streams(), kind, parts, read) for kind, parts in zip(kinds, chosen, strict=True)]
    q, k = products[0]
    # the output leads its product, as the keys do theirs
    return [(_repeated(k, len(q)), q), *((o, _repeated(v, len(o))) for o, v in products[1:])]


def weighted_products(fits: Sequence[tuple[Site, MethodState]]) -> list[Weighted]:
    """Return the products of the sites with the strengths of a method there."""
    return [Weighted(pair, state.value("strength")) for site, state in fits for pair in factors(of(site))]


def product_of(projections: Projections, kind: Literal["qk", "vo"], who: str = "this") -> tuple[Tensor, Tensor]:
    """Return the factor of each query head (H, d, C), queries or output, and that of each key/value head (G, d, C'),
    keys or values, in fp32 or wider.

    Raises:
        ProjectionError: naming the site, the reason and the remedy, if one is missing or is not a matrix.
    """
    streams = projections.streams()
    parts = [_parts(stream, kind, who) for stream in streams]
    return _joined(streams, kind, parts, by_heads(block for one in parts for block in one.values()))


def _joined(
    streams: Sequence[Projections], kind: str, blocks: Sequence[dict[str, Block]], read: dict[int, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the factors of a product, which the streams' factors form side by side."""
    pairs = [
        _of_stream(stream, kind, {name: read[id(block)] for name, block in parts.items()})
        for stream, parts in zip(streams, blocks, strict=True)
    ]
    # text tokens whose result is not used have no output projection: the product has only the image's
    own = [own for own, _ in pairs if own is not None]
    shared = [shared for _, shared in pairs]
    return (own[0], shared[0]) if len(shared) == 1 else (torch.cat(own, -1), torch.cat(shared, -1))


def _of_stream(projections: Projections, kind: str, parts: dict[str, Tensor]) -> tuple[Tensor | None, Tensor]:
    if not projections.latent:
        own, shared = ("q", "k") if kind == "qk" else ("o", "v")
        return parts.get(own), parts[shared]
    if kind == "vo":
        return parts["o"], parts["up_v"]
    if "rotary_k" not in parts:
        return parts["up_q"], parts["up_k"]
    plain, rotary = parts["up_k"], parts["rotary_k"].expand(len(parts["up_k"]), -1, -1)
    zeros = [plain.new_zeros(*x.shape[:2], y.shape[2]) for x, y in ((plain, rotary), (rotary, plain))]
    keys = torch.cat([torch.cat([plain, zeros[0]], -1), torch.cat([zeros[1], rotary], -1)], 1)
    return torch.cat([parts["up_q"], parts["rotary_q"]], 1), keys


def _parts(projections: Projections, kind: str, who: str) -> dict[str, Block]:
    """Return the blocks of one stream that form a product."""
    if projections.latent:
        names = ("up_q", "rotary_q", "up_k", "rotary_k") if kind == "qk" else ("up_v",)
        chosen: dict[str, Block] = {name: projections.latent[name] for name in names if name in projections.latent}
        for block in chosen.values():
            if reason := block.unreadable():
                raise ProjectionError(f"{who} needs the factors of latent attention; {block.where} {reason}")
        return chosen if kind == "qk" else {**chosen, "o": projections.need("o", who)[0]}
    if kind == "qk":
        return dict(zip("qk", projections.need("qk", who, of="patches"), strict=True))
    # Values may map patches, but an output projection over several positions has no single product.
    if projections.o is None and projections.thrown_away:
        return {"v": projections.need("v", who, of="patches")[0]}
    return {"o": projections.need("o", who)[0], "v": projections.need("v", who, of="patches")[0]}


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if len(x) == heads else x.repeat_interleave(heads // len(x), dim=0)


def refusal(site: Site, who: str) -> str | None:
    """Return why a method on the products does not apply to a site, or None if it does."""
    try:
        streams = of(site).streams()
        blocks = [b for stream in streams for kind in ("qk", "vo") for b in _parts(stream, kind, who).values()]
    except ProjectionError as error:
        return str(error)
    if not any(block.trains() for block in blocks):
        return f"{who} would change nothing: all weights of {site.name} are frozen (requires_grad=False)"
    return None
