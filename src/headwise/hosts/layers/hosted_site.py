"""What a host asks of the site whose attention it serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from headwise.core.call_context import CallContext
from headwise.core.forward import Entered, Running
from headwise.core.method import Method


class HostedSite(CallContext, Protocol):
    """A fitted or watched site, as hosts see it: they bring it what enters and leaves the layer and each attention call."""

    armed: bool
    alive: bool
    reached: bool
    samples: int | None
    # what calls showed of the site: heads, sizes, whether it pools
    seen: dict[str, Any]
    entered: Entered
    # says of a pass that its branch waits for the dropout or norm before the residual; None where a host needs no such word
    later: Entered | None

    @property
    def methods(self) -> list[Method]:
        """Give the methods that stand here, in order of action."""
        ...

    def running(self) -> Running:
        """Give the forward of the whole model that runs now, or the last one."""
        ...

    def needs(self, stage: str) -> bool:
        """Tell whether any method here defines the stage."""
        ...

    def idle(self, training: bool) -> bool:
        """Tell whether nothing acts on or reads this site's call now, so that the host's own code may run alone."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Take what enters the layer, (B, T, C), through the `hidden` stages."""
        ...

    def leave(self, y: Tensor) -> Tensor:
        """Take what leaves the layer, (B, T, C), through the `branch` stages."""
        ...

    def samples_in(self, batch: int) -> int | None:
        """Give how many samples a call of `batch` rows holds, or None where rows are samples."""
        ...

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
        """Compute the host's attention call; `original` is the host's own computation."""
        ...


def asks_for_own_tokens(fitted: HostedSite) -> bool:
    """Tell whether a method here, or one above that gets this layer's values, compares tokens with their own keys or values."""
    return not fitted.site.is_cross and (fitted.shares_values or any(m.reads_own_tokens() for m in fitted.methods))
