"""The q, k, v and o weights of one site."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn

from headwise.attend.projections.block import Block, ProjectionError

REMEDY = {
    "q": "separate query weights",
    "k": "separate key weights",
    "v": "separate value weights",
    "o": "the output projection",
}


@dataclass(eq=False)
class Projections:
    """The q, k, v and o blocks of a site; for a block that was not found, which is None, `missing` says why.

    Attributes:
        name: qualified name of the site.
        layout: in words, such as "separate", "stacked (3, H, d)" or "in_proj_weight".
        verified: whether the layout is certain: confirmed by perturbing rows, or fixed by torch's definition.
        latent: the parts of the factors by kind, for latent attention (DeepSeek), which has no plain q, k and v; see
            the module `latent`.
        thrown_away: whether the attention output of these tokens is not used, so that they have no output projection.
        context: the projections of the text tokens, for joint attention (Flux, SD3); q, k, v and o are the image's.
    """

    name: str
    layout: str
    q: Block | None = None
    k: Block | None = None
    v: Block | None = None
    o: Block | None = None
    missing: dict[str, str] = field(default_factory=dict)
    verified: bool = False
    latent: dict[str, Block] = field(default_factory=dict)
    thrown_away: bool = False
    context: Projections | None = None

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks that were found: the latent parts, then q, k, v and o, then those of the text tokens."""
        own = [*self.latent.values(), *(block for block in (self.q, self.k, self.v, self.o) if block is not None)]
        return own if self.context is None else own + self.context.blocks

    def streams(self) -> tuple[Projections, ...]:
        """Return the projections of each kind of token: one, or the image's and the text's in joint attention."""
        return (self,) if self.context is None else (replace(self, context=None), self.context)

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.latent["up_q"].heads if self.latent else self.streams()[0].need("q", of="rows")[0].heads

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads."""
        return self.latent["up_k"].heads if self.latent else self.streams()[0].need("k", of="rows")[0].heads

    def need(
        self, kinds: str, who: str = "this", of: Literal["tokens", "patches", "rows"] = "tokens"
    ) -> tuple[Block, ...]:
        """Return the named blocks, such as `need("qk", "QKClip", of="rows")`.

        Args:
            of: what the blocks must be: matrices that map single tokens; matrices (out, in·kh·kw) that may also map
                patches of tokens, as convolutions do; or only rows that belong to heads.

        Raises:
            ProjectionError: naming the site, the reason and the remedy, if a block is missing, is not such a matrix or
                cannot be read.
        """
        if self.context is not None:
            raise ProjectionError(
                f"{who} supports one set of projections, and {self.name} has two: one for image tokens and one "
                "for text tokens"
            )
        for kind in kinds:
            block = getattr(self, kind)
            if block is not None and ((block.grouped and of != "rows") or (block.convolved and of == "tokens")):
                raise ProjectionError(
                    f"{who} needs {REMEDY[kind]} as one matrix; {self.name} makes its {kind} by {block.maker}, "
                    f"{block.convolved}"
                )
            if block is None:
                raise ProjectionError(f"{who} needs {REMEDY[kind]}; {self.name} {self.missing.get(kind, 'has none')}")
            if reason := block.unreadable():
                raise ProjectionError(f"{who} needs {REMEDY[kind]}; {block.where} {reason}")
        return tuple(getattr(self, kind) for kind in kinds)

    def parameters(self) -> list[tuple[nn.Module, str]]:
        """Return each parameter that contains a block, once, as (module, name)."""
        seen: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        for block in self.blocks:
            seen.setdefault((id(block.module), block.name), (block.module, block.name))
        return list(seen.values())
