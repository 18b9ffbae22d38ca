"""Collection of the calls of observed sites between two optimizer steps, and the collective that joins ranks."""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from headwise.attend import Call, FittedLayer, Site
from headwise.borders import in_backward
from headwise.health.statistics import STATISTICS, Reading, Tally, read, reasons
from headwise.health.statistics.weights import Grams
from headwise.health.watching.figures import on_cpu
from headwise.health.watching.observed import reading_of, real_queries
from headwise.health.watching.stream import FINAL, NAMES, NOT_LAST, WRITES, Stream, Writes, tokens_of
from headwise.health.watching.weights import FLOOR, NOT_FINITE, Weights

Tallies = dict[int, dict[str, Tally]]


def ranks() -> int:
    """Return the number of processes of the distributed training; 1 without one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def rank() -> int:
    """Return this process's rank in the distributed training; 0 without one."""
    return torch.distributed.get_rank() if ranks() > 1 else 0


def is_first() -> bool:
    """Return whether this process has rank 0, the one that writes logs."""
    return rank() == 0


def joined(
    tallies: Tallies, layout: dict[int, dict[str, tuple[int, ...]]], device: torch.device, *, alone: bool = False
) -> Tallies:
    """Return the tallies joined over all ranks by one all-gather: sums and weights are added, maxima stay maxima.

    Args:
        alone: whether other ranks may have no batch left, so that each keeps its own tallies.
    """
    if ranks() == 1 or alone:
        return tallies
    own = torch.cat([_pack(tallies.get(site, {}).get(name), shape) for site, name, shape in _each(layout)]).to(device)
    every = own.new_empty(ranks() * own.numel())
    torch.distributed.all_gather_into_tensor(every, own)
    result: Tallies = {}
    for vector in every.view(ranks(), -1).cpu():
        offset = 0
        for site, name, shape in _each(layout):
            tally, offset = _unpack(vector, offset, name, shape)
            if tally is None:
                continue
            known = result.setdefault(site, {})
            known[name] = known[name].add(tally) if name in known else tally
    return result


def _each(layout: dict[int, dict[str, tuple[int, ...]]]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(site, name, shape) for site, names in sorted(layout.items()) for name, shape in sorted(names.items())]


KINDS = ("mean", "max", "min")


def _pack(tally: Tally | None, shape: tuple[int, ...]) -> Tensor:
    """Return a tally as a vector: (present, kind, sampled, has spread), then three numbers per entry."""
    size = torch.Size(shape).numel()
    if tally is None:
        return torch.zeros(4 + 3 * size, dtype=torch.float64)
    spread = torch.zeros(size, dtype=torch.float32) if tally.spread is None else tally.spread.flatten()
    head = torch.tensor(
        [1.0, float(KINDS.index(tally.kind)), float(tally.sampled), float(tally.spread is not None)],
        dtype=torch.float64,
    )
    parts = (tally.total.flatten(), tally.weight.flatten(), spread)
    return torch.cat([head, *(part.to("cpu", torch.float64) for part in parts)])


def _unpack(vector: Tensor, offset: int, name: str, shape: tuple[int, ...]) -> tuple[Tally | None, int]:
    size = torch.Size(shape).numel()
    end = offset + 4 + 3 * size
    present, kind, sampled, spread = vector[offset : offset + 4].tolist()
    if not present:
        return None, end
    total, weight, deviation = vector[offset + 4 : end].view(3, *shape).unbind()
    tally = Tally(total, weight, None, bool(sampled), KINDS[int(kind)])
    return replace(tally, spread=deviation) if spread else tally, end


# The assumed largest growth of logits from one reading to the next, where measuring it would wait for a device.
GROWTH = 2.0
# Bytes of Gram matrices of weights that are kept until the step ends; with more, figures are computed within the step.
LARGEST_GRAMS = 1 << 28


