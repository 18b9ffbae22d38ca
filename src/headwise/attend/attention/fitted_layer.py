"""The fitted layer: routes the calls of one attention layer through its methods, and shows them to a watch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.attend.attention.computation import attention
from headwise.attend.attention.matrix import edited_logits
from headwise.attend.attention.seen_in_calls import check_heads, learn_causal, leaves_time_first, order_of, shapes_seen
from headwise.attend.core import Call, Method, MethodState, Packed, SharedState, Site, shared_state
from headwise.attend.core.acting import Acting
from headwise.attend.core.call import KernelsRan
from headwise.attend.core.passes import Pass, Passes
from headwise.attend.core.random_draws import mix
from headwise.attend.core.shared_state import Entered, Running
from headwise.attend.projections.sharded import CONTEXT_PARALLEL
from headwise.borders import tokens_split
from headwise.numerics.kernels import capturing, note_into

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]

# The stages at the layer's input and output, whose hooks stay when a method does not act.
LAYER_STAGES = ("hidden", "branch")

# Weak, so that unused layers are freed.
_layers: weakref.WeakValueDictionary[int, FittedLayer] = weakref.WeakValueDictionary()


class Adapter(Protocol):
    """A host's redirection of one layer's attention. `attach` must not fail half-way; `detach` must leave no trace."""

    def attach(self, fitted: FittedLayer) -> None:
        """Route the layer's calls through `fitted`."""

    def detach(self) -> None:
        """Restore the original layer."""


