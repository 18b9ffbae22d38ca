"""Fitted: routes what a host brings of one site through the methods that stand there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.attention.computation import attention
from headwise.core import live_sites
from headwise.core.call import Call
from headwise.core.call_context import PassingCall
from headwise.core.forward import Entered, Running
from headwise.core.kernels_ran import KernelsRan
from headwise.core.method import Method, touches_call
from headwise.core.method_state import MethodState
from headwise.core.random_draws import mix
from headwise.core.recompute import Pass
from headwise.core.site import Site
from headwise.projections.sharded import CONTEXT_PARALLEL, tokens_split
from headwise.regularizing import pass_keys
from headwise.regularizing.owner import Owner
from headwise.regularizing.site_methods import SiteMethods
from headwise.regularizing.site_shapes import check_heads, learn_causal, shapes_of


class Fitted:
    """One site with the methods that act there. Hosts call its `enter`, `attention` and `leave`.

    Attributes:
        here: the methods with their state on this site.
        counter: passes so far, a 0-d int64 tensor that compiled graphs count in too.
        number: by which compiled graphs find the site.
        shares_values: whether the layers above get this site's values.
        reached: whether a training forward with gradients came here since the last optimizer step.
        without_gradients: whether one came here without gradients inside a forward that has them.
        alive: until the site is given back.
        samples: of the call that enters now, where rows are windows.
        seen: what calls showed of the site.
        armed: whether `observer` is to see the next calls.
        ran: which kernels served its calls.
    """

    def __init__(self, site: Site, methods: list[Method], owner: Owner) -> None:
        self.site, self.owner = site, owner
        self.here = SiteMethods(site, methods, owner.seed)
        self.counter = torch.zeros((), dtype=torch.int64)
        self.number = live_sites.enroll(self)
        self.shares_values = self.reached = self.without_gradients = self.armed = False
        self.alive = True
        self.samples: int | None = None
        self.seen: dict[str, Any] = {}
        self.ran = KernelsRan()
        self.observer: Callable[[Call, Tensor], None] | None = None
        self.entered, self.called = Entered(), Entered()
        # Says of a pass that its branch waits for the dropout or norm before the residual; None where a host needs no such word.
        self.later: Entered | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Fitted:
        twin = object.__new__(Fitted)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            # A watch observes the model it was made for, not its copies, and each site has a number of its own.
            if name not in ("observer", "number"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin.observer, twin.armed = None, False
        twin.number = live_sites.enroll(twin)
        return twin

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
        # Taken in every case, for what stays here would be taken for a later call's.
        hidden = self.entered.take()
        self._note(training)
        if not torch.compiler.is_compiling() and not self.seen:
            self.seen = shapes_of(self.site, q, k, hidden)
        check_heads(self.site, q)
        if self.here.needs("branch"):
            given = settings.get("mask"), bool(settings.get("causal")), bool(settings.get("cross"))
            self.called.put((q.shape[2], k.shape[2], *given))
        if settings.get("causal") and self.site.causal is None:
            learn_causal(self.site, self.methods)
        active = [m for m in self.active(training) if touches_call(m) and not self.here.adds_nothing(m)]
        if not active and not self.shares_values and not self.armed:
            return original()
        # Methods see one key per query head; hosts with grouped queries share them.
        if k.shape[1] != q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if not torch.compiler.is_compiling() and tokens_split(q):
            acting = " + ".join(map(repr, active)) or "a watch"
            raise RuntimeError(f"{self.site.name} cannot be reached by {acting}: {CONTEXT_PARALLEL}")
        call = Call(self, q, k, v, training=training, hidden=hidden, **settings)
        if self.shares_values:
            self.owner.share_values(call)
        if active:
            out, weights = attention(call, active, need_weights=need_weights)
            if call.penalties or call.norms:
                self.owner.record(call)
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
            self.owner.fresh = True
        elif training and self.owner.differentiates:
            self.without_gradients = True

    def enter(self, x: Tensor) -> Tensor:
        """Take what enters the layer (B, T, C) through the `hidden` stages."""
        training = self.site.module.training
        call: Call | None = None
        for method in self.active(training):
            if method.overrides("hidden"):
                if call is None:
                    # There are no queries and keys yet: a stand-in gives the batch, device and dtype.
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
        queries, keys, mask, causal, cross = self.called.take() or (y.shape[1], y.shape[1], None, False, False)
        if self.site.pooled or queries > keys:
            # The keys are other tokens than those that leave.
            keys, mask, causal = queries, None, False
        if mask is not None and mask.dim() == 4:
            # A token of the layer is real where it is for any head.
            mask = mask.any(1, keepdim=True) if mask.dtype == torch.bool else mask.detach().amax(1, keepdim=True)
        q, k = (y.new_empty(y.shape[0], 1, length, 1) for length in (queries, keys))
        return Call(
            self, q, k, k, scale=1.0, mask=mask, causal=causal, training=training, samples=self.samples, cross=cross
        )

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
        return self.owner.forward.now()

    @property
    def methods(self) -> list[Method]:
        """Give the methods in order of action."""
        return self.here.methods

    @property
    def states(self) -> list[MethodState]:
        """Give what each method keeps here."""
        return self.here.states

    @property
    def values(self) -> list[dict[str, Tensor]]:
        """Give the live strengths of each method."""
        return self.here.values

    @property
    def kernels(self) -> set[str]:
        """Give the names of the kernels that ran so far."""
        return set(self.ran.names())

    def active(self, training: bool) -> list[Method]:
        """Give the methods that act in this mode, in order."""
        return self.here.active(training)

    def needs(self, stage: str) -> bool:
        """Tell whether any method here defines the stage."""
        return self.here.needs(stage)

    def strength(self, method: Method, name: str) -> Tensor:
        """Give the live field `name` of a method as a 0-d fp32 tensor."""
        return self.here.strength(method, name)

    def state_of(self, method: Method) -> MethodState:
        """Give what a method keeps on the site."""
        return self.here.states[self.here.index(method)]

    def salt(self, method: Method) -> int:
        """Give what tells the draws of a method from those of all others."""
        return self.here.salts[self.here.index(method)]

    def open_pass(self) -> Pass:
        """Count one pass through the site, or find the one that it repeats."""
        return pass_keys.begin(self)

    def sites_of(self, method: Method) -> int:
        """Give the number of sites on which a method acts."""
        return self.owner.count(method)

    def first_values(self, call: PassingCall) -> Tensor | None:
        """Give the values of the stack's first self attention, or None on that site itself."""
        return self.owner.first_values(call)

    def seed(self) -> int:
        """Give the seed of this process's draws: the run's, and under distributed training the rank's."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        return mix(self.owner.seed, torch.distributed.get_rank() if distributed else 0)

    def stateful(self) -> str:
        """Name the methods for which a repeated pass matters."""
        return self.here.stateful()