class Recorder:
    """Collector of tallies per site and statistic; a forward that a backward recomputes is not counted again.

    Args:
        training: whether to read calls in training mode or in evaluation mode; calls in the other mode are ignored.
    """

    def __init__(self, names: list[str], rows: int | None, weights: Weights, *, training: bool = True) -> None:
        self.names, self.rows, self.weights = [name for name in names if name in STATISTICS], rows, weights
        self.training = training
        self.step = 0
        self.tallies: dict[int, dict[str, Tally]] = {}
        self.of_weights: dict[int, dict[str, Tensor]] = {}
        self.heads: dict[int, int] = {}
        self.reasons: dict[int, dict[str, str]] = {}
        # By stack and kind: the depth and reading of the previous layer, until the next layer is read.
        self._before: dict[tuple[str, bool], tuple[int, Reading]] = {}
        self._real: dict[str, Tensor | None] = {}
        self._missing: dict[int, dict[str, str]] = {}
        self._calls: dict[int, int] = {}
        self._leaving: dict[int, tuple[Call, Reading]] = {}
        self._writing: dict[int, tuple[Call, Reading]] = {}
        self._grams: dict[int, dict[str, Grams]] = {}
        # Whether the weights of each site are finite, 0-d.
        self._finite: dict[int, Tensor] = {}
        # Upper bounds of the logits of each site: 0-d in this reading, a number in the previous one.
        self._bounds: dict[int, Tensor] = {}
        self._known_bounds: dict[int, float] = {}

    @property
    def reads_streams(self) -> bool:
        """Return whether a statistic of the residual stream is requested."""
        return any(name in NAMES for name in self.names)

    @property
    def writes(self) -> list[str]:
        """Return the requested statistics of what the branches write."""
        return [name for name in WRITES if name in self.names]

    def take(
        self,
        call: Call,
        out: Tensor,
        around: Stream | None = None,
        stream: Tensor | None = None,
        writes: Writes | None = None,
    ) -> None:
        """Read one call of a site whose per-head output is `out`.

        Args:
            around: the reader of the residual stream around the site; None if no statistic needs it.
            writes: the reader of what the block's branches write; None if no statistic needs it.
        """
        if in_backward() or call.training != self.training:
            return
        site = call.site
        with torch.no_grad():
            product = self.weights.product_norms(call) if FLOOR in self.names else None
            reading = reading_of(call, out, product, self._real_queries(call))
            reading = self._with_stream(call, reading, around, stream)
            if writes is not None:
                reading = replace(reading, write_obstacles=writes.obstacles)
            # The last change of the reading, whose norms the bound and figures share.
            reading = self._bounded(site, reading)
            if around is not None and around.final:
                self._leaving[site.index] = call, reading
            if writes is not None:
                self._writing[site.index] = call, reading
            before = self._layer_before(call, reading)
            draw = self._draw(site)
            self.reasons[site.index] = reasons(reading.facts(before is not None), self.names)
            tallies = read(reading, self.names, self.rows, before, draw)
            self._take_weights(site)
        self.heads[site.index] = call.heads
        self._add(site, tallies)

    def take_final(self, site: Site, stream: Tensor) -> None:
        """Read the output of the last block of a stack, after `take` has read the block's attention."""
        if in_backward() or site.index not in self._leaving:
            return
        call, reading = self._leaving.pop(site.index)
        tokens, obstacle = tokens_of(call, stream)
        reading = reading.with_tokens(final=tokens, stream_obstacle=obstacle or None)
        self._take_later(site, reading, [name for name in FINAL if name in self.names])

    def take_write(self, site: Site, name: str, written: Tensor) -> None:
        """Read what a branch of the site's block writes, after `take` has read the block's attention."""
        if in_backward() or site.index not in self._writing:
            return
        call, reading = self._writing[site.index]
        if name == self.writes[-1]:
            del self._writing[site.index]
        tokens, obstacle = tokens_of(call, written)
        obstacles = {**reading.write_obstacles, **({name: obstacle} if obstacle else {})}
        of_attention, of_mlp = (tokens if name == one else None for one in WRITES)
        reading = reading.with_tokens(attention_write=of_attention, mlp_write=of_mlp, write_obstacles=obstacles)
        self._take_later(site, reading, [name])

    def _take_later(self, site: Site, reading: Reading, names: list[str]) -> None:
        """Read statistics of a call that was read before, and replace the reasons for their absence."""
        with torch.no_grad():
            missing = reasons(reading.facts(), names)
            self.reasons[site.index] = {k: v for k, v in self.reasons[site.index].items() if k not in names} | missing
            self._add(site, read(reading, names))

    def _bounded(self, site: Site, reading: Reading) -> Reading:
        """Return the reading with a bound of its logits from the previous one, so as not to wait for the device.

        On the CPU or outside of training the reading is returned as it is.
        """
        if not self.training or reading.q.device.type == "cpu" or not reading.q.numel() or not reading.k.numel():
            return reading
        # A site without a bound so far is treated as one with large logits.
        reading = replace(reading, known_bound=GROWTH * self._known_bounds.get(site.index, math.inf))
        bound, earlier = reading.logit_bound(), self._bounds.get(site.index)
        self._bounds[site.index] = bound if earlier is None else torch.maximum(bound, earlier.to(bound.device))
        return reading

    def collect(self, beside: Sequence[Tensor] = ()) -> Iterator[Tensor]:
        """Move all readings to the CPU, with one copy from each device, and return the tensors in `beside` there."""
        self._read_weights()
        tallies = [tally for by_name in self.tallies.values() for tally in by_name.values()]
        figures = [values for by_name in self.of_weights.values() for values in by_name.values()]
        parts = [part for tally in tallies for part in tally.tensors()]
        moved = iter(on_cpu([*parts, *figures, *self._finite.values(), *self._bounds.values(), *beside]))
        self.tallies = {
            site: {name: tally.with_tensors([next(moved) for _ in tally.tensors()]) for name, tally in by_name.items()}
            for site, by_name in self.tallies.items()
        }
        self.of_weights = {site: {name: next(moved) for name in by_name} for site, by_name in self.of_weights.items()}
        for site in [site for site in self._finite if not next(moved)]:
            self.of_weights[site] = {}
            self.reasons[site] |= dict.fromkeys(self.weights.names, NOT_FINITE)
        self._finite = {}
        self._known_bounds |= {site: float(next(moved)) for site in self._bounds}
        self._bounds = {}
        return moved

    def _with_stream(self, call: Call, reading: Reading, around: Stream | None, stream: Tensor | None) -> Reading:
        if around is None:
            return reading
        tokens, obstacle = (None, around.obstacle) if around.obstacle else tokens_of(call, stream)
        return replace(reading, stream=tokens, stream_obstacle=obstacle or NOT_LAST)

    def _add(self, site: Site, tallies: dict[str, Tally]) -> None:
        known = self.tallies.setdefault(site.index, {})
        for name, tally in tallies.items():
            known[name] = known[name].add(tally) if name in known else tally

    def _draw(self, site: Site) -> torch.Generator | None:
        """Return the generator for a call's sample of queries; None if all queries are read.

        Each step, site, call within the step and rank has its own seed, because variances add up only over independent
        samples.
        """
        if self.rows is None:
            return None
        call = self._calls[site.index] = self._calls.get(site.index, 0) + 1
        # The generator uses only 32 bits of its seed.
        return torch.Generator().manual_seed(zlib.crc32(f"{self.step} {site.index} {call} {rank()}".encode()))

    def _take_weights(self, site: Site) -> None:
        """Read a site's weights once per step, in a forward: there sharded weights are whole and equal on all ranks."""
        if not self.weights.names:
            return
        if site.index not in self.of_weights and site.index not in self._grams:
            self._grams[site.index], self._missing[site.index] = self.weights.grams(site)
            if sum(grams.size() for by_kind in self._grams.values() for grams in by_kind.values()) > LARGEST_GRAMS:
                self._read_weights()
        self.reasons[site.index] |= self._missing[site.index]

    def _read_weights(self) -> None:
        """Compute the figures of the weights whose Gram matrices were taken."""
        figures, finite = self.weights.figures(self._grams)
        self.of_weights |= figures
        self._finite |= finite
        self._grams = {}

    def _real_queries(self, call: Call) -> Tensor | None:
        """Return which queries are real tokens; cross attention has those of the last self attention in its stack."""
        site = call.site
        if call.is_cross:
            real = self._real.get(site.stack)
            return real if real is not None and real.shape == (call.batch, call.queries) else None
        if site.windowed:
            return None
        self._real[site.stack] = real_queries(call)
        return self._real[site.stack]

    def _layer_before(self, call: Call, reading: Reading) -> Reading | None:
        """Return the previous layer's reading in this forward; None if the two layers' maps are not comparable."""
        site = call.site
        if not {"layer_redundancy", "layer_redundancy_mean"} & set(self.names):
            return None
        stack = (site.stack, call.is_cross)
        depth, before = self._before.pop(stack, (None, None))
        if site.depth + 1 < site.layers:
            self._before[stack] = (site.depth, reading)
        if before is None or depth != site.depth - 1 or before.q.device != reading.q.device:
            return None
        if (before.batch, before.queries, before.keys) != (reading.batch, reading.queries, reading.keys):
            return None
        reading.share_counts(before)
        return before

    def clear(self) -> None:
        """Discard the step's figures and release all tensors."""
        self.tallies, self.of_weights, self._before, self._real = {}, {}, {}, {}
        self._calls, self._leaving, self._writing, self._bounds = {}, {}, {}, {}
        self._grams, self._finite = {}, {}


