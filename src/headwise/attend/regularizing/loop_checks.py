"""Checks of a training loop: calls that it forgot, without which a method does nothing, and batches run twice.

torch calls global hooks before each step of every optimizer. One hook is registered while a counter listens: usually
during the first few steps of a training.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headwise.attend.core import Method
from headwise.attend.regularizing.handle_place import Handle
from headwise.borders import version_of
from headwise.files.user_warnings import warn

# The check runs before this optimizer step, so that a loop may make a call only every other step.
BY_STEP = 3
# Training forwards whose penalties are kept until loss() is read; views, micro batches and unrolled loops need fewer.
KEPT = 100
# Steps that are compared with step 0 to learn whether a strength changes over steps.
LATER = (1, 10, 100, 1000, 10**5, 10**9)

UNREAD = (
    "regularized.loss() was never read in the first {steps} optimizer steps, so that {methods} did nothing: add it to "
    "the loss that is differentiated, loss = loss + regularized.loss(); with transformers.Trainer pass "
    "compute_loss_func=regularized.compute_loss_func()"
)
UNSTEPPED = (
    "regularized.after_step() was not called in the first {steps} optimizer steps, so that {methods} did not act "
    "or change: call it after each optimizer.step(); with transformers.Trainer pass callbacks=[regularized.callback()]"
)
UNTRAINED = (
    "the parameters of {methods} are in no optimizer and are never trained ({names}): make the optimizer after "
    "regularize(), or call optimizer.add_param_group({{'params': regularized.parameters(), 'weight_decay': 0.0}}); to "
    "keep them fixed, set requires_grad to False"
)
UNREACHED = (
    "no training forward reached the layers of {methods}: train the model that was regularized, in training mode"
)
UNEVEN = (
    "{method!r} needs numbers of all processes after each step, and in join() some have no batch left: leave join() "
    "out and give every process as many batches, with DistributedSampler(drop_last=True)"
)
DROPPED = (
    "the penalties of {count} training forwards were never read and are dropped ({methods}): call regularized.loss() "
    "in each step, and run forwards that train nothing in eval mode or under torch.no_grad()"
)
# Chunks of one step that are remembered: large batches are run in some hundreds.
CHUNKS = 2048

REPLAYED = (
    "a batch ran without gradients and again with them, from the same state of torch's generators, as GradCache and "
    "the cached losses of sentence-transformers do: {methods} drew other numbers the second time, so that gradients "
    "are wrong. Pass draws='torch' to regularize(). If the two runs need not be alike, run the first in eval mode"
)
# After this many steps of other models' optimizers, counting stops for a model that was never trained (an average).
FOREIGN = 100

_listening: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()
_hooks: list[Any] = []


class OptimizerSteps:
    """A counter of the steps that optimizers begin on a model's parameters.

    `begins` is called before each step with its number, counted from 1 for each optimizer, and the optimizer.
    """

    def __init__(self, model: nn.Module, begins: Callable[[int, Optimizer], None]) -> None:
        self.model, self.begins = model, begins
        self.foreign = 0
        self.counts: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def listen(self) -> None:
        """Start counting from 0."""
        self.counts.clear()
        self.foreign = 0
        _listening.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def stop(self) -> None:
        """Stop counting; the last counter to stop removes the hook."""
        _listening.discard(self)
        _unhook_if_alone()

    def before(self, optimizer: Optimizer) -> None:
        """Count a step that is about to be taken."""
        own = {id(parameter) for parameter in self.model.parameters()}
        if own.isdisjoint(held_by(optimizer)):
            self.foreign += 1
            if self.foreign >= FOREIGN and not self.counts:
                self.stop()
            return
        self.counts[optimizer] = self.counts.get(optimizer, 0) + 1
        self.begins(self.counts[optimizer], optimizer)

    def __getstate__(self) -> dict[str, Any]:
        # A model that is pickled does not carry its optimizers.
        return {"model": self.model, "begins": self.begins, "listens": self in _listening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Weak references cannot be pickled: counting starts again.
        self.__init__(state["model"], state["begins"])  # type: ignore[misc]  # the direct call is intended
        if state["listens"]:
            self.listen()


def held_by(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def held_by_any() -> set[int]:
    """Return the ids of the parameters that the optimizers of this process hold; slow, as it walks all objects."""
    # issubclass of the type, because isinstance would load lazy objects.
    optimizers = [value for value in gc.get_objects() if issubclass(type(value), Optimizer)]
    return set().union(*(held_by(optimizer) for optimizer in optimizers if hasattr(optimizer, "param_groups")))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A compiled step is traced once and cannot count.
    if torch.compiler.is_compiling():
        return
    for counter in list(_listening):
        counter.before(optimizer)
    _unhook_if_alone()


def _unhook_if_alone() -> None:
    if not _listening:
        while _hooks:
            _hooks.pop().remove()


class Forgotten:
    """A check, before the third optimizer step, that the training loop makes the calls its methods need.

    Optimizer steps distinguish training from everything else that runs a model forward: accumulated micro batches,
    several forwards for one loss, evaluation, recomputation.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.read = self.stepped = False
        self.unread = 0
        self.steps = OptimizerSteps(handle.model, self.check)
        self.listen()

    def listen(self) -> None:
        """Watch the first optimizer steps from now on, if the methods need any call."""
        if self._penalizing() or self._stepping() or self.handle.brought:
            self.steps.listen()

    def listen_again(self) -> None:
        """Watch the next steps if after_step() was never called: a strength that was just set may need it."""
        if not self.stepped:
            self.listen()

    def stop(self) -> None:
        """Stop watching optimizer steps."""
        self.steps.stop()

    def check(self, number: int, optimizer: Optimizer) -> None:
        """Raise RuntimeError with every forgotten call, before an optimizer's step with this number.

        Nothing is checked while no forward reached the methods' layers in training mode.
        """
        if number < BY_STEP or not (self.handle.seen_training or any(f.reached for f in self.handle.fitted)):
            return
        problems = self._uncalled()
        if untrained := self._untrained():
            more = f" and {len(untrained) - 1} more" if len(untrained) > 1 else ""
            learners = _joined(m for m in self.handle.methods if m.has_parameters())
            problems.append(UNTRAINED.format(methods=learners, names=untrained[0] + more))
        if problems:
            raise RuntimeError("\n".join(problems))
        self.stop()

    def idle(self, *, reached: bool) -> str:
        """Return a message about methods that did nothing after any number of steps; empty if all acted.

        Args:
            reached: whether forwards are known to reach every layer.
        """
        acted = [m for f in self.handle.fitted if f.reached for m in f.methods]
        never = [m for m in self.handle.methods if not reached and not any(m is other for other in acted)]
        if never:
            return UNREACHED.format(methods=_joined(never))
        return "; ".join(self._uncalled())

    def _uncalled(self) -> list[str]:
        problems = []
        if not self.read and (names := self._penalizing()):
            problems.append(UNREAD.format(steps=BY_STEP - 1, methods=names))
        if not self.stepped and (names := self._stepping()):
            problems.append(UNSTEPPED.format(steps=BY_STEP - 1, methods=names))
        return problems

    def forward(self) -> None:
        """Count a training forward, and drop penalties that were never read."""
        self.unread += 1
        if self.unread > KEPT and self.handle.drop_penalties():
            warn(DROPPED.format(count=self.unread - 1, methods=self._penalizing()))
            self.unread = 1

    def _penalizing(self) -> str:
        return _joined(m for m in self.handle.methods if m.penalizes or m.overrides("penalty"))

    def _stepping(self) -> str:
        return _joined(m for m in self.handle.methods if m.overrides("after_step") or self._changes(m))

    def _changes(self, method: Method) -> bool:
        """Return whether a strength of a method changes over steps, by its own schedule or by one from `set()`."""
        at = self.handle.strength_at
        sites = [f.site for f in self.handle.fitted if any(m is method for m in f.methods)]
        return any(at(method, n, step, s) != at(method, n, 0, s) for s in sites for n in method.live for step in LATER)

    def _untrained(self) -> list[str]:
        """Return the names of learned parameters that no optimizer holds although one trains their layers' weights."""
        parameters = dict(self.handle.model.named_parameters())
        added = [n for n in self.handle.brought if n in parameters and parameters[n].requires_grad]
        counted = set().union(*map(held_by, self.steps.counts))
        if all(id(parameters[n]) in counted for n in added):
            return []
        trained = counted | held_by_any()
        return [
            n
            for n in added
            if id(parameters[n]) not in trained and _trains_beside(n, parameters, trained, self.handle.brought)
        ]


