"""The stand-in for `torch.nn.functional.scaled_dot_product_attention`, and whose call it serves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attention.computation import fused
from headwise.core import recompute as passes
from headwise.hosts.sdpa.limits import samples_of
from headwise.hosts.sdpa.shape import Shape, broadcast, with_causality

if TYPE_CHECKING:
    from headwise.hosts.sdpa.adapter import FusedAdapter

_CALL = nn.Module._call_impl.__code__  # type: ignore[attr-defined]
_RESUMED = "torch_dynamo_resume_in"


class _Open:
    """A site whose forward runs now.

    Attributes:
        adapter: of the site.
        module: that was entered.
        region: the checkpointed region around it.
        outer: the site around it.
        thread: that entered it, None for compiled code.
    """

    def __init__(
        self, adapter: FusedAdapter, module: nn.Module, region: Any, outer: _Open | None, thread: int | None
    ) -> None:
        self.adapter, self.module, self.region, self.outer, self.thread = adapter, module, region, outer, thread


class _Current:
    """The innermost site whose forward runs now: the last one entered, and by thread.

    What compiled code writes to a thread's own storage is lost at the end of its graph: it uses `top`, which code in eager
    mode keeps up to date too.
    """

    top: _Open | None = None

    def __init__(self) -> None:
        self.mine = threading.local()


current = _Current()


class _Standing:
    """Whether `routed` stands in the function's place, and what stood there before; calls outside of fitted sites go there.

    `plain` stays after the function was given back: a garbage collection may do that while a call is on its way.
    """

    on = False
    plain: Callable[..., Tensor] = fused


standing = _Standing()


def stand_in() -> None:
    """Put `routed` in the place of the function, unless it stands there, or below somebody else's wrapper."""
    now = F.scaled_dot_product_attention
    if now is routed or (standing.on and now is not standing.plain):
        return
    standing.on, standing.plain = True, now
    F.scaled_dot_product_attention = routed


def step_aside() -> None:
    """Give the function back when no fitted site is left; below somebody else's wrapper, stay and pass calls on."""
    left = any(f.site.host == "fused" for f in passes.enrolled())
    if not left and F.scaled_dot_product_attention is routed:
        F.scaled_dot_product_attention = standing.plain
        standing.on = False


def enter(adapter: FusedAdapter, module: nn.Module) -> None:
    """Say that the calls from now on are this site's."""
    if torch.compiler.is_compiling():
        current.top = _Open(adapter, module, None, current.top, None)
        return
    top, mine = current.top, getattr(current.mine, "top", None)
    outer = top if top is not None and top.thread is None else mine
    current.top = current.mine.top = _Open(adapter, module, passes.region()[0], outer, threading.get_ident())


def leave(adapter: FusedAdapter) -> None:
    """Say that they no longer are; sites inside that an exception left open are closed too."""
    current.top = _outside(current.top, adapter)
    if not torch.compiler.is_compiling():
        current.mine.top = _outside(getattr(current.mine, "top", None), adapter)


def _outside(top: _Open | None, adapter: FusedAdapter) -> _Open | None:
    found = top
    while found is not None and found.adapter is not adapter:
        found = found.outer
    return top if found is None else found.outer


def _adapter() -> FusedAdapter | None:
    """Give the adapter of the site whose forward runs now."""
    if torch.compiler.is_compiling():
        return None if current.top is None else current.top.adapter
    # What is not an Exception (an interrupt from the keyboard) skips the hooks that close a site; another thread may have
    # entered a site since. The thread's own stack tells.
    top = _running(current.top) or _running(getattr(current.mine, "top", None))
    if top is None:
        if current.top is not None and current.top.thread in (None, threading.get_ident()):
            current.top = None
        current.mine.top = None
        return _recalled() if passes.in_backward() else None
    where, recompute = passes.region()
    if where is not None and recompute is None and where is not top.region:
        where.sites.append(top.adapter)
    return top.adapter


def _running(top: _Open | None) -> _Open | None:
    while top is not None and not _runs(top.module):
        top = top.outer
    return top


def _runs(module: nn.Module) -> bool:
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        # By name: Dynamo runs its own version of the code.
        code = frame.f_code
        if (
            code.co_name == _CALL.co_name
            and code.co_filename == _CALL.co_filename
            and frame.f_locals.get("self") is module
        ):
            return True
        # In what Dynamo resumes after a graph break, the frames above are not told.
        if code.co_name.startswith(_RESUMED):
            return True
        frame = frame.f_back
    return False


def _recalled() -> FusedAdapter | None:
    """Give the site of a call made in the recompute of a region that was checkpointed inside of a site's forward.

    No module is entered there: the region's first run told whose calls these are.
    """
    where, recompute = passes.region()
    if where is None or recompute is None:
        return None
    at = where.replay.setdefault(recompute, {})
    nth = at.get(0, 0)
    at[0] = nth + 1
    return where.sites[nth] if nth < len(where.sites) else None


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for `F.scaled_dot_product_attention`: calls inside a fitted site go through its methods."""
    plain = standing.plain
    adapter = _adapter()
    if adapter is None:
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    fitted = adapter.fitted
    assert fitted is not None
    training = fitted.site.module.training
    if adapter.record is not None:
        entered = fitted.entered.latest
        adapter.record.append((query, key, value, 0 if entered is None else entered.shape[0]))
    shape = Shape.of(adapter, query, key)
    q, k, v = broadcast(shape.to4(query), shape.to4(key), shape.to4(value))
    adapter.limits.check(fitted.site, q, k, is_causal, training)
    samples = samples_of(fitted, adapter.limits, shape, q.shape[0])

    def original() -> tuple[Tensor, None]:
        out = plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return shape.to4(out), None

    mask = shape.mask4(attn_mask)
    if mask is not None and is_causal:
        # Some of torch's kernels take both, others raise: one mask serves all.
        mask, is_causal = with_causality(mask, q.shape[2], k.shape[2]), False
    out, _ = fitted.attention(
        q,
        k,
        v,
        original,
        training=training,
        mask=mask,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
        samples=samples,
    )
    return shape.from4(out)