# What writes the output of a block, beside its branches.
BLOCK = "block"
# A compiled graph refers to an observer by its number and never to the object.
_numbers = itertools.count(1)
_observers: weakref.WeakValueDictionary[int, SiteObserver] = weakref.WeakValueDictionary()


class SiteObserver:
    """Observer of one site that passes its calls to the recorder."""

    def __init__(self, place: FittedLayer, recorder: Recorder, model: nn.Module) -> None:
        self.place, self.recorder = place, recorder
        # The operators below count their calls here: a compiled graph removes an operator without an effect.
        self.seen = torch.zeros((), dtype=torch.int64)
        self.number = next(_numbers)
        _observers[self.number] = self
        self.stream = Stream(place, model, self.left) if recorder.reads_streams else None
        self.writes = Writes(place, model, recorder.writes, self.wrote) if recorder.writes else None

    def __call__(self, call: Call, out: Tensor) -> None:
        """Observe a call; the site calls this after computing its output."""
        stream = None if self.stream is None else self._of_samples(self.stream.take())
        if torch.compiler.is_compiling():
            observe(self.seen, self.number, call, out, stream)
        else:
            self.take(call, out, stream)

    def _of_samples(self, stream: Tensor | None) -> Tensor | None:
        """Return the residual stream by sequence if its rows are packed, else as it is."""
        packed = self.place.packing.look()
        return packed.unpack(stream) if packed is not None and stream is not None and packed.holds(stream) else stream

    def left(self, stream: Tensor | None) -> None:
        """Observe the output of the block around the site."""
        stream = self._of_samples(stream)
        assert stream is not None
        if torch.compiler.is_compiling():
            wrote(self.seen, self.number, BLOCK, stream)
        else:
            self.take_write(BLOCK, stream)

    def wrote(self, name: str, written: Tensor) -> None:
        """Observe what a branch of the block adds to the residual stream."""
        tokens = self._of_samples(written)
        assert tokens is not None
        if torch.compiler.is_compiling():
            wrote(self.seen, self.number, name, tokens)
        else:
            self.take_write(name, tokens)

    def take(self, call: Call, out: Tensor, stream: Tensor | None) -> None:
        """Pass a call, its output and the input of its block to the recorder."""
        self.recorder.take(call, out, self.stream, stream, self.writes)

    def take_write(self, name: str, written: Tensor) -> None:
        """Pass what a branch of the block writes, or the output of the block, to the recorder."""
        if name == BLOCK:
            self.recorder.take_final(self.place.site, written)
        else:
            self.recorder.take_write(self.place.site, name, written)

    def remove(self) -> None:
        """Remove the hooks around the site."""
        for hooks in (self.stream, self.writes):
            if hooks is not None:
                hooks.remove()