def _trains_beside(name: str, parameters: dict[str, nn.Parameter], trained: set[int], brought: list[str]) -> bool:
    """Return whether an optimizer trains the layer of a learned parameter; a frozen layer may stay frozen."""
    layer = name.split(".headwise.")[0].split(".parametrizations.")[0]
    return any(n.startswith(f"{layer}.") and n not in brought and id(p) in trained for n, p in parameters.items())


def _joined(methods: Iterable[Method]) -> str:
    return " and ".join(map(repr, methods))


def refuse_uneven(methods: Sequence[Method]) -> None:
    """Raise RuntimeError if a method exchanges numbers with processes that may have no batch left."""
    if method := next((m for m in methods if m.overrides("exchange")), None):
        raise RuntimeError(UNEVEN.format(method=method))


class Replayed:
    """Warns once if a forward with gradients repeats a training forward without: its draws would differ.

    A generator never returns to a state by itself, so a return to that of an earlier forward is a replay. Where nothing
    has moved the generators, the same arguments in the same memory are one.
    """

    def __init__(self, methods: Sequence[Method], *, followed: bool) -> None:
        self.drawing = [method for method in methods if method.draws()]
        self.done = followed or not self.drawing
        self.seen: deque[tuple[int, list[Any]]] = deque(maxlen=CHUNKS)
        self.last: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replayed:
        twin = object.__new__(Replayed)
        twin.drawing, twin.done, twin.seen, twin.last = self.drawing, self.done, deque(maxlen=CHUNKS), None
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {"drawing": self.drawing, "done": self.done, "seen": deque(maxlen=CHUNKS), "last": None}

    def before(self, arguments: Iterable[Any], *, differentiates: bool) -> None:
        """Notice that a training forward with these arguments begins."""
        if self.done or (differentiates and not self.seen):
            return
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        state, inputs = _state(), [_identity(x) for x in tensors]
        if not differentiates:
            self.seen.append((state, inputs))
        elif any(state == earlier and (state != self.last or _same(inputs, of)) for earlier, of in self.seen):
            self.done = True
            self.seen.clear()
            warn(REPLAYED.format(methods=" + ".join(map(repr, self.drawing))))
        self.last = state

    def after(self) -> None:
        """Notice that a training forward without gradients ends."""
        if not self.done:
            self.last = _state()

    def stepped(self) -> None:
        """Forget the forwards before an optimizer step."""
        self.seen.clear()


def _state() -> int:
    """Return a hash of the states of torch's generators on the CPU and on the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return hash(tuple(ctypes.string_at(state.data_ptr(), state.numel()) for state in states))


def _identity(x: Tensor) -> tuple[Any, ...] | None:
    """Return what two tensors with the same numbers in the same memory have in common, or None if unknown."""
    try:
        return StorageWeakRef(x.untyped_storage()), version_of(x), x.storage_offset(), x.shape, x.stride()
    except (RuntimeError, NotImplementedError):
        return None


def _same(inputs: list[Any], earlier: list[Any]) -> bool:
    known = inputs and None not in inputs
    return bool(known and inputs == earlier and not any(identity[0].expired() for identity in earlier))
