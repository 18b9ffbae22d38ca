"""A test, on the running layer and before anything is cut, that other factors of the same products change nothing.

It detects everything that acts between a projection and attention, also if the host does not declare it: rotary
positions, norms, relative positions that read the queries, gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.compressing.site_cut import NarrowColumns, SiteCut, cut_site
from headwise.attend.core import Site
from headwise.attend.projections import Projections, capture
from headwise.attend.projections.capture import ways

SCORES = (
    "other factors of the same W_KᵀW_Q change its scores: something acts between the projections and the scores, "
    'such as a rotation or a norm; cut only values and output, parts="vo"'
)
OUTPUTS = (
    "other factors of the same product change its output: something other than attention reads the queries, "
    "keys or values"
)
FAILED = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class SiteRun:
    """The record of one run of a site: the scores of each call, and the outputs."""

    scores: list[Tensor]
    outputs: list[Tensor]


@contextmanager
def in_place(model: nn.Module, layers: dict[str, Any]) -> Iterator[None]:
    """Replace the layers of these names inside the context."""
    originals = {name: model.get_submodule(name) for name in layers}
    put(model, layers)
    try:
        yield
    finally:
        put(model, originals)


def put(model: nn.Module, layers: dict[str, Any]) -> None:
    """Replace the layers of these names."""
    for name, layer in layers.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, layer)


def refusal(site: Site, layout: Projections, part: str, model: nn.Module, example: Any) -> str:
    """Run the layer with all factors exchanged, and return why the product cannot be cut, or an empty string."""
    exchanged = cut_site(layout, (part,), None)
    reasons = []
    for root, run in ways(site, model, example):
        if root is site.module and any(not _inside(name, site) for name in exchanged.layers):
            # an output projection next to the layer does not run with it
            continue
        try:
            return _difference(site, exchanged, part, model, root, run)
        except FAILED as error:
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    tried = f" ({reasons[-1]})" if reasons else ""
    return f"it could not be run to see whether its factors can be exchanged{tried}: pass example= with a batch"


def _inside(name: str, site: Site) -> bool:
    return not site.name or name.startswith(f"{site.name}.")


def _difference(
    site: Site, exchanged: SiteCut, part: str, model: nn.Module, root: nn.Module, run: Callable[[], Any]
) -> str:
    with capture.untouched(root):
        before = _record_run(site, exchanged, model, run)
        with in_place(model, exchanged.layers):
            try:
                after = _record_run(site, exchanged, model, run)
            except FAILED as error:
                return f"its code does not accept another layer instead of {next(iter(exchanged.layers))}: {error}"
    if part == "qk" and not _same(before.scores, after.scores):
        return SCORES
    return "" if _same(before.outputs, after.outputs) else OUTPUTS


def _record_run(site: Site, exchanged: SiteCut, model: nn.Module, run: Callable[[], Any]) -> SiteRun:
    """Run, and return the scores of each attention call of the site and the outputs of its output projection."""
    outputs: list[Tensor] = []
    after = next((name for name, layer in exchanged.layers.items() if isinstance(layer, NarrowColumns)), site.name)
    handle = model.get_submodule(after).register_forward_hook(lambda _, args, out: outputs.extend(_tensors(out)))
    try:
        with capture.seen(site.module) as calls:
            run()
    finally:
        handle.remove()
    if not calls or not outputs:
        raise ValueError("the layer was not reached")
    return SiteRun(
        [call.q @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1).mT for call in calls], outputs
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value.detach().clone()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether two runs agree up to the square root of the precision, relative to the norm of each tensor."""
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return False
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.is_floating_point()]
    return all(bool((x - y).norm() <= torch.finfo(x.dtype).eps ** 0.5 * x.norm()) for x, y in pairs)
