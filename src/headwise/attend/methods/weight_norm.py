"""WeightNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from headwise.attend.core import Method, MethodState, Site
from headwise.attend.methods.reparametrization import LAYERS, chains, put_on, refusal, take_off
from headwise.attend.projections import together
from headwise.attend.projections.block import Block, along, multiply_, whole
from headwise.attend.projections.together import WeightsOfForward, begin, is_plain, taken
from headwise.attend.projections.weight_rows import RowGroup, computed_together
from headwise.borders import in_transform
from headwise.numerics.operators import without_autocast
from headwise.numerics.precision import at_least_fp32


class WeightNorm(Method):
    """Replaces each output row v of the q, k, v and o weights by gain·v / ‖v‖ with a learned gain per row.

    Salimans and Kingma 2016, arXiv 1602.07868; a baseline of Zhai et al. 2023, arXiv 2303.06296.

    In training and evaluation. `init="current"` starts at gain = ‖v‖, so that nothing changes at first; `init="one"`
    starts with rows of norm 1. `layers="all"` also reparametrizes every other linear layer and convolution of the
    model, where a row is all weights of one output channel. Folds into plain weights, bit for bit. The gains get no
    weight decay and are in fp32 or wider.
    """

    init: str = "current"
    layers: str = "attention"

    neutral = {"init": "current"}
    strong = {"init": "one"}
    acts = "both"
    learns = True
    shapes = ()

    def check(self) -> None:
        self.choose("init", "current", "one")
        self.choose("layers", *LAYERS)

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "WeightNorm")

    def build(self, site: Site, state: MethodState) -> None:
        put_on(site, state, "WeightNorm", self.layers, lambda weight, blocks: Normed(weight, blocks, self.init))

    def unbuild(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=False)

    def fold(self, site: Site, state: MethodState) -> None:
        take_off(state, folded=True)

    def forward_begins(self, fits: Sequence[tuple[Site, MethodState]]) -> Callable[[], None]:
        found = chains(state for _, state in fits)
        pairs = [(chain[0], chain) for chain in found if isinstance(chain[0], Normed)]
        return begin(WeightsOfForward([member for member, _ in pairs], partial(computed_together, pairs)))


class Normed(nn.Module):
    """A parametrization that computes gain·v / ‖v‖ for each output row v of a weight.

    Raises:
        ValueError: if a row is all zero.
    """

    def __init__(self, weight: Tensor, blocks: list[Block], init: str) -> None:
        super().__init__()
        self.axis = 1 if blocks[0].transposed else 0
        norms = self._norms(whole(weight.detach()))
        if not norms.all():
            raise ValueError(
                f"{blocks[0].where} has a row of zeros, which has no direction: initialise it with other numbers "
                "first, or leave the layer out with where="
            )
        self.gain = nn.Parameter(norms.flatten() if init == "current" else torch.ones_like(norms.flatten()))

    def _norms(self, weight: Tensor) -> Tensor:
        """Return the norm of each row, in fp32 or wider, with the dimensions of the weight."""
        others = [i for i in range(weight.dim()) if i != self.axis]
        return torch.linalg.vector_norm(at_least_fp32(weight), dim=others, keepdim=True)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the reparametrized weight, in the shape and dtype of the plain one.

        On CUDA the first layer of a forward of the whole model computes the weights of all.
        """
        stackable = weight.device.type in together.TOGETHER_ON and not (self.axis and weight.dim() > 2)
        if torch.compiler.is_compiling() or not stackable or not is_plain(weight) or in_transform():
            return self.traced(weight, self.gain)
        computed = taken(self, weight)
        return RowGroup([self], self.axis).compute([weight])[0] if computed is None else computed

    def traced(self, weight: Tensor, gain: Tensor) -> Tensor:
        """Compute `forward` by operators that compilers, transforms and second derivatives follow."""
        # In the weight's own dtype, like a plain parameter; autocast rounds it later, in the layer.
        with without_autocast(weight.device):
            norms = self._norms(weight)
            return (at_least_fp32(weight) * (gain.to(norms.dtype).view(norms.shape) / norms)).to(weight.dtype)

    @torch.no_grad()
    def rescale_(self, weight: Tensor, factors: Tensor, axis: int) -> None:
        """Multiply the computed weight by factors along an axis: outputs through the gains, inputs through both."""
        if axis == self.axis:
            multiply_(self.gain, factors.to(self.gain.dtype))
            return
        before = self._norms(whole(weight.detach()))
        multiply_(weight, along(factors, axis, weight))
        multiply_(self.gain, (self._norms(whole(weight.detach())) / before).flatten().to(self.gain.dtype))
