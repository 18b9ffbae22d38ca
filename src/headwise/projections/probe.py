"""Probe: perturb rows of a projection and see which of q, k and v, and which heads of them, move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.site import Site
from headwise.projections import capture
from headwise.projections.adapted import is_adapted
from headwise.projections.leaves import Leaf

# Of a tensor's largest entry: above what another order of sums does to entries that did not change, far below noise as
# large as the rows themselves.
MOVED = 1e-5


class Unclear(Exception):
    """Says why the layout of a site cannot be seen: the end of a sentence that begins with the site's name."""


class Probe:
    """Replays one call of an attention module, with rows of its projections or heads of its output perturbed.

    Attributes:
        base: q, k and v of the call as it is, each (B, H, T, D).
        order: the leaves that ran as modules, in the order in which they ran.
        axes: dimensions of the queries as the host lays them out: 4, or 5 with windows.
    """

    def __init__(self, site: Site, call: capture.Arguments, found: list[Leaf], head_axis: int = 1) -> None:
        self.site, self.call, self.head_axis = site, call, head_axis
        self.order: list[Leaf] = []
        self.outputs: dict[int, Tensor] = {}
        self.axes = 0
        handles = [one.module.register_forward_hook(self._note(one)) for one in found]
        try:
            self.base = self.replay()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, one: Leaf) -> Any:
        def note(_: nn.Module, __: Any, output: Tensor) -> None:
            self.order.append(one)
            self.outputs[id(one)] = output

        return note

    def replay(self, edit: Any = None) -> dict[str, Tensor]:
        """Run the call again and give what attention received."""
        with capture.seen(self.site.module, edit) as calls:
            capture.again(self.site.module, self.call)
        if not calls:
            raise Unclear(
                "computes attention itself: neither F.scaled_dot_product_attention nor transformers' interface ran"
            )
        if len(calls) > 1:
            raise Unclear(f"calls attention {len(calls)} times in one pass")
        self.axes = calls[0].q.dim()
        return {kind: self._heads_second(getattr(calls[0], kind)) for kind in "qkv"}

    def _heads_second(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return x.unsqueeze(1)
        return x.movedim(self.head_axis, 1).flatten(2, -2)

    def moved(self, one: Leaf, rows: Tensor) -> dict[str, Tensor]:
        """Perturb rows of a leaf and give for q, k and v which entries moved, bool (H, D)."""
        with self._perturbed(one, rows):
            return _difference(self.base, self.replay())

    @contextmanager
    def _perturbed(self, one: Leaf, rows: Tensor) -> Iterator[None]:
        if id(one) in self.outputs:
            with _shifted_output(one, rows, self.outputs[id(one)]):
                yield
        elif is_adapted(one.module):
            raise Unclear(f"reads {one.name}.weight past its module, so that the adapters on it do nothing")
        elif "parametrizations" in one.module._modules:
            raise Unclear(f"reads {one.name}.weight past its module, and that weight is parametrized already")
        else:
            with _shifted_rows(one, rows):
                yield

    def columns(self, one: Leaf, heads: Tensor | None, dims: Tensor | None) -> Tensor:
        """Perturb heads (or entries within heads) of attention's output and give which inputs of a leaf moved, bool
        (C,)."""
        inputs: list[Tensor] = []
        handle = one.module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach().clone()))
        try:
            self.replay()
            self.replay(lambda o, interface: _shift_heads(o, -2 if interface else self.head_axis, heads, dims))
        finally:
            handle.remove()
        plain, shifted = (_channels_last(x, one) for x in inputs)
        return _far(plain, shifted).flatten(0, -2).any(0)


def _noise(like: Tensor) -> Tensor:
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like)
    # As large as the numbers themselves, so that no precision hides it; rows that are all 0 are moved by 1.
    size = like.detach().float().std()
    return numbers * (size if size > 0 else torch.ones_like(size)).to(like)


@contextmanager
def _shifted_output(one: Leaf, rows: Tensor, output: Tensor) -> Iterator[None]:
    """Add noise to the outputs that the rows make: the same as other numbers in the rows, and no weight is touched."""
    convolution = isinstance(one.module, nn.modules.conv._ConvNd)
    mask = torch.zeros(one.rows, dtype=output.dtype, device=output.device)
    mask[rows.to(output.device)] = 1
    mask = mask.view(-1, *[1] * (output.dim() - 2)) if convolution else mask
    handle = one.module.register_forward_hook(lambda _, __, out: out + _noise(out) * mask)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _shifted_rows(one: Leaf, rows: Tensor) -> Iterator[None]:
    """Add noise to the rows themselves, and put the saved bits back."""
    weight = one.weight.data
    saved = weight.clone()
    try:
        view = weight.t() if one.transposed else weight
        rows = rows.to(weight.device)
        view[rows] = view[rows] + _noise(view[rows])
        yield
    finally:
        weight.copy_(saved)


def _shift_heads(out: Tensor, axis: int, heads: Tensor | None, dims: Tensor | None) -> Tensor:
    noise = _noise(out)
    for at, chosen in ((axis, heads), (out.dim() - 1, dims)):
        if chosen is not None:
            mask = torch.zeros(out.shape[at], dtype=out.dtype, device=out.device)
            mask[chosen.to(out.device)] = 1
            noise = noise * mask.view([-1 if i == at % out.dim() else 1 for i in range(out.dim())])
    return out + noise


def _channels_last(x: Tensor, one: Leaf) -> Tensor:
    return x.movedim(1, -1) if isinstance(one.module, nn.modules.conv._ConvNd) else x


def _far(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() - b.float()).abs() > MOVED * a.float().abs().amax().clamp(min=1e-12)


def _difference(base: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, Tensor]:
    return {kind: _far(base[kind], other[kind]).any(2).any(0) for kind in base}
