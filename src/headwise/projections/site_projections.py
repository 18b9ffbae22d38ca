"""Projections: the q, k, v and o weights of one site."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from headwise.projections.block import Block, ProjectionError

REMEDY = {
    "q": "separate query weights",
    "k": "separate key weights",
    "v": "separate value weights",
    "o": "the output projection",
}


@dataclass(eq=False)
class Projections:
    """The q, k, v and o blocks of a site; a block that was not found is None and `missing` says why.

    Attributes:
        name: qualified name of the site.
        layout: in words, such as "separate", "stacked (3, H, d)" or "in_proj_weight".
        verified: whether the layout was seen to hold by perturbing rows on the site.
    """

    name: str
    layout: str
    q: Block | None = None
    k: Block | None = None
    v: Block | None = None
    o: Block | None = None
    missing: dict[str, str] = field(default_factory=dict)
    verified: bool = False

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks that were found, in the order q, k, v, o."""
        return [block for block in (self.q, self.k, self.v, self.o) if block is not None]

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.need("q", of="rows")[0].heads

    @property
    def kv_heads(self) -> int:
        """Return the number of key/value heads."""
        return self.need("k", of="rows")[0].heads

    def need(
        self, kinds: str, who: str = "this", of: Literal["tokens", "patches", "rows"] = "tokens"
    ) -> tuple[Block, ...]:
        """Return the named blocks, such as `need("qk", "QKClip", of="rows")`.

        Args:
            kinds: of "q", "k", "v" and "o".
            who: asks for them, for messages.
            of: what they must be: matrices that map single tokens; matrices (out, in·kh·kw) that map patches of tokens, as
                convolutions do; or rows that belong to heads, whatever they are multiplied with.

        Raises:
            ProjectionError: naming the site, the reason and the remedy, where one is missing, is no such matrix or cannot be read.
        """
        for kind in kinds:
            block = getattr(self, kind)
            if block is not None and ((block.grouped and of != "rows") or (block.convolved and of == "tokens")):
                raise ProjectionError(
                    f"{who} needs {REMEDY[kind]} as one matrix; {self.name} makes its {kind} by {block.maker}, {block.convolved}"
                )
            if block is None:
                raise ProjectionError(f"{who} needs {REMEDY[kind]}; {self.name} {self.missing.get(kind, 'has none')}")
            if reason := block.unreadable():
                raise ProjectionError(f"{who} needs {REMEDY[kind]}; {block.where} {reason}")
        return tuple(getattr(self, kind) for kind in kinds)

    def parameters(self) -> list[tuple[nn.Module, str]]:
        """Return each parameter that holds a block once, as (module, name)."""
        seen: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        for block in self.blocks:
            seen.setdefault((id(block.module), block.name), (block.module, block.name))
        return list(seen.values())
