"""Penalties of forwards that wait for `loss()`, and which of them still belong to a step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attend.core.call import Call
from headwise.borders import MODULE_CALL, sequence_number, tree_leaves
from headwise.files.callers import callers
from headwise.files.user_warnings import warn

SEVERAL = (
    "this loss() has the penalties of {count} training forwards of a model that is compiled as a whole. That is right "
    "if one loss is made of them. If the loop skipped some, read loss() before it decides to skip a batch: a compiled "
    "model does not tell which were skipped"
)


class AwaitedForward:
    """A training forward, of the whole model or of parts that are called apart, whose penalties wait for `loss()`.

    Attributes:
        differentiated: whether a backward, other than one that is differentiated again, has gone through it.
        running: whether the forward of the whole model has not ended.
        layers: the layers that were called; a forward of parts calls each once.
        heard: whether a backward through its outputs is noticed though no layer has a penalty.
        known: whether its outputs are known, so that a backward through them would have been noticed.
    """

    def __init__(self, *, running: bool = False) -> None:
        self.differentiated, self.running = False, running
        self.layers: set[int] = set()
        self.heard = self.known = False
        self._outputs: weakref.ref[_Alive] | None = None

    @property
    def skipped(self) -> bool:
        """Whether nothing is left through which a loss could reach its outputs."""
        return self._outputs is not None and self._outputs() is None

    def end(self, nodes: list[Any]) -> None:
        """End it, with the nodes of its outputs."""
        if self.layers or self.heard:
            for node in nodes:
                self.listen(node)
        if self.heard and nodes:
            self.known, self._outputs = True, _alive(nodes)

    def listen(self, node: Any) -> None:
        """Notice a backward through a node."""
        node.register_prehook(_Listener(self))


class _Listener:
    def __init__(self, run: AwaitedForward) -> None:
        self.run = run

    def __call__(self, *_: Any) -> None:
        # With create_graph=True, as in a gradient penalty, the result is a part of a later loss. What a forward
        # differentiates itself is not its own loss.
        if not torch.is_grad_enabled() and not self.run.running:
            self.run.differentiated = True


class _Alive:
    """Exists as long as one of some nodes of a graph, and so as long as anything that follows from their results."""

    __slots__ = ("__weakref__",)


def _alive(nodes: Iterable[Any]) -> weakref.ref[_Alive]:
    mark = _Alive()
    for node in nodes:
        # The node alone holds it. A hook would cost more, in each backward too.
        node.metadata[mark] = mark
    return weakref.ref(mark)


class Entry(NamedTuple):
    """A penalty of a call.

    Attributes:
        total: the sum, or the sum of squares, 0-d.
        weight: what the sum is divided by, 0-d.
        again: whether the call repeats an earlier one; a tensor in compiled graphs.
        strength: the factor of the root of a sum of squares, else None.
        layer: the fitted layer that was called.
        run: the forward; None for compiled code, which does not know it.
        alive: exists as long as anything that follows from the call's output; None where this is not known.
    """

    total: Tensor
    weight: Tensor
    again: bool | Tensor
    strength: Tensor | None
    layer: object
    run: AwaitedForward | None
    alive: weakref.ref[_Alive] | None

    @property
    def abandoned(self) -> bool:
        """Whether nothing is left through which a loss could reach the call's output."""
        return self.alive is not None and self.alive() is None


