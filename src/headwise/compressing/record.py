"""Record: what compressing did to a model, layer by layer, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerCut:
    """One product of one layer: what is left of each head, or of each group of heads that share keys and values.

    Attributes:
        site: qualified name of the attention layer.
        part: "qk" or "vo".
        ranks: rows left, head by head.
        size: the head size.
    """

    site: str
    part: str
    ranks: tuple[int, ...]
    size: int

    @property
    def kept(self) -> float:
        """Give the share of the rows that is left."""
        return sum(self.ranks) / (self.size * len(self.ranks))


@dataclass(frozen=True)
class Pair:
    """One figure before and after."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Give after over before; not a number where there was nothing before."""
        return self.after / self.before if self.before else float("nan")


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """What compressing did to a model; printing it gives a table.

    Attributes:
        energy: share of the singular values' sum that was kept.
        layers: every product that was looked at and can be cut.
        refused: "<site> qk" or "<site> vo" to the reason why that product stays as it was.
        parameters: of the whole model, before and after.
        attention: parameters of the projections, before and after.
        seconds: of one forward of the example, without gradient; None without an example.
        loss: what the given function says of the model; None without one.
    """

    energy: float
    layers: tuple[LayerCut, ...]
    refused: dict[str, str] = field(default_factory=dict)
    parameters: Pair
    attention: Pair
    seconds: Pair | None = None
    loss: Pair | None = None

    def __str__(self) -> str:
        table = [("layer", "product", "kept", "ranks")]
        table += [
            (one.site or "(the model)", one.part, f"{one.kept:.0%}", f"{_ranks(one.ranks)} of {one.size}")
            for one in self.layers
        ]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        rows = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in table]
        return "\n".join(
            [*rows, *self._costs(), *(f"left as it was: {what}: {why}" for what, why in self.refused.items())]
        )

    def _costs(self) -> list[str]:
        lines = [
            f"parameters: {pair.before:,.0f} -> {pair.after:,.0f} ({pair.ratio:.1%}){what}"
            for pair, what in ((self.parameters, ""), (self.attention, " of the projections"))
        ]
        if self.seconds is not None:
            lines.append(
                f"time of a forward: {1000 * self.seconds.before:.2f} -> {1000 * self.seconds.after:.2f} ms ({self.seconds.ratio:.1%})"
            )
        if self.loss is not None:
            lines.append(f"loss: {self.loss.before:.5g} -> {self.loss.after:.5g}")
        return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)}"
