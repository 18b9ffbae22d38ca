"""Open sites: whose call of the function this is. The function is told no module, so entered forwards are kept."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch import nn

from headwise.core import recompute as passes
from headwise.hosts.sdpa.limits import Limited

_CALL = nn.Module._call_impl.__code__
_RESUMED = "torch_dynamo_resume_in"
# Frames of this file between the function's stand-in and the walk: `_runs`, `_running` and `serving`.
_OWN_FRAMES = 3


class _Open:
    """A site whose forward runs now.

    Attributes:
        adapter: of the site.
        module: that was entered.
        region: the checkpointed region around it.
        outer: the site around it.
        thread: that entered it, None for compiled code.
        called: whether the forward called the function.
    """

    def __init__(
        self, adapter: Limited, module: nn.Module, region: Any, outer: _Open | None, thread: int | None
    ) -> None:
        self.adapter, self.module, self.region, self.outer, self.thread = adapter, module, region, outer, thread
        self.called = False


class _Current:
    """The innermost site whose forward runs now: the last one entered, and by thread.

    What compiled code writes to a thread's own storage is lost at the end of its graph: it uses `top`, which code in
    eager mode keeps up to date too.
    """

    top: _Open | None = None

    def __init__(self) -> None:
        self.mine = threading.local()


current = _Current()


def enter(adapter: Limited, module: nn.Module) -> None:
    """Say that the calls from now on are this site's."""
    if torch.compiler.is_compiling():
        current.top = _Open(adapter, module, None, current.top, None)
        return
    top, mine = current.top, getattr(current.mine, "top", None)
    # What compiled code entered is known to no thread, and may lie around this site.
    outer = top if top is not None and top.thread is None else mine
    current.top = current.mine.top = _Open(adapter, module, passes.region()[0], outer, threading.get_ident())


def leave(adapter: Limited) -> bool:
    """Say that they no longer are, and whether there was one; sites inside that an exception left open are closed
    too."""
    mine = current.top if torch.compiler.is_compiling() else getattr(current.mine, "top", None)
    while mine is not None and mine.adapter is not adapter:
        mine = mine.outer
    called = mine is None or mine.called
    current.top = _outside(current.top, adapter)
    if not torch.compiler.is_compiling():
        current.mine.top = _outside(getattr(current.mine, "top", None), adapter)
    return called


def _outside(top: _Open | None, adapter: Limited) -> _Open | None:
    found = top
    while found is not None and found.adapter is not adapter:
        found = found.outer
    return top if found is None else found.outer


def serving() -> Limited | None:
    """Return the adapter of the site whose forward runs now; to be called by the function's stand-in itself."""
    if torch.compiler.is_compiling():
        # Dynamo traces no walk over frames. It needs none either: it traces one forward, in one thread, in order.
        if current.top is not None:
            current.top.called = True
        return None if current.top is None else current.top.adapter
    # What is not an Exception (an interrupt from the keyboard) skips the hooks that close a site; another thread may
    # have entered a site since. The thread's own stack tells.
    top = _running(current.top) or _running(getattr(current.mine, "top", None))
    if top is None:
        if current.top is not None and current.top.thread in (None, threading.get_ident()):
            current.top = None
        current.mine.top = None
        return _recalled() if passes.in_backward() else None
    where, recompute = passes.region()
    # A region that lies inside of the site keeps whose calls it made: its recompute enters no module (see `_recalled`).
    if where is not None and recompute is None and where is not top.region:
        where.sites.append(top.adapter)
    _note_call(top.adapter)
    return top.adapter


def _note_call(adapter: Limited) -> None:
    # By this thread's own note: another thread may run the same module.
    mine = getattr(current.mine, "top", None)
    for opened in (current.top, mine):
        if opened is not None and opened.adapter is adapter and (opened is mine or opened.thread is None):
            opened.called = True


def _running(top: _Open | None) -> _Open | None:
    while top is not None and not _runs(top.module):
        top = top.outer
    return top


def _runs(module: nn.Module) -> bool:
    """Return whether a module's call lies on this thread's stack: a note alone may be stale, or another thread's.

    Read are the frames of nn.Module's own call and their `self`; a call costs some microseconds for each level of
    modules.
    """
    frame: FrameType | None = sys._getframe(_OWN_FRAMES)
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


def _recalled() -> Limited | None:
    """Return the site of a call made in the recompute of a region that was checkpointed inside of a site's forward.

    No module is entered there: the region's first run told whose calls these are.
    """
    where, recompute = passes.region()
    if where is None or recompute is None:
        return None
    # Calls of one recompute come in the order of the first run; several recomputes of a region may be on their way.
    at = where.replay.setdefault(recompute, {})
    nth = at.get(0, 0)
    at[0] = nth + 1
    return where.sites[nth] if nth < len(where.sites) else None