class Penalties:
    """The penalties of training forwards since the loss was last read.

    Those of a forward that failed are dropped at once. A call whose output leads to nothing any more, such as that of a
    skipped batch, and a forward that another loss has differentiated lose theirs to a later forward.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._parts = AwaitedForward()
        self._mine = threading.local()
        self._told = False

    def __len__(self) -> int:
        return len(self.entries)

    # The entries belong to the graphs of this model's forwards; copies and loaded models start without any.
    def __deepcopy__(self, memo: dict[int, object]) -> Penalties:
        return Penalties()

    def __reduce__(self) -> tuple[type[Penalties], tuple[()]]:
        return Penalties, ()

    def _running(self) -> list[AwaitedForward]:
        """Return the forwards of the whole model that run in this thread; a model may call itself."""
        running: list[AwaitedForward] | None = getattr(self._mine, "running", None)
        if running is None:
            running = self._mine.running = []
        return running

    def begin(self, model: nn.Module, *, trains: bool) -> AwaitedForward | None:
        """Begin a forward of the whole model; `trains` says whether its calls may have penalties.

        Returns it, or None inside another one.
        """
        running = self._running()
        if running and not _calls_itself(model):
            # No hook of a module sees that Ctrl-C ended a forward.
            self._drop(running)
            running.clear()
        if trains:
            self._sweep(keep=None)
        running.append(AwaitedForward(running=True))
        return running[0] if len(running) == 1 else None

    def end(self, output: Any, *, failed: bool) -> None:
        """End it, with its output; drop its penalties if it failed."""
        if not (running := self._running()):
            return
        run = running.pop()
        run.running, self._parts = False, AwaitedForward()
        if failed:
            self._drop([run])
            return
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None]
        if any(e.run is None for e in self.entries):
            self._adopt(run, nodes)
        run.end(nodes)

    def _adopt(self, run: AwaitedForward, nodes: list[Any]) -> None:
        """Let the penalties of layers that are compiled one by one belong to the forward that has ended.

        A compiled graph is one node, which its penalties hold. What was made after the last of them does not lie on the
        way to a penalty, as the hidden states among the outputs do.
        """
        compiled = [e for e in self.entries if e.run is None]
        held = [sequence_number(e.total.grad_fn) for e in compiled if e.total.grad_fn is not None]
        later = [node for node in nodes if sequence_number(node) > max(held, default=-1)]
        alive = _alive(later) if later else None
        run.layers.update(id(e.layer) for e in compiled)
        self.entries = [e if e.run is not None else e._replace(run=run, alive=alive) for e in self.entries]

    def record(self, call: Call, out: Tensor) -> Tensor:
        """Add the penalties of a call and return its output, whose graph tells whether they still belong to a loss.

        A call that repeats an earlier one, or that runs without gradients, has none.
        """
        again = call.open_pass().again
        if again is True or not torch.is_grad_enabled():
            return out
        run = alive = None
        if not torch.compiler.is_compiling():
            run = self._run_of(call.layer)
            if out.requires_grad:
                # A node of its own: one operator may compute the output and what the penalty reads.
                out = out.view_as(out)
                alive = _alive([out.grad_fn])
                if not run.layers:
                    # One for each forward; the model's outputs, of which not all are known, are the others.
                    run.listen(out.grad_fn)
            run.layers.add(id(call.layer))
        parts = [(*part, None) for part in call.penalties] + call.norms
        self.entries += [Entry(total, weight, again, root, call.layer, run, alive) for total, weight, root in parts]
        return out

    def _run_of(self, layer: object) -> AwaitedForward:
        if running := self._running():
            return running[-1]
        if id(layer) in self._parts.layers:
            self._sweep(keep=None)
            self._parts = AwaitedForward()
        return self._parts

    def _drop(self, runs: Collection[AwaitedForward]) -> None:
        self.entries = [e for e in self.entries if e.run not in runs]

    def _sweep(self, keep: AwaitedForward | None) -> None:
        """Drop the penalties of calls whose output leads to nothing any more, but for the forward `keep`."""
        left, kept = self.entries, []
        self.entries = []
        entry = None
        while left:
            # From the last to the first: the penalty of a layer holds the outputs of those below it. Rebinding `entry`
            # frees the last one's graph before the next one is looked at.
            entry = left.pop()
            if entry.run is keep or not entry.abandoned:
                kept.append(entry)
        self.entries = kept[::-1]

    def clear(self) -> bool:
        """Drop all penalties, and return whether there were any."""
        had = bool(self.entries)
        self.entries = []
        return had

    def take(self) -> list[Entry]:
        """Return the entries of the forwards that can still belong to one loss, and clear all."""
        if not self.entries:
            return []
        compiled = any(e.run is None for e in self.entries)
        self.entries = _tell_compiled_runs_apart(self.entries)
        last = self.entries[-1].run
        self._sweep(keep=last)
        entries, self.entries = self.entries, []
        runs = [run for run in dict.fromkeys(e.run for e in entries) if run is not None]
        new = [number for number, run in enumerate(runs) if not run.differentiated]
        dropped = {run for number, run in enumerate(runs) if run.differentiated and new and number < new[-1]}
        kept = [e for e in entries if e.run not in dropped]
        # Nothing tells whether these were skipped, but a loop that accumulates has no use for them either.
        poisoned = _not_finite([e for e in kept if e.alive is None and e.run is not last])
        if compiled:
            self._warn_of({e.run for e in kept if e.alive is None} - poisoned)
        # Not dropped, because all processes must have the same number.
        return [_without_weight(e) if e.run in poisoned else e for e in kept]

    def _warn_of(self, runs: Collection[AwaitedForward | None]) -> None:
        """Warn, the first time, that several forwards count of which some may have been skipped."""
        if len(runs) > 1 and not self._told:
            self._told = True
            warn(SEVERAL.format(count=len(runs)))


def _tell_compiled_runs_apart(entries: list[Entry]) -> list[Entry]:
    """Return the entries; those of models that are compiled as a whole, in forwards that call each layer once."""
    run = AwaitedForward()
    told: list[Entry] = []
    for e in entries:
        if e.run is None:
            # The penalties of one call follow each other.
            if id(e.layer) in run.layers and told[-1].layer is not e.layer:
                run = AwaitedForward()
            run.layers.add(id(e.layer))
        told.append(e if e.run is not None else e._replace(run=run))
    return told


def _not_finite(entries: list[Entry]) -> set[AwaitedForward]:
    """Return the forwards with a penalty that is not finite, in one wait for the device."""
    if not entries:
        return set()
    device = entries[0].total.device
    finite = torch.stack([e.total.detach().to(device) for e in entries]).isfinite().tolist()
    return {e.run for e, good in zip(entries, finite, strict=True) if e.run is not None and not good}


def _without_weight(entry: Entry) -> Entry:
    return entry._replace(total=torch.zeros_like(entry.total.detach()), weight=torch.zeros_like(entry.weight.detach()))


def _calls_itself(model: nn.Module) -> bool:
    """Return whether the call of a model that begins was made inside another call of it."""
    return sum(frame.f_code is MODULE_CALL and frame.f_locals.get("self") is model for frame in callers()) > 1