def observe(seen: Tensor, number: int, call: Call, out: Tensor, stream: Tensor | None = None) -> None:
    """Record a call in a graph that is being compiled."""
    tensors = [call.q, call.k, call.v, out]
    hidden = call.hidden
    optional = [None if t is None else t.detach() for t in (call.mask, call.sinks, hidden, stream, call.gates)]
    observed(
        seen,
        number,
        *[t.detach() for t in tensors],
        *optional,
        call.causal,
        call.scale,
        call.softcap,
        call.training,
        call.is_cross,
        [] if call.text is None else [call.text.start, call.text.stop],
    )


@torch.library.custom_op("headwise::observed", mutates_args={"seen"})
def observed(
    seen: Tensor,
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    hidden: Tensor | None,
    stream: Tensor | None,
    gates: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    training: bool,
    cross: bool,
    text: list[int],
) -> None:
    """Pass the tensors of a call to the observer with this number when the graph runs."""
    # An operator that changes and returns nothing would be removed from the graph.
    seen.add_(1)
    observer = _observers.get(number)
    if observer is None:
        return
    call = Call(
        observer.place,
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        training=training,
        hidden=hidden,
        cross=cross,
        text=slice(*text) if text else None,
    )
    call.gates = gates
    observer.take(call, out, stream)


observed.register_fake(lambda *_: None)


@torch.library.custom_op("headwise::wrote", mutates_args={"seen"})
def wrote(seen: Tensor, number: int, name: str, written: Tensor) -> None:
    """Pass what a branch or the block writes to the observer with this number when the graph runs."""
    seen.add_(1)
    observer = _observers.get(number)
    if observer is not None:
        observer.take_write(name, written)


wrote.register_fake(lambda *_: None)
