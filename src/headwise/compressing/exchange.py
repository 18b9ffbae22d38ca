"""Exchange: see on the running layer whether other factors of the same products change nothing, before anything is cut.

Rotary positions, norms, relative positions that read the queries, gates: whatever stands between a projection and what
attention makes of it is seen by this, whether its host declares it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compressing.narrow import NarrowColumns
from headwise.compressing.site_cut import SiteCut, cut_site
from headwise.core.site import Site
from headwise.projections import Projections, capture
from headwise.projections.inputs import ways

SCORES = (
    "other factors of the same W_KᵀW_Q change its scores: something stands between the projections and the scores, "
    "such as a "
    'rotation or a norm; cut values and output alone, parts="vo"'
)
OUTPUTS = (
    "other factors of the same product change its output: something beside attention reads the queries, keys or values"
)
FAILED = (TypeError, ValueError, RuntimeError, AttributeError, IndexError, KeyError, NotImplementedError)


@dataclass(frozen=True, eq=False)
class Seen:
    """What one run of a site showed: the scores of each call, and what came out."""

    scores: list[Tensor]
    outputs: list[Tensor]


@contextmanager
def in_place(model: nn.Module, layers: dict[str, Any]) -> Iterator[None]:
    """Let layers stand in for those of the same names while the context lasts."""
    known = {name: model.get_submodule(name) for name in layers}
    put(model, layers)
    try:
        yield
    finally:
        put(model, known)


def put(model: nn.Module, layers: dict[str, Any]) -> None:
    """Put layers in the place of those of the same names."""
    for name, layer in layers.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, layer)


def refusal(site: Site, found: Projections, part: str, model: nn.Module, example: Any) -> str:
    """Say why a product cannot be cut, seen by running the layer with all factors exchanged; empty where it can be."""
    exchanged = cut_site(found, (part,), None)
    reasons = []
    for root, run in ways(site, model, example):
        if root is site.module and any(not _inside(name, site) for name in exchanged.layers):
            # an output projection beside the layer does not run with it
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
        before = _seen(site, exchanged, model, run)
        with in_place(model, exchanged.layers):
            try:
                after = _seen(site, exchanged, model, run)
            except FAILED as error:
                return f"its code does not take another layer in the place of {next(iter(exchanged.layers))}: {error}"
    if part == "qk" and not _same(before.scores, after.scores):
        return SCORES
    return "" if _same(before.outputs, after.outputs) else OUTPUTS


def _seen(site: Site, exchanged: SiteCut, model: nn.Module, run: Callable[[], Any]) -> Seen:
    """Run, and keep the scores of each attention call of the site, and what its output projection gave."""
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
    return Seen([_scores(one.q, one.k) for one in calls], outputs)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found.detach().clone()
    elif isinstance(found, tuple | list):
        for value in found:
            yield from _tensors(value)


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    """Return whether two runs agree to rounding: the square root of the precision, relative to the size of each
    tensor."""
    if [one.shape for one in before] != [one.shape for one in after]:
        return False
    pairs = [(x, y) for x, y in zip(before, after, strict=True) if x.is_floating_point()]
    return all(bool((x - y).norm() <= torch.finfo(x.dtype).eps ** 0.5 * x.norm()) for x, y in pairs)
