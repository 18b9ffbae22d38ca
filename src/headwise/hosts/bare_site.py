"""Bare site: a site on which no method stands; the host's own attention runs, and an observer may see its calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headwise.core import live_sites
from headwise.core.call import Call
from headwise.core.call_context import PassingCall
from headwise.core.forward import Entered, Forward, Running
from headwise.core.kernels_ran import KernelsRan
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.hosts.layers.candidate import Adapter
from headwise.projections.sharded import CONTEXT_PARALLEL, heads_split, tokens_split

Observer = Callable[[Call, Tensor], None]


class ForwardHooks:
    """Tells bare sites when a forward of their whole model begins and ends."""

    def __init__(self, model: nn.Module) -> None:
        self.forward = Forward()
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            # A forward that failed half-way ends too.
            model.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() > 0]
        self.forward.begin(tensors[0].size(0) if tensors else None)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.forward.end()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class BareSite:
    """Stands in a site's attention and changes nothing; while armed, it shows each call and its output to the observer.

    Args:
        site: the attention layer.
        adapter: how to stand in its attention.
        hooks: that follow the forwards of its model, where any do.
    """

    def __init__(self, site: Site, adapter: Adapter, hooks: ForwardHooks | None = None) -> None:
        self.site, self.adapter, self.hooks = site, adapter, hooks
        self.methods: list[Method] = []
        self.shares_values = False
        self.armed, self.alive, self.reached = False, True, False
        self.observer: Observer | None = None
        self.samples: int | None = None
        self.seen: dict[str, Any] = {}
        # the host's own kernel runs here, and nobody notes which
        self.ran = KernelsRan()
        self.entered = Entered()
        self.later: Entered | None = None
        self.number = live_sites.enroll(self)
        adapter.attach(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> BareSite:
        twin = object.__new__(BareSite)
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            # A copy of a watched model is not watched.
            if name not in ("number", "observer", "armed"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin.observer, twin.armed = None, False
        twin.number = live_sites.enroll(twin)
        return twin

    def step_off(self) -> None:
        """Give the layer back as it was."""
        self.observer, self.armed, self.alive = None, False, False
        self.adapter.detach()
        if self.hooks is not None:
            self.hooks.remove()

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
        """Run the host's own attention, and show the call to the observer where it is armed.

        Raises:
            RuntimeError: where an armed site sees a part of the heads or tokens alone.
        """
        hidden = self.entered.take()
        self._note(q, k, hidden)
        if settings.get("causal") and self.site.causal is None:
            # The module did not say so; whether a method has a meaning here may hang on it.
            self.site.causal = True
        if not self.armed or self.observer is None:
            return original()
        self._refuse_parts(q)
        out, weights = original()
        if k.shape[1] != q.shape[1]:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        self.observer(Call(self, q, k, v, training=training, hidden=hidden, **settings), out)
        return out, weights

    def _note(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> None:
        """Keep what the first call shows of the site."""
        # A compiled graph would hold the sizes of its example.
        if torch.compiler.is_compiling() or self.seen:
            return
        self.seen = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[3]}
        if q.shape[2] != k.shape[2] and not self.site.is_cross:
            self.seen["pooled"] = True
        if hidden is not None:
            self.seen["hidden"] = hidden.shape[-1]

    def _refuse_parts(self, q: Tensor) -> None:
        site = self.site
        if not torch.compiler.is_compiling() and tokens_split(q):
            raise RuntimeError(f"{site.name} cannot be reached by a watch: {CONTEXT_PARALLEL}")
        if site.heads is not None and q.shape[1] != site.heads and (reason := heads_split(site.module, site.model)):
            raise RuntimeError(f"{site.name} is called with {q.shape[1]} of its {site.heads} heads: {reason}")

    def enter(self, x: Tensor) -> Tensor:
        """Keep what enters the layer for the call that follows."""
        self.entered.put(x)
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Let what leaves the layer pass."""
        return y

    def running(self) -> Running:
        """Give the forward of the whole model that runs now, or the last one."""
        return Running() if self.hooks is None else self.hooks.forward.now()

    def samples_in(self, batch: int) -> int | None:
        """Give how many samples a call of `batch` rows holds: fewer on windowed sites, where that is known."""
        samples = self.running().samples if self.site.windowed else None
        return None if samples is None or batch % samples else samples

    def idle(self, training: bool) -> bool:
        """Tell whether nothing reads this site's call now."""
        return not self.armed

    def needs(self, stage: str) -> bool:
        """Tell whether any method here defines the stage: there is none."""
        return False

    def active(self, training: bool) -> list[Method]:
        """Give the methods that act: none."""
        return []

    def first_values(self, call: PassingCall) -> None:
        """Give no values: nothing is carried here."""

    def sites_of(self, method: Method) -> int:
        """Give the number of sites on which a method acts: none."""
        return 0

    def strength(self, method: Method, name: str) -> NoReturn:
        """Refuse: no method stands here."""
        self._nobody(method)

    def state_of(self, method: Method) -> MethodState:
        """Refuse: no method stands here."""
        self._nobody(method)

    def salt(self, method: Method) -> int:
        """Refuse: no method stands here."""
        self._nobody(method)

    def open_pass(self) -> NoReturn:
        """Refuse: a pass is opened for the draws and penalties of a method."""
        raise RuntimeError(f"no method stands on {self.site.name}, so that nothing draws there")

    def _nobody(self, method: Method) -> NoReturn:
        raise KeyError(f"{method!r} does not act on {self.site.name}")


def bare_sites(modules: Iterable[nn.Module]) -> dict[nn.Module, BareSite]:
    """Give the bare sites that stand on any of the modules now, by their module."""
    within = set(modules)
    # A copy that failed half-way leaves sites without a module until it is collected.
    standing = [one for one in live_sites.live_sites() if isinstance(one, BareSite) and "module" in vars(one.site)]
    return {bare.site.module: bare for bare in standing if bare.site.module in within}
