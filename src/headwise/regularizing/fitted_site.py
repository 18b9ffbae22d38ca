"""Fitted: the methods that stand on one site, with their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.attention.computation import attention
from headwise.core import live_sites
from headwise.core.call import Call
from headwise.core.forward import Entered, Running
from headwise.core.method import Method, touches_call
from headwise.core.method_state import MethodState
from headwise.core.random_draws import mix
from headwise.core.recompute import Pass
from headwise.core.site import Site
from headwise.projections.sharded import CONTEXT_PARALLEL, heads_split, tokens_split
from headwise.regularizing import pass_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from headwise.regularizing.handle import Regularized


class Fitted:
    """One site with the methods that act there. Hosts call its `hidden`, `attention` and `branch`."""

    def __init__(self, site: Site, methods: list[Method], owner: Regularized) -> None:
        self.site = site
        self.methods = methods
        self._owner = owner
        names = [type(method).__name__ for method in methods]
        self.states = [
            MethodState(site.module, name if names[:i].count(name) == 0 else f"{name}_{names[:i].count(name) + 1}")
            for i, name in enumerate(names)
        ]
        # 0-d tensors: a changed strength is a changed value, never a changed graph.
        self.values = [{n: torch.tensor(m.at(n, 0, site), dtype=torch.float32) for n in m.live} for m in methods]
        for state, values in zip(self.states, self.values, strict=True):
            state.follow(values)
        self.salts = [mix(name, i) >> 1 for i, name in enumerate(names)]
        self.counter = torch.zeros((), dtype=torch.int64)
        self.number = live_sites.enroll(self)
        self.shares_values = False
        self.reached = False
        self.without_gradients = False
        self.alive = True
        self.samples: int | None = None
        self.seen: dict[str, Any] = {}
        self.armed = False
        self.observer: Callable[[Call, Tensor], None] | None = None
        self.entered, self.called = Entered(), Entered()
        # Says of a pass that its branch waits for the dropout before the residual; None where a host needs no such word.
        self.later: Entered | None = None
        self.detach_hooks: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Fitted:
        from copy import deepcopy

        twin = object.__new__(Fitted)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            # Methods are frozen and serve as keys: the copy shares them.
            if name == "methods":
                twin.methods = list(value)
            elif name == "observer":
                twin.observer = None
            elif name != "number":
                setattr(twin, name, deepcopy(value, memo))
        twin.armed = False
        twin.number = live_sites.enroll(twin)
        return twin

    @property
    def owner(self) -> Regularized:
        """Give the handle this site belongs to."""
        return self._owner

    def ran(self, kernel: str) -> None:
        """Take note of which kernel ran; an attribute that is never read compiles without a guard, a set does not."""
        setattr(self, f"ran {kernel}", True)

    @property
    def kernels(self) -> set[str]:
        """Give the kernels that ran so far."""
        return {name[4:] for name in self.__dict__ if name.startswith("ran ")}

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        original: Callable[[], tuple[Tensor, Tensor | None]],
        *,
        training: bool,
        need_weights: bool = False,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the host's attention call through the methods that act now.

        Args:
            q, k, v: (B, H, T, D), (B, Hk, N, D), (B, Hk, N, Dv); Hk divides H.
            original: the host's own computation, run where nothing acts: the same bits as without headwise.
            training: the site's mode.
            need_weights: whether the host wants the weights (B, H, T, N) too.
            settings: mask, causal, scale, dropout, softcap, sinks, samples: the fields of `Call`.
        """
        hidden = self.entered.take()
        self._note(training)
        self._check(q, k, hidden)
        if self.needs("branch"):
            self.called.put((q.shape[2], k.shape[2], settings.get("mask"), bool(settings.get("causal"))))
        if settings.get("causal") and self.site.causal is None:
            self._learn_causal()
        active = [m for m in self.active(training) if touches_call(m) and not self._adds_nothing(m)]
        if not active and not self.shares_values and not self.armed:
            return original()
        if k.shape[1] != q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if not torch.compiler.is_compiling() and tokens_split(q):
            acting = " + ".join(map(repr, active)) or "a watch"
            raise RuntimeError(f"{self.site.name} cannot be reached by {acting}: {CONTEXT_PARALLEL}")
        call = Call(self, q, k, v, training=training, hidden=hidden, **settings)
        if self.shares_values:
            self._owner.share_values(call)
        if active:
            out, weights = attention(call, active, need_weights=need_weights)
            if call.penalties or call.norms:
                self._owner.record(call)
        else:
            out, weights = original()
        if self.armed and self.observer is not None:
            self.observer(call, out)
        return out, weights

    def idle(self, training: bool) -> bool:
        """Tell whether nothing acts on, reads or carries this site's call now, so that the host's own code may run alone."""
        if self.shares_values or self.armed or (self.methods and (self.site.causal is None or not self.seen)):
            return False
        if any(touches_call(m) for m in self.active(training)) or self.needs("branch") or self.needs("hidden"):
            return False
        self._note(training)
        return True

    def _note(self, training: bool) -> None:
        """Take note that a training forward came here, and whether it is differentiated."""
        if training and torch.is_grad_enabled():
            self.reached = True
            self._owner.fresh = True
        elif training and self._owner.differentiates:
            self.without_gradients = True

    def _adds_nothing(self, method: Method) -> bool:
        """Tell whether a penalty's strength is 0 now: then the host's own computation stands, bit for bit.

        A compiled graph holds no value of a strength, so it reads the penalty all the same.
        """
        if torch.compiler.is_compiling() or not method.penalizes or method.neutral != {"strength": 0.0}:
            return False
        return float(self.values[self.index(method)]["strength"]) == 0.0

    def _learn_causal(self) -> None:
        """Take note that a layer whose host did not say so is causal; some methods have no meaning there."""
        self.site.causal = True
        for method in self.methods:
            reason = method.refuse(self.site)
            if reason is not None:
                self.site.causal = None
                raise RuntimeError(
                    f"{self.site.name} turned out to be causal: {method!r} {reason}; leave it out with where="
                )

    def _check(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> None:
        site = self.site
        if not torch.compiler.is_compiling() and not self.seen:
            self.seen = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3]}
            if q.shape[2] != k.shape[2] and not site.is_cross:
                self.seen["pooled"] = True
            if hidden is not None:
                self.seen["hidden"] = hidden.shape[-1]
        if site.heads is not None and q.shape[1] != site.heads:
            if reason := heads_split(site.module, site.model):
                raise RuntimeError(f"{site.name} is called with {q.shape[1]} of its {site.heads} heads: {reason}")
            raise RuntimeError(
                f"{site.name} was taken to have {site.heads} heads, but its attention was called with q of shape "
                f"{tuple(q.shape)}; pass example=batch to regularize() so that the heads are read off a real call"
            )

    def enter(self, x: Tensor) -> Tensor:
        """Take what enters the layer (B, T, C) through the `hidden` stages."""
        training = self.site.module.training
        call: Call | None = None
        for method in self.active(training):
            if method.overrides("hidden"):
                if call is None:
                    token = x.new_empty(x.shape[0], 1, 1, 1)
                    call = Call(self, token, token, token, scale=1.0, training=training, hidden=x, samples=self.samples)
                x = method.hidden(x, call)
        self.entered.put(x)
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Take what leaves the layer (B, T, C), before the residual, through the `branch` stages."""
        training = self.site.module.training
        call: Call | None = None
        for method in self.active(training):
            if method.overrides("branch"):
                call = self._as_called(y, training) if call is None else call
                y = method.branch(y, call)
        return y

    def _as_called(self, y: Tensor, training: bool) -> Call:
        """Give a call of one head with the mask of the attention call whose result y (B, T, C) is."""
        queries, keys, mask, causal = self.called.take() or (y.shape[1], y.shape[1], None, False)
        if self.site.pooled or queries > keys:
            # The keys are other tokens than those that leave.
            keys, mask, causal = queries, None, False
        if mask is not None and mask.dim() == 4:
            mask = mask.any(1, keepdim=True) if mask.dtype == torch.bool else mask.detach().amax(1, keepdim=True)
        q, k = (y.new_empty(y.shape[0], 1, length, 1) for length in (queries, keys))
        return Call(self, q, k, k, scale=1.0, mask=mask, causal=causal, training=training, samples=self.samples)

    def samples_in(self, batch: int) -> int | None:
        """Give how many samples a call of `batch` rows holds: fewer on windowed sites, where rows are windows."""
        if not self.site.windowed:
            return None
        samples = self.running().samples
        if samples is None or batch % samples:
            raise RuntimeError(
                f"{self.site.name} attends in windows and its call has {batch} rows, which cannot be shared out to the "
                f"{samples} samples of the batch; call the whole model, not a part of it, or leave the site out with where="
            )
        return samples

    def running(self) -> Running:
        """Give the forward of the whole model that runs now, or the last one."""
        return self._owner.forward.now()

    # What a call asks

    def strength(self, method: Method, name: str) -> Tensor:
        """Give the live field `name` of a method as a 0-d fp32 tensor."""
        return self.values[self.index(method)][name]

    def state_of(self, method: Method) -> MethodState:
        """Give what a method keeps on the site."""
        return self.states[self.index(method)]

    def salt(self, method: Method) -> int:
        """Give what tells the draws of a method from those of all others."""
        return self.salts[self.index(method)]

    def open_pass(self) -> Pass:
        """Count one pass through the site, or find the one that it repeats."""
        return pass_keys.begin(self)

    def sites_of(self, method: Method) -> int:
        """Give the number of sites on which a method acts."""
        return self._owner.count(method)

    def first_values(self, call: Call) -> Tensor | None:
        """Give the values of the stack's first self attention, or None on that site itself."""
        return self._owner.first_values(call)

    def needs(self, stage: str) -> bool:
        """Tell whether any method here defines the stage."""
        return any(m.overrides(stage) for m in self.methods)

    def seed(self) -> int:
        """Give the seed of this process's draws: the run's, and under distributed training the rank's."""
        rank = (
            torch.distributed.get_rank()
            if torch.distributed.is_available() and torch.distributed.is_initialized()
            else 0
        )
        return mix(self._owner.seed, rank)

    def active(self, training: bool) -> list[Method]:
        """Give the methods that act in this mode, in order."""
        return [m for m in self.methods if m.acts_in(training)]

    def index(self, method: Method) -> int:
        """Give the place of a method in the order of action, found by identity."""
        for i, known in enumerate(self.methods):
            if known is method:
                return i
        raise KeyError(f"{method!r} does not act on {self.site.name}")

    def drop(self, method: Method, fold: bool) -> None:
        """Take one method off: folded into plain weights where asked and possible, else undone."""
        i = self.index(method)
        state = self.states[i]
        if fold and method.overrides("fold"):
            method.fold(self.site, state)
        elif method.overrides("unbuild"):
            method.unbuild(self.site, state)
        state.clear()
        for part in (self.methods, self.states, self.values, self.salts):
            del part[i]

    @property
    def repeats_matter(self) -> bool:
        """Tell whether a repeated pass matters to a method here."""
        return any(m.draws() or m.penalizes or m.carries for m in self.methods)

    def stateful(self) -> str:
        """Name the methods for which a repeated pass matters."""
        names = [repr(m) for m in self.methods if m.draws() or m.penalizes or m.carries]
        return " + ".join(names) or "a method"
