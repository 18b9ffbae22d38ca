"""State that the fitted layers of one model share: the seed, the current forward, the penalties not yet read.

The forward is separate for each thread that runs the model. Compiled code cannot keep it separate, because whatever a
graph writes to thread-local storage is lost at its end. It uses plain attributes instead, which eager code keeps up to
date too.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from headwise.attend.core.call import Call
from headwise.attend.core.unread_penalties import Penalties
from headwise.borders import joins_unevenly

# The padding of a forward by the tensor that separates its sequences: layers that run again in backward may belong to
# an earlier forward than the last.
paddings = WeakIdKeyDictionary()


@dataclass
class Running:
    """One forward of the whole model.

    Attributes:
        samples: batch size of the first tensor argument, or None without one.
        running: whether the forward of the whole model is running, not just that of a layer.
        carried: values of the first self attention, by stack.
        given: indices of the sites that received these values outside a forward of the whole model.
        compiled: whether compiled code began the forward.
        may_pack: whether, judging by the arguments, a row may hold several sequences.
        positions: the `position_ids` of the call; None in compiled code.
        padding: which tokens of the call are the model's padding token, bool (B, T), or None if unknown.
        packings: the packings seen in this forward, by the arguments that define them.
        endings: what ends the preparations that methods made for it.
    """

    samples: int | None = None
    running: bool = False
    carried: dict[str, Tensor] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    compiled: bool = False
    may_pack: bool = True
    positions: Tensor | None = None
    padding: Tensor | None = None
    packings: dict[Any, Any] = field(default_factory=dict)
    endings: list[Callable[[], None]] = field(default_factory=list)


class Forward:
    """The current forward of the whole model in each thread."""

    def __init__(self) -> None:
        self.latest = Running()
        self.mine = threading.local()

    def begin(
        self, samples: int | None, may_pack: bool = True, positions: Tensor | None = None, padding: Tensor | None = None
    ) -> None:
        """Begin a forward on a batch of `samples`; `may_pack` says whether a row may hold several sequences."""
        if torch.compiler.is_compiling():
            # Always the same object: a graph would guard on a new one at each call.
            latest = self.latest
            latest.samples, latest.running, latest.compiled, latest.may_pack = samples, True, True, may_pack
            latest.carried.clear()
        else:
            self.latest = self.mine.now = Running(
                samples, True, may_pack=may_pack, positions=positions, padding=padding
            )

    def end(self) -> None:
        """End the forward. The batch size stays available to layers that the backward pass recomputes."""
        now = self.now()
        now.running = False
        now.carried.clear()
        if not torch.compiler.is_compiling():
            while now.endings:
                now.endings.pop()()

    def now(self) -> Running:
        """Return the running forward, or the last one."""
        # Eager code between two graphs of one forward must read what the graph wrote.
        if torch.compiler.is_compiling() or self.latest.compiled:
            return self.latest
        return getattr(self.mine, "now", self.latest)

    # Thread-local state can be neither copied nor pickled: copies and loaded models start with a new one.
    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return Forward()

    def __reduce__(self) -> tuple[type[Forward], tuple[()]]:
        return Forward, ()


class Entered:
    """A slot that keeps one value of a site's forward for a later stage of the same forward."""

    def __init__(self) -> None:
        self.latest: Any = None
        self.mine = threading.local()

    def put(self, x: Any) -> None:
        """Keep x."""
        self.latest = x
        if not torch.compiler.is_compiling():
            self.mine.x = x

    def take(self) -> Any:
        """Return the kept value and empty the slot."""
        # Emptied so that a value left by a failed forward does not reach the next one.
        x, self.latest = self.latest, None
        if not torch.compiler.is_compiling():
            mine, self.mine.x = getattr(self.mine, "x", None), None
            # A compiled graph puts its value into the plain attribute alone.
            return x if mine is None else mine
        return x

    def look(self) -> Any:
        """Return the kept value without emptying the slot."""
        return self.latest if torch.compiler.is_compiling() else getattr(self.mine, "x", self.latest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Entered:
        return Entered()

    def __reduce__(self) -> tuple[type[Entered], tuple[()]]:
        return Entered, ()


def share(forward: Forward, call: Call) -> None:
    """Store the values of a stack's first self attention for the layers above.

    Raises:
        RuntimeError: if that layer computes attention twice in one forward.
    """
    if call.open_pass().again is True:
        return
    now = forward.now()
    if now.running and call.site.stack in now.carried:
        raise RuntimeError(
            f"{call.site.name} computes attention more than once in a forward (for each image, or for parts of its "
            "values), so the layers above it could get the values of other tokens: methods that carry values do not "
            "work on this model"
        )
    now.carried[call.site.stack] = call.v
    if not now.running:
        now.given.clear()


def first_values(forward: Forward, call: Call) -> Tensor | None:
    """Return the values (B, H, N, D) of the first self attention of the call's stack in this forward, or None there.

    Raises:
        RuntimeError: if that site did not run in this forward, or has other tokens or heads, or if no method on this
            site declares `carries`.
    """
    stack, opened = call.site.stack, call.open_pass()
    if call.layer.shares_values:
        return None
    if opened.again is True and opened.region is not None:
        for inner in opened.first_runs:
            inner.carried[stack] = opened.region.carried[stack]
        return opened.region.carried[stack]
    now = forward.now()
    values = now.carried.get(stack)
    if not now.running and not torch.compiler.is_compiling():
        # When layers are called one by one, each gets the values once: later they would belong to an earlier input.
        values = None if call.site.index in now.given else values
        now.given.add(call.site.index)
    if values is None:
        acting = call.layer.active(call.training)
        if not any(method.carries for method in acting):
            raise RuntimeError(
                f"{call.site.name}: call.first_values() is read by a method whose class does not set carries = True, "
                f"one of {' + '.join(map(repr, acting))}"
            )
        raise RuntimeError(
            f"{call.site.name} needs the values of the first self attention of {stack or 'the model'}, which did not "
            "run in this forward; call the whole model, or the layers in their order"
        )
    _check_same_tokens(call, values)
    # Detached, because a recompute must not reach into the graph of the first run.
    for region in opened.first_runs:
        region.carried[stack] = values.detach().requires_grad_(values.requires_grad)
    return values


def _check_same_tokens(call: Call, values: Tensor) -> None:
    cached = call.queries < call.keys
    same = values.shape[:2] == call.v.shape[:2] and values.shape[3] == call.v.shape[3]
    # With a cache only the new tokens matter, and sliding layers keep fewer of the old ones.
    if not same or (values.shape[2] != call.v.shape[2] and not cached):
        raise RuntimeError(
            f"{call.site.name} has values of shape {tuple(call.v.shape)} but the first self attention of its stack has "
            f"{tuple(values.shape)}: tokens cannot be carried between layers of different token counts or heads. "
            "Choose layers of one resolution with where="
        )


class SharedState:
    """The state that the fitted layers of one model share.

    Attributes:
        seed: seed of the run's random draws.
        draws: what they follow besides: "counter", the number of the pass, or "torch", its generator.
        bare: whether the layers were fitted without a handle, for a watch or to inspect an example.
        forward: the current forward of the whole model.
        penalties: the penalties of the training forwards since the loss was last read.
        fresh: whether a training forward has run since the loss was last read; set by the layers.
        differentiates: whether a training forward of the whole model with gradients is running.
        captured: whether a layer's call was captured as part of a CUDA graph since a strength last changed.
        uneven: whether the last forward ran where other processes may have no batch left, so that none is waited for.
    """

    def __init__(self, seed: int = 0, *, draws: str = "counter", bare: bool = False) -> None:
        self.seed, self.draws, self.bare = seed, draws, bare
        self.forward, self.penalties = Forward(), Penalties()
        self.fresh = self.differentiates = self.uneven = self.captured = False
        self._hooks: list[Any] = []

    def begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Begin a forward of the whole model; the first tensor among its arguments determines the batch size."""
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0]
        samples = tensors[0].size(0) if tensors else None
        packs = may_pack(model, args, kwargs)
        padding = None
        if not torch.compiler.is_compiling():
            self.uneven = joins_unevenly()
        if packs and not torch.compiler.is_compiling():
            padding = padding_of(model, args, kwargs)
            paddings.update((x, padding) for n in PACKING_ARGUMENTS if isinstance(x := kwargs.get(n), Tensor))
        self.forward.begin(samples, packs, kwargs.get("position_ids"), padding)

    def follow(self, model: nn.Module) -> None:
        """Register hooks that track the forwards of a model without a handle."""
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            # Also called for a forward that raised an exception.
            model.register_forward_hook(self._after, always_call=True),
        ]

    def unfollow(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.begin(module, args, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forward.end()


# The arguments of models that define where the sequences of a packed row begin.
PACKING_ARGUMENTS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


def may_pack(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the rows of a forward may hold several sequences.

    If a model takes `position_ids` and got none, each row holds one sequence.
    """
    if len(args) > 2 or any(kwargs.get(name) is not None for name in PACKING_ARGUMENTS):
        return True
    # torch.compile cannot trace inspect.signature.
    return not torch.compiler.is_compiling() and not _takes_positions(model.forward)


_signatures: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_positions(forward: Any) -> bool:
    """Return whether a forward takes `position_ids`; known for each function, as a signature takes 0.1 ms to make."""
    function = getattr(forward, "__func__", forward)
    if not isinstance(function, FunctionType):
        return PACKING_ARGUMENTS[0] in inspect.signature(forward).parameters
    if function not in _signatures:
        _signatures[function] = PACKING_ARGUMENTS[0] in inspect.signature(forward).parameters
    return _signatures[function]


def padding_of(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return which tokens of a forward are the model's padding token, bool (B, T), or None if unknown."""
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        return None
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(padding := getattr(part, "pad_token_id", None), int):
            return tokens == padding
    return None
