"""Track the sites whose forward runs now: the attention function is not passed its module."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
from torch import nn

from headwise.attend.core import passes
from headwise.attend.hosts.sdpa.shape import Served
from headwise.borders import MODULE_CALL, RESUMED, in_backward
from headwise.files.callers import callers

# Frames of this file between the function's replacement and the walk: `_runs`, `_running` and `serving`.
_OWN_FRAMES = 3


class _Open:
    """A site whose forward runs now, the open site and the checkpointed region around it, and the thread that entered.

    `thread` is None for compiled code; `called` says whether the forward called the function.
    """

    def __init__(
        self, adapter: Served, module: nn.Module, region: Any, outer: _Open | None, thread: int | None
    ) -> None:
        self.adapter, self.module, self.region, self.outer, self.thread = adapter, module, region, outer, thread
        self.called = False


class _Current:
    """The innermost open site, of the process (`top`) and of each thread (`mine.top`).

    What compiled code writes to thread-local storage is lost at the end of its graph, so it uses `top`, which eager
    code keeps up to date too.
    """

    top: _Open | None = None

    def __init__(self) -> None:
        self.mine = threading.local()


current = _Current()


def enter(adapter: Served, module: nn.Module) -> None:
    """Open a site: attention calls from now on belong to it."""
    if torch.compiler.is_compiling():
        current.top = _Open(adapter, module, None, current.top, None)
        return
    top, mine = current.top, getattr(current.mine, "top", None)
    # A site that compiled code opened belongs to no thread and may be around this one.
    outer = top if top is not None and top.thread is None else mine
    current.top = current.mine.top = _Open(adapter, module, passes.region()[0], outer, threading.get_ident())


def leave(adapter: Served) -> bool:
    """Close a site and return whether it made a call; inner sites that an exception left open are closed too."""
    mine = current.top if torch.compiler.is_compiling() else getattr(current.mine, "top", None)
    while mine is not None and mine.adapter is not adapter:
        mine = mine.outer
    called = mine is None or mine.called
    current.top = _outside(current.top, adapter)
    if not torch.compiler.is_compiling():
        current.mine.top = _outside(getattr(current.mine, "top", None), adapter)
    return called


def _outside(top: _Open | None, adapter: Served) -> _Open | None:
    site = top
    while site is not None and site.adapter is not adapter:
        site = site.outer
    return top if site is None else site.outer


def serving() -> Served | None:
    """Return the adapter of the innermost open site; must be called directly by the function's replacement."""
    if torch.compiler.is_compiling():
        # Dynamo cannot trace a walk over frames, and needs none: it traces one forward, in one thread, in order.
        if current.top is not None:
            current.top.called = True
        return None if current.top is None else current.top.adapter
    # A BaseException such as KeyboardInterrupt skips the hooks that close a site, and another thread may have opened a
    # site since. The stack of this thread decides.
    top = _running(current.top) or _running(getattr(current.mine, "top", None))
    if top is None:
        if current.top is not None and current.top.thread in (None, threading.get_ident()):
            current.top = None
        current.mine.top = None
        return _recalled() if in_backward() else None
    region, recompute = passes.region()
    # A checkpointed region inside the site records its calls' sites: its recompute enters no module (`_recalled`).
    if region is not None and recompute is None and region is not top.region:
        region.sites.append(top.adapter)
    _mark_called(top.adapter)
    return top.adapter


def _mark_called(adapter: Served) -> None:
    # Only this thread's entry counts: another thread may run the same module.
    mine = getattr(current.mine, "top", None)
    for opened in (current.top, mine):
        if opened is not None and opened.adapter is adapter and (opened is mine or opened.thread is None):
            opened.called = True


def _running(top: _Open | None) -> _Open | None:
    while top is not None and not _runs(top.module):
        top = top.outer
    return top


def _runs(module: nn.Module) -> bool:
    """Return whether a module's call is on this thread's stack: an entry may be stale or of another thread.

    This reads `self` in the frames of nn.Module's own call, which costs some microseconds for each level of modules.
    """
    for frame in itertools.islice(callers(), _OWN_FRAMES, None):
        # Compared by name: Dynamo runs its own version of the code.
        code = frame.f_code
        if (
            code.co_name == MODULE_CALL.co_name
            and code.co_filename == MODULE_CALL.co_filename
            and frame.f_locals.get("self") is module
        ):
            return True
        # In a function that Dynamo resumes after a graph break, the frames above are unknown.
        if code.co_name.startswith(RESUMED):
            return True
    return False


def _recalled() -> Served | None:
    """Return the site of a call in the recompute of a region that was checkpointed inside a site's forward.

    No module is entered there: the first run of the region recorded the sites of its calls.
    """
    region, recompute = passes.region()
    if region is None or recompute is None:
        return None
    # Calls of a recompute come in the order of the first run; several recomputes of a region may be running.
    counter = region.replay.setdefault(recompute, {})
    index = counter.get(0, 0)
    counter[0] = index + 1
    return region.sites[index] if index < len(region.sites) else None
