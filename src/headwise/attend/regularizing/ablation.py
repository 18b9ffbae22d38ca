"""Ablation: heads whose output is zero until it is removed."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import SharedState
from headwise.attend.hosts.layers.declared import Candidate
from headwise.borders import is_compiled
from headwise.files.errors import suggest

Gate = Callable[[Tensor], Tensor]


class Ablation:
    """Heads of one layer whose output is zero before the output projection, until `remove()` or the end of a `with`.

    Attributes:
        layer: qualified name of the attention layer.
        heads: indices of its query heads.
    """

    def __init__(self, fitted: FittedLayer, heads: tuple[int, ...]) -> None:
        self.layer, self.heads, self._fitted = fitted.site.name, heads, fitted
        gate = fitted.gate if isinstance(fitted.gate, Off) else Off()
        gate.ablations.append(self)
        gate.write(fitted)

    @property
    def holds(self) -> bool:
        """Return whether the ablation is in force."""
        gate = self._fitted.gate
        return isinstance(gate, Off) and any(other is self for other in gate.ablations)

    def remove(self) -> None:
        """Let the heads write again, unless another ablation holds them; a second call does nothing."""
        gate = self._fitted.gate
        if isinstance(gate, Off) and self.holds:
            gate.ablations = [other for other in gate.ablations if other is not self]
            gate.write(self._fitted)

    def __enter__(self) -> Ablation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Ablation({self.layer!r}, heads={list(self.heads)})"


def refuse_held(ablations: Sequence[Ablation]) -> None:
    """Raise RuntimeError if an ablation is in force, before its handle goes."""
    if held := next((one for one in ablations if one.holds), None):
        raise RuntimeError(
            f"{held!r} is in force, and would end with the handle: remove() it first, and take the heads out with "
            "headwise.compress(model, idle=...)"
        )


class Off:
    """The gate of a layer that makes the output of some heads zero.

    Attributes:
        ablations: those that hold the heads.
        open: (H,) bool, False for heads whose output is zero.
    """

    def __init__(self) -> None:
        self.ablations: list[Ablation] = []
        self.open = torch.ones(0, dtype=torch.bool)

    def write(self, fitted: FittedLayer) -> None:
        """Write which heads are off, on the layer; a layer that nothing needs any more is detached."""
        if not self.ablations:
            set_gate(fitted, None)
            return
        parameter = next(fitted.site.module.parameters(), None)
        count = fitted.site.heads or fitted.seen["heads"]
        # Another tensor each time, as a graph of an earlier forward may hold the last one.
        self.open = torch.ones(count, dtype=torch.bool, device=None if parameter is None else parameter.device)
        self.open[sorted({head for one in self.ablations for head in one.heads})] = False
        set_gate(fitted, self)

    def __call__(self, out: Tensor) -> Tensor:
        """Return the heads' output (B, H, T, Dv); zero for those that are off, also where it is not finite."""
        return out.masked_fill(~self.open.to(out.device)[:, None, None], 0.0)


def set_gate(fitted: FittedLayer, gate: Gate | None) -> None:
    """Set the gate of a layer, and detach the layer if nothing needs it any more."""
    began = (fitted.gate is None) != (gate is None)
    fitted.gate = gate
    if not fitted.alive or fitted.adapter is None:
        return
    if gate is None and fitted.shared.bare and fitted.observer is None:
        fitted.detach()
    elif began:
        # Hosts keep their own fast paths where nothing acts, and decide so when a layer is attached.
        fitted.adapter.detach()
        fitted.attach()


def layer_at(model: nn.Module, fitted: Sequence[FittedLayer], candidate: Candidate) -> FittedLayer:
    """Return the layer at a site: with its methods, as a watch made it, or new without methods.

    Raises:
        ValueError: if the site cannot be reached.
    """
    if candidate.adapter is None:
        raise ValueError(f"{candidate.site.name} cannot be reached: {candidate.reason}")
    module = candidate.site.module
    layer = next((one for one in fitted if one.site.module is module), None) or FittedLayer.bare_in(model).get(module)
    if layer is None:
        shared = SharedState(bare=True)
        shared.follow(model)
        layer = FittedLayer(candidate.site, [], shared, candidate.adapter)
        layer.attach()
        if any(is_compiled(part) for part in model.modules()):
            # A graph that was made before knows nothing of the layer.
            torch.compiler.reset()
    return layer


def candidate_at(found: Sequence[Candidate], layer: Any, argument: str = "layer") -> Candidate:
    """Return the attention layer with an index or a qualified name, which the user gave as this argument.

    Raises:
        ValueError: if there is none.
        TypeError: if `layer` is neither.
    """
    names = [candidate.site.name for candidate in found]
    if isinstance(layer, str):
        if layer not in names:
            raise ValueError(f"{argument}: there is no attention layer {layer!r}.{suggest(layer, names)}")
        return found[names.index(layer)]
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise TypeError(f"{argument}: a layer is an index or the name of an attention layer, got {reprlib.repr(layer)}")
    if not 0 <= layer < len(found):
        raise ValueError(
            f"{argument}: layers are from 0 to {len(found) - 1}, as headwise.sites(model) lists them, got {layer}"
        )
    return found[layer]


def heads_of(fitted: FittedLayer, head: Any) -> tuple[int, ...]:
    """Return the indices of query heads, given one or several.

    Raises:
        ValueError: if the layer has no such head, or their number is not known yet.
        TypeError: if `head` is neither.
    """
    heads = (head,) if isinstance(head, int) and not isinstance(head, bool) else head
    if not isinstance(heads, (tuple, list, range, set)) or any(type(one) is not int for one in heads):
        raise TypeError(f"head must be the index of a head or several, got {reprlib.repr(head)}")
    count = fitted.site.heads or fitted.seen.get("heads")
    if count is None:
        raise ValueError(
            f"the number of heads of {fitted.site.name} is not known: pass example=batch to regularize(), or run the "
            "model once first"
        )
    if wrong := sorted(one for one in heads if not 0 <= one < count):
        raise ValueError(f"head must be from 0 to {count - 1} at {fitted.site.name}, got {', '.join(map(str, wrong))}")
    return tuple(sorted(set(heads)))


class Slot:
    """The gate of a layer while heads are measured: what acted before, then `inner` if there is one.

    Attributes:
        tokens: the number of queries, B·T, of the last call.
    """

    def __init__(self, layer: FittedLayer) -> None:
        self.layer, self.before = layer, layer.gate
        self.inner: Gate | None = None
        self.tokens = 0

    def __call__(self, out: Tensor) -> Tensor:
        """Return the heads' output (B, H, T, Dv)."""
        self.tokens = out.shape[0] * out.shape[2]
        out = out if self.before is None else self.before(out)
        return out if self.inner is None else self.inner(out)


@contextmanager
def slots_at(model: nn.Module, fitted: Sequence[FittedLayer], found: Sequence[Candidate]) -> Iterator[list[Slot]]:
    """Put a slot on each layer that can be reached, and restore the layers' gates afterwards."""
    slots: list[Slot] = []
    try:
        for candidate in found:
            if candidate.adapter is not None:
                slots.append(Slot(layer_at(model, fitted, candidate)))
                set_gate(slots[-1].layer, slots[-1])
        yield slots
    finally:
        for slot in slots:
            set_gate(slot.layer, slot.before)
