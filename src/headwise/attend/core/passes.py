"""Passes: the number of each pass through a layer, and the key of its draws, made of seed, rank, layer and number.

Activation checkpointing runs a layer again in backward. Both runs are recognised by the saved-tensor hooks that it
installs. The recompute gets the key of the original pass and is marked as a repeat: it makes the same draws, and its
penalties are not counted again.

A CUDA graph repeats kernels with the arguments that they had when it was captured, the keys of draws among them. While
a step of a study is captured, keys are therefore read from memory, which is written before each replay.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.attend.core.random_draws import mix, mixed, next_key
from headwise.attend.core.site import Site
from headwise.borders import checkpoint_of, in_backward, outside_transforms, pack_functions, without_modes
from headwise.numerics.kernels import capturing

# Braces are doubled because the messages that contain this text are formatted.
NOT_REENTRANT = (
    "Use checkpoint(..., use_reentrant=False), or in transformers {{'use_reentrant': False}} as "
    "activation_checkpointing_kwargs (gradient_checkpointing_kwargs before that name)"
)
REENTRANT = (
    "{site} was run again inside a backward pass, as reentrant activation checkpointing does; {method} would draw, "
    f"penalise or carry values a second time, and its gradient would be silently wrong. {NOT_REENTRANT}. If a library "
    "runs the whole model there with torch's random state restored, as the cached losses of sentence-transformers do, "
    "pass draws='torch' to regularize(), for methods that draw."
)
UNDIFFERENTIATED = (
    "{sites} ran without gradients inside a training forward, as under reentrant activation checkpointing, which runs "
    f"them again in backward: {{methods}} would draw, penalise or carry values a second time. {NOT_REENTRANT}. "
    "Methods that only draw may follow torch's random state instead: regularize(..., draws='torch'). Leave out layers "
    "that the model itself runs under torch.no_grad() with where="
)
COMPILED = (
    "{site} was recomputed inside a compiled graph's backward: activation checkpointing inside torch.compile would "
    "draw again for {method}. Compile the layer and checkpoint around it: checkpoint(torch.compile(layer), x, "
    "use_reentrant=False)."
)


ON_HOST = (
    "{site} draws by torch's generator of the CPU, which a CUDA graph cannot ask again in each replay: leave out "
    "draws='torch' of regularize()"
)
UNPREPARED = (
    "{site} is captured as a CUDA graph before it made a training pass on the device: the counter of its draws must be "
    "there before. Run a few training steps on a side stream first, as torch.cuda.graph asks"
)


@dataclass
class Region:
    """The record of a checkpointed region's first run.

    Attributes:
        keys: keys of the passes through each layer, by the number of its `Passes`.
        replay: for each recompute, by its id, how many passes of each layer it has repeated.
        carried: values of the first self attention, by stack.
        sites: adapters of the sites whose fused attention calls it made.
    """

    keys: dict[int, list[int | Tensor]] = field(default_factory=dict)
    replay: dict[Any, dict[int, int]] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    sites: list[Any] = field(default_factory=list)


# Keyed by the frame object that checkpointing makes for each region, so that a region is freed with its graph.
_regions: weakref.WeakKeyDictionary[Any, Region] = weakref.WeakKeyDictionary()


def regions() -> tuple[list[Region], Region | None, Any]:
    """Return the regions that run for the first time, the region being recomputed or None, and the recompute's id.

    Regions may be nested: while an outer one is recomputed, its inner ones run for the first time.
    """
    first: list[Region] = []
    for pack in pack_functions():
        checkpoint = checkpoint_of(pack)
        if checkpoint is None:
            continue
        frame, again, recompute = checkpoint
        record = _regions.setdefault(frame, Region())
        if again:
            return first, record, recompute
        first.append(record)
    return first, None, None


def region() -> tuple[Region | None, Any]:
    """Return the region being recomputed and the recompute's id, else the outermost region that runs first, or None."""
    first, repeated, recompute = regions()
    return (repeated, recompute) if repeated is not None else (first[-1] if first else None, None)


@dataclass
class Pass:
    """One pass through a layer: the key of its draws, and whether it repeats an earlier pass.

    `key` is an integer and `again` a bool; inside a compiled graph both are 0-d int64 tensors.
    """

    key: int | Tensor
    again: bool | Tensor = False
    region: Region | None = None
    first_runs: list[Region] = field(default_factory=list)