class FittedLayer:
    """One attention layer with the methods that act on it, or with none for a watch.

    Hosts call `enter`, `attention` and `leave`.

    Attributes:
        site: the attention layer.
        methods: the methods in order of action.
        states: the state of each method on the layer.
        shared: the state shared with the other fitted layers of the model.
        adapter: the host's redirection of the layer's attention; None for calls without a host.
        passes: the counter of the passes through the layer.
        shares_values: whether the layers above use this layer's values.
        reached: whether a training forward with gradients ran here since the last optimizer step.
        without_gradients: whether one ran here without gradients, inside a forward of the model with gradients.
        alive: whether the layer is still attached.
        samples: number of samples of the current call, where rows are windows.
        seen: fields of the site observed in calls: heads, sizes, whether it pools.
        armed: whether `observer` sees the next calls.
        ran: the kernels that computed its calls.
        observer: a function of each call and its output, or None.
        gate: a function of the heads' output (B, H, T, Dv) before the output projection, or None.
        entered: the layer's input in the current pass.
        called: sizes and mask of the current pass's attention call, for `leave`.
        later: whether the branch stages of the current pass wait for the dropout or norm before the residual; None for
            hosts that never do.
        packing: the packing of the current pass, or None where each row holds one sequence.
        real: which tokens of the current pass are real (B, T), or None where this is unknown.
    """

    def __init__(self, site: Site, methods: list[Method], shared: SharedState, adapter: Adapter | None = None) -> None:
        self.site, self.methods, self.shared, self.adapter = site, methods, shared, adapter
        self.states = _states(site, methods, shared.seed)
        self._sort()
        self.passes = Passes(site, methods, shared.seed, shared.draws)
        self.shares_values = self.reached = self.without_gradients = self.armed = False
        self.alive = True
        self.samples: int | None = None
        self.seen: dict[str, Any] = {}
        self.ran = KernelsRan()
        self.observer: Callable[[Call, Tensor], None] | None = None
        self.gate: Callable[[Tensor], Tensor] | None = None
        self.entered, self.called = Entered(), Entered()
        self.later: Entered | None = None
        # Whether a call had no queries or no keys; a watch clears it.
        self.had_nothing = False
        self.packing, self.real = Entered(), Entered()
        _layers[self.passes.number] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> FittedLayer:
        twin = object.__new__(FittedLayer)
        memo[id(self)] = twin
        # Methods are frozen and compared by identity: the copy has its own list of the same methods.
        twin.methods = memo[id(self.methods)] = list(self.methods)
        for name, value in self.__dict__.items():
            # A watch observes its own model, not copies of it.
            if name not in ("methods", "observer", "armed", "_acting"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin.observer, twin.armed = None, False
        twin._sort()
        _layers[twin.passes.number] = twin
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _layers[self.passes.number] = self

    @staticmethod
    def live() -> list[FittedLayer]:
        """Return the fitted layers that are still in use."""
        # A list of references, because another thread may fit a layer meanwhile.
        layers = (reference() for reference in _layers.valuerefs())
        return [layer for layer in layers if layer is not None and layer.alive]

    @staticmethod
    def bare_in(model: nn.Module) -> dict[nn.Module, FittedLayer]:
        """Return the fitted layers of a model that have no handle, by their module."""
        modules = set(model.modules())
        # A copy that failed half-way leaves layers without a module until they are garbage-collected.
        bare = [layer for layer in FittedLayer.live() if "module" in vars(layer.site) and layer.shared.bare]
        return {layer.site.module: layer for layer in bare if layer.site.module in modules}

    def attach(self) -> None:
        """Redirect the layer's attention to this object."""
        assert self.adapter is not None
        self.adapter.attach(self)

    def detach(self) -> None:
        """Restore the original layer; its methods must have been dropped before."""
        self.observer, self.gate, self.armed, self.alive = None, None, False, False
        if self.adapter is not None:
            self.adapter.detach()
        if self.shared.bare:
            self.shared.unfollow()

    def drop(self, method: Method, fold: bool) -> None:
        """Remove one method: with `fold` write its effect into the plain weights if it can, else undo it."""
        index = self._index(method)
        state = self.states[index]
        if fold and method.overrides("fold"):
            method.fold(self.site, state)
        elif method.overrides("unbuild"):
            method.unbuild(self.site, state)
        state.clear()
        del self.methods[index], self.states[index]
        self._sort()

    def _sort(self) -> None:
        """Sort the methods by their stages; the settings on which it depends never change."""
        self._acting = tuple(Acting([m for m in self.methods if m.acts_in(training)]) for training in (False, True))
        self._stages = frozenset(stage for m in self.methods for stage in LAYER_STAGES if m.overrides(stage))
        self._own_tokens = any(m.reads_own_tokens() for m in self.methods)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        original: Callable[[], tuple[Tensor, Tensor | None]],
        *,
        training: bool,
        kernel: Kernel | None = None,
        packed: Packed | None = None,
        need_weights: bool = False,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and weights of the host's attention call, through the methods that act now.

        Args:
            q, k, v: (B, H, T, D), (B, Hk, N, D), (B, Hk, N, Dv); Hk divides H.
            original: the host's own computation, run if no method acts: the same bits as without headwise.
            training: the site's mode.
            kernel: the host's own kernel as a function of q, k and v, if it is kept and methods act around it.
            packed: the packing of the rows of q, k and v; `settings` are then those of the unpacked samples.
            need_weights: whether the host needs the weights (B, H, T, N) too.
            settings: mask, causal, scale, dropout, softcap, sinks, samples: the fields of `Call`.
        """
        # Always emptied, so that a later call does not use this call's input.
        hidden = self.entered.take()
        self._record_forward(training)
        if q.numel() == 0 or k.numel() == 0:
            return self._of_nothing(q, v, original, training)
        self._learn(q, k, v, hidden, packed, settings)
        acting = self._acting_now(training)
        edited = bool(acting.in_call) or self.gate is not None
        if not edited and not self.shares_values and not self.armed:
            return original()
        call = self._call(q, k, v, hidden, kernel, packed, training, settings)
        if self.shares_values:
            shared_state.share(self.shared.forward, call)
        # What methods and watches see is unpacked; what the host gave and gets back is packed.
        out, weights = attention(call, acting, need_weights=need_weights) if edited else original()
        if edited:
            out = out if self.gate is None else self.gate(out)
            if call.penalties or call.norms:
                out = self.shared.penalties.record(call, out)
        if self.armed and self.observer is not None:
            self.observer(call, out if edited or packed is None else packed.unpack_heads(out))
        if packed is None or not edited:
            return out, weights
        return packed.pack_heads(out), None if weights is None else packed.pack_matrix(weights)

    def _learn(
        self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, packed: Packed | None, settings: dict[str, Any]
    ) -> None:
        """Keep what only a call shows, for the site, for a captured step and for `leave`; refuse what does not fit."""
        if not torch.compiler.is_compiling():
            note_into(self.ran.around)
            if not self.seen:
                self.seen = shapes_seen(self.site, q, k, v, hidden)
            if q.is_cuda:
                self._before_capture(q.device)
        if q.shape[1] != self.site.heads:
            check_heads(self.site, self.methods, q, self.shared.bare, self.armed)
        if self.needs("branch"):
            mask = settings.get("mask"), bool(settings.get("causal")), bool(settings.get("cross"))
            sizes = (q.shape[2], k.shape[2]) if packed is None else (packed.longest, packed.longest)
            self.called.put((*(order_of(q) if packed is None else (0, False)), *sizes, *mask))
        if settings.get("causal") and self.site.causal is None:
            learn_causal(self.site, self.methods)

    def _acting_now(self, training: bool) -> Acting:
        """Return the methods that act in this mode, without those whose strength has faded to 0."""
        acting = self._acting[training]
        # Compiled graphs cannot read the value of a strength.
        if not acting.fading or torch.compiler.is_compiling():
            return acting
        faded = [m for m in acting.fading if float(self.state_of(m).value("strength")) == 0.0]
        return acting.without(faded) if faded else acting

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        kernel: Kernel | None,
        packed: Packed | None,
        training: bool,
        settings: dict[str, Any],
    ) -> Call:
        """Return the call that methods and watches see: of whole samples, with keys and values for each query head."""
        if packed is not None:
            q, k, v = packed.unpack_heads(q), packed.unpack_heads(k), packed.unpack_heads(v)
        own = k, v
        # Hosts with grouped queries share keys between heads; methods see one key per query head.
        if k.shape[1] != q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if not torch.compiler.is_compiling() and tokens_split(q):
            names = " + ".join(map(repr, self._acting[training].in_call)) or "a watch"
            raise RuntimeError(f"{self.site.name} cannot be reached by {names}: {CONTEXT_PARALLEL}")
        if kernel is not None:
            kernel = _on_samples(kernel, packed, own, (k, v))
        tokens = None if hidden is None else self._real(hidden, packed)
        return Call(
            self, q, k, v, training=training, hidden=hidden, kernel=kernel, packed=packed, tokens=tokens, **settings
        )

    def _of_nothing(
        self, q: Tensor, v: Tensor, original: Callable[[], tuple[Tensor, Tensor | None]], training: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the host's result for a call without queries or keys, which no method changes and no watch reads."""
        self.had_nothing = True
        out, weights = original()
        penalizing = [m for m in self._acting[training].in_call if m.penalizes]
        if penalizing and torch.is_grad_enabled():
            # All processes add as many penalties, or their sums would not fit: a single token tells how many.
            token = q.new_zeros(1, q.shape[1], 1, q.shape[3])
            call = Call(self, token, token, v.new_zeros(1, q.shape[1], 1, v.shape[3]), training=training)
            with torch.no_grad():
                attention(call, Acting(penalizing))
            call.penalties = [(torch.zeros_like(total), torch.zeros_like(count)) for total, count in call.penalties]
            call.norms = [(torch.zeros_like(s), torch.zeros_like(n), strength) for s, n, strength in call.norms]
            out = self.shared.penalties.record(call, out)
        return self._joined(out), weights

    def _joined(self, out: Tensor) -> Tensor:
        """Return `out`, whose graph now holds all that the methods learn here, with gradients of 0.

        Data parallelism waits for the gradient of every parameter.
        """
        if torch.is_grad_enabled():
            for state in self.states:
                for parameter in state.parameters():
                    out = out + parameter.flatten()[:0].sum().to(out.dtype)
        return out

    def _before_capture(self, device: torch.device) -> None:
        """Keep on the device what a captured step counts there, and record that one is captured."""
        if self.passes.replays is None:
            self.passes.prepare(device)
        # The steps of a study are captured again when a strength changes.
        if self.passes.held is None and capturing():
            self.shared.captured = True

    def untouched(self, training: bool) -> bool:
        """Return whether no method or watch uses this call, so that the host's own kernel runs."""
        # Not `not (methods or ...)`: dynamo does not trace the negation of a tuple.
        used = bool(self._acting[training].in_call) or self.armed or self.shares_values or self.needs("branch")
        return not (used or self.gate is not None)

    def idle(self, training: bool) -> bool:
        """Return whether no method or watch uses this site's next call, so that the host's own code may run alone."""
        if (
            self.shares_values
            or self.armed
            or self.gate is not None
            or (self.methods and (self.site.causal is None or not self.seen))
        ):
            return False
        if self._acting[training].in_call or self._stages:
            return False
        self._record_forward(training)
        return True

    def _record_forward(self, training: bool) -> None:
        """Record that a training forward ran here, with or without gradients."""
        if training and torch.is_grad_enabled():
            self.reached = True
            self.shared.fresh = True
        elif training and self.shared.differentiates:
            self.without_gradients = True

    def enter(self, x: Tensor) -> Tensor:
        """Return the layer's input (B, T, C) after the `hidden` stages."""
        if x.numel() == 0:
            self.entered.put(None if self.site.joint else x)
            return x
        training = self.site.module.training
        packed: Packed | None = self.packing.look()
        packed = packed if packed is not None and packed.holds(x) else None
        rows, samples = x, x if packed is None else packed.unpack(x)
        x = samples
        if editing := self._acting[training].hidden:
            if not torch.compiler.is_compiling():
                note_into(self.ran.around)
            # There are no queries and keys yet: a placeholder provides the batch size, device and dtype.
            token = x.new_empty(x.shape[0], 1, 1, 1)
            call = Call(
                self,
                token,
                token,
                token,
                scale=1.0,
                training=training,
                hidden=x,
                samples=self.samples,
                packed=packed,
                tokens=self._real(x, packed),
            )
            for method in editing:
                x = method.hidden(x, call)
        # In a joint layer, x is only one of the two kinds of tokens.
        self.entered.put(None if self.site.joint else x)
        if packed is None:
            return x
        return rows if x is samples else packed.pack(x)

    def _real(self, x: Tensor, packed: Packed | None) -> Tensor | None:
        """Return which of the tokens x (B, T, C) are real, or None if unknown."""
        real: Tensor | None = self.real.look() if packed is None else packed.real
        return real if real is not None and real.shape == x.shape[:2] else None

    def leave(self, y: Tensor) -> Tensor:
        """Return the layer's output (B, T, C), before the residual, after the `branch` stages."""
        if y.numel() == 0:
            self.called.take()
            return self._joined(y)
        training = self.site.module.training
        packed: Packed | None = self.packing.look()
        packed = packed if packed is not None and packed.holds(y) else None
        given, samples = y, y if packed is None else packed.unpack(y)
        y = samples
        if editing := self._acting[training].branch:
            rows, queries = y.shape[:2]
            of_call: tuple[Any, ...] = self.called.take() or (rows, False, queries, queries, None, False, False)
            rows, farther, *called = of_call
            turned = packed is None and leaves_time_first(self.site, y, rows, farther, called[0])
            y = y.transpose(0, 1) if turned else y
            call = self._branch_call(y, training, *called)
            for method in editing:
                y = method.branch(y, call)
            y = y.transpose(0, 1) if turned else y
        if packed is None:
            return y
        return given if y is samples else packed.pack(y)

    def _branch_call(
        self, y: Tensor, training: bool, queries: int, keys: int, mask: Tensor | None, causal: bool, cross: bool
    ) -> Call:
        """Return a call with one head and the mask of the attention call that produced y (B, T, C)."""
        if self.site.pooled or queries > keys:
            # The keys are not the tokens of the output.
            keys, mask, causal = queries, None, False
        if mask is not None and mask.dim() == 4:
            # A token is real if it is real for any head.
            mask = mask.any(1, keepdim=True) if mask.dtype == torch.bool else mask.detach().amax(1, keepdim=True)
        q, k = (y.new_empty(y.shape[0], 1, length, 1) for length in (queries, keys))
        return Call(
            self, q, k, k, scale=1.0, mask=mask, causal=causal, training=training, samples=self.samples, cross=cross
        )

    def samples_in(self, batch: int) -> int | None:
        """Return the number of samples in a call of `batch` rows if the rows are windows, or None."""
        if not self.site.windowed or batch == 0:
            return None
        samples = self.running().samples
        if samples is not None and batch % samples == 0:
            return samples
        if self.shared.bare:
            return None
        raise RuntimeError(
            f"{self.site.name} attends in windows and its call has {batch} rows, which cannot be divided among the "
            f"{samples} samples of the batch; call the whole model, not a part of it, or leave the site out with where="
        )

    def running(self) -> Running:
        """Return the running forward of the whole model, or the last one."""
        return self.shared.forward.now()

    @property
    def kernels(self) -> set[str]:
        """Return the names of the kernels that have run so far."""
        return set(self.ran.names())

    def active(self, training: bool) -> Sequence[Method]:
        """Return the methods that act in this mode, in order."""
        return self._acting[training].methods

    def computed(self, call: Call, *, form: str, need_weights: bool, whole: int | None) -> tuple[Tensor, Tensor | None]:
        """Return the result of a call through the methods that act in its mode, in one of their forms."""
        return attention(call, self._acting[call.training], form=form, need_weights=need_weights, whole=whole)

    @staticmethod
    def logits(call: Call, methods: Sequence[Method]) -> Tensor:
        """Return the logits (B, H, T, N) of a call after the edits of these methods."""
        return edited_logits(call, methods, call.q, call.k)

    def needs(self, stage: str) -> bool:
        """Return whether any method of the layer defines the stage, `hidden` or `branch`."""
        return stage in self._stages

    def needs_own_tokens(self) -> bool:
        """Return whether a method of this layer, or one that uses its values, `reads_own_tokens`."""
        return not self.site.is_cross and (self.shares_values or self._own_tokens)

    def _index(self, method: object) -> int:
        for index, known in enumerate(self.methods):
            if known is method:
                return index
        raise KeyError(f"{method!r} does not act on {self.site.name}")

    def state_of(self, method: object) -> MethodState:
        """Return the method's state on the layer."""
        return self.states[self._index(method)]

    def open_pass(self, counted: bool = True) -> Pass:
        """Return a new pass through the layer, or the pass that this one repeats."""
        return self.passes.open(counted)

    def first_values(self, call: Call) -> Tensor | None:
        """Return the values of the stack's first self attention, or None on that layer itself."""
        return shared_state.first_values(self.shared.forward, call)


def _on_samples(
    kernel: Kernel, packed: Packed | None, own: tuple[Tensor, Tensor], repeated: tuple[Tensor, Tensor]
) -> Kernel:
    """Return the host's kernel as a function of unpacked samples with repeated keys and values.

    It packs them again, and passes the grouped keys and values `own` if no method replaced the `repeated` ones.
    """

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if k is repeated[0] and v is repeated[1]:
            k, v = own
        if packed is None:
            return kernel(q, k, v)
        rows = (packed.pack_heads(x) for x in (q, k, v))
        return packed.unpack_heads(kernel(*rows))

    return run


def _states(site: Site, methods: list[Method], seed: int) -> list[MethodState]:
    """Return the state of each method on a layer; the second of two methods with the same name gets a number."""
    states: list[MethodState] = []
    for index, method in enumerate(methods):
        name = type(method).__name__
        before = sum(type(m).__name__ == name for m in methods[:index])
        strengths = {n: torch.tensor(method.at(n, 0, site), dtype=torch.float32) for n in method.live}
        # By name, not by index, so that a method's draws do not depend on the other methods.
        salt = mix(name, before) >> 1
        states.append(MethodState(site.module, f"{name}_{before + 1}" if before else name, seed, salt, strengths))
    return states