# Compiled graphs read a number, because holding the layer would keep it alive. Numbers are never reused.
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, Passes] = weakref.WeakValueDictionary()


class Passes:
    """The counter of the passes through one layer.

    Attributes:
        token: the number as a tensor, () int64, which compiled graphs read, and seem to write, which keeps the order of
            their passes.
        number: the key by which compiled graphs look up this object.
        draws: what the keys of draws follow: "counter", or "torch", a number of torch's generator for each pass of a
            layer with a method that draws.
        held: where the keys come from while a training step of a study is captured.
        replays: the passes that captured steps made, 0-d int64 on the device of the calls; None on a CPU.
        captured: whether a step was captured as a CUDA graph. From then on the device counts all passes, because the
            host does not know how often the graph is replayed.
    """

    held: HeldKeys | None = None
    replays: Tensor | None = None
    captured = False

    def __init__(self, site: Site, methods: list[Any], seed: int, draws: str = "counter") -> None:
        self.site, self.methods, self.seed, self.draws = site, methods, seed, draws
        self._made = 0
        self._prefix: tuple[Any, int] = (None, 0)
        self._enroll()

    def count(self) -> int:
        """Return the number of passes so far; after a capture this waits for the device."""
        return self._made + (int(self.replays) if self.captured and self.replays is not None else 0)

    def recount(self, count: int) -> None:
        """Set the number of passes so far."""
        if self.captured and self.replays is not None:
            self.replays.fill_(count - self._made)
        else:
            self._made = count

    def prepare(self, device: torch.device) -> None:
        """Keep a counter on the device of the calls, before a step is captured."""
        if self.replays is None and not capturing():
            self.replays = torch.zeros((), dtype=torch.int64, device=device)

    def _enroll(self) -> None:
        self.number = next(_numbers)
        # Compiled graphs take it as data: as a constant it would keep another model from finding the code in the cache.
        self.token = torch.tensor(self.number, device="cpu")
        _by_number[self.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Passes:
        twin = object.__new__(Passes)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        twin._enroll()
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        # unpickled, perhaps in another process, where the number may be taken
        self.__dict__.update(state)
        self._enroll()

    def open(self, counted: bool = True) -> Pass:
        """Return a new pass, or the pass that this one repeats; one that is not counted has no key for draws."""
        if torch.compiler.is_compiling() and not counted:
            return Pass(0)
        if torch.compiler.is_compiling():
            # A graph can neither detect a recompute nor read the counter as a number; the operator does both when it
            # runs.
            token = compiled_token(self.token)
            return Pass(token[0], token[1])
        return self._open(counted)

    def _open(self, counted: bool = True) -> Pass:
        first, repeated, rerun = regions()
        if repeated is not None:
            counts = repeated.replay.setdefault(rerun, {})
            # A layer may run several times in one region: its n-th run there repeats its n-th original run.
            nth = counts.get(self.number, 0)
            counts[self.number] = nth + 1
            keys = repeated.keys.get(self.number, [])
            if nth < len(keys):
                # What follows must find torch's generator where the first run left it.
                self._number()
                self._remember(first, keys[nth])
                return Pass(keys[nth], True, repeated, first)
        if in_backward() and (self.draws == "counter" or self.repeats_matter):
            raise RuntimeError(REENTRANT.format(site=self.site.name, method=self.repeated_methods()))
        if counted:
            key = self._count(first)
        else:
            key = 0
            self._remember(first, key)
        return Pass(key, False, first[-1] if first else None, first)

    def _count(self, first: list[Region]) -> int | Tensor:
        """Count a new pass and return the key of its draws, which depends on the run's seed and the process's rank."""
        key: int | Tensor
        if self.held is not None:
            # Transforms of functions refuse to change a tensor from outside.
            with outside_transforms():
                key = self.held.counted(self)
        elif (self.captured or capturing()) and self.draws == "counter":
            key = self._next_on_device()
        else:
            key = self.next_key()
            self._made += 1
        self._remember(first, key)
        return key

    def next_key(self, ahead: int = 0) -> int:
        """Return the key of the next pass that is counted, or of one `ahead` of it."""
        number = self._number()
        return mixed(self._mixed(), self.count() + ahead if number is None else number)

    def _number(self) -> int | None:
        """Return a number of torch's generator on the CPU if draws follow it."""
        if self.draws == "counter" or not any(method.draws() for method in self.methods):
            return None
        if capturing():
            raise RuntimeError(ON_HOST.format(site=self.site.name))
        with outside_transforms():
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_())

    def _mixed(self) -> int:
        """Return the hash of all on which a key depends but the number of the pass."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        parts = self.seed, torch.distributed.get_rank() if distributed else 0, self.site.index
        if self._prefix[0] != parts:
            self._prefix = parts, mix(mix(*parts[:2]), parts[2])
        return self._prefix[1]

    def _next_on_device(self) -> Tensor:
        if self.replays is None:
            raise RuntimeError(UNPREPARED.format(site=self.site.name))
        self.captured = True
        with outside_transforms():
            return next_key(self._mixed(), self._made, self.replays)

    def _remember(self, first: list[Region], key: int | Tensor) -> None:
        for region in first:
            region.keys.setdefault(self.number, []).append(key)

    @property
    def repeats_matter(self) -> bool:
        """Return whether a repeated pass would draw, penalise, carry values or count a second time."""
        return any(map(self._repeat_matters, self.methods))

    def repeated_methods(self) -> str:
        """Return the names of the methods for which a repeated pass matters."""
        return " + ".join(repr(m) for m in self.methods if self._repeat_matters(m)) or "a method"

    def _repeat_matters(self, method: Any) -> bool:
        # A library that repeats a pass restores torch's random state, on which dropout depends too.
        draws = method.draws() and self.draws == "counter"
        return draws or method.penalizes or method.carries or method.counts_batches()


class HeldKeys:
    """The passes of one training step in their order, and a tensor that holds the keys of their draws.

    Attributes:
        order: the counter of each pass of the step, in the order of the passes.
        table: the keys, int64 (passes,); None until `write` is called.
    """

    def __init__(self, counters: Iterable[Passes]) -> None:
        self.counters = list(counters)
        self.order: list[Passes] = []
        self.table: Tensor | None = None
        self._next: int | None = None

    @contextmanager
    def listing(self) -> Iterator[None]:
        """List the passes of the step that runs inside; their keys are numbers, as in any other step."""
        self.order, self._next = [], None
        with self._in_place():
            yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hand the keys of the table to the passes of the step that runs inside.

        Raises:
            RuntimeError: if the step has other passes than the one that was listed.
        """
        self._next = 0
        with self._in_place():
            yield
        self._check(self._next == len(self.order))

    def write(self, device: torch.device) -> None:
        """Write the keys of the next step into the table."""
        ahead: Counter[int] = Counter()
        keys = []
        for passes in self.order:
            keys.append(passes.next_key(ahead[passes.number]))
            ahead[passes.number] += 1
        written = torch.tensor(keys, dtype=torch.int64)
        if self.table is None or len(self.table) != len(keys):
            self.table = written.to(device)
        else:
            self.table.copy_(written)

    def count(self) -> None:
        """Count the passes of a step that was replayed, and so ran no Python."""
        for passes in self.order:
            passes.recount(passes.count() + 1)

    def counted(self, passes: Passes) -> int | Tensor:
        """Count a pass and return its key."""
        with without_modes():
            if self._next is None:
                key = passes.next_key()
                passes.recount(passes.count() + 1)
                self.order.append(passes)
                return key
            passes.recount(passes.count() + 1)
            assert self.table is not None
            self._check(self._next < len(self.order) and self.order[self._next] is passes)
            self._next += 1
            return self.table[self._next - 1]

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        for passes in self.counters:
            passes.held = self
        try:
            yield
        finally:
            for passes in self.counters:
                passes.held = None

    def _check(self, same: bool) -> None:
        if not same:
            raise RuntimeError(
                "a training step passed through other layers than the step before, so that it cannot be captured as a "
                "CUDA graph: use --graphs off"
            )


@torch.library.custom_op("headwise::token", mutates_args={"token"})
def compiled_token(token: Tensor) -> Tensor:
    """Return (key, again) of a pass each time a compiled graph runs; the graph itself holds no state."""
    # By number: a graph that holds the layer would keep its model alive and could not serve a copy of it.
    passes = _by_number[int(token)]
    first, repeated, _ = regions()
    if in_backward() and repeated is None:
        raise RuntimeError(COMPILED.format(site=passes.site.name, method=passes.repeated_methods()))
    if repeated is not None:
        opened = passes._open()
        return torch.tensor([int(opened.key), int(opened.again)], dtype=torch.int64)
    return torch.tensor([int(passes._count(first)), 0], dtype=torch.int64)


compiled_token.register_fake(lambda token: torch.empty(2, dtype=torch.int64))
