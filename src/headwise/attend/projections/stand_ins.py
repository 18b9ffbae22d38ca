"""Stand-ins for torch's fused attention and for transformers' interface, which show their calls to one thread.

Both functions belong to the whole process. While a capture runs in any thread they are replaced, and a stand-in calls
the function that it replaced unless the thread that calls it is the capture's own: other threads compute as before.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

# Around every change of the process-wide functions, which threads may make at the same time.
lock = threading.RLock()

# See a call of `function` with these arguments; the number is the place of the queries, and the flag whether it is a
# function of transformers' interface.
Watch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any], int, bool], Any]


class _State:
    """The number of captures that run, whether the stand-in is in place, and the functions that stand-ins replaced.

    `plain` is kept after it was restored, for a call in another thread that had already read the stand-in.
    """

    captures, on = 0, False
    plain: Callable[..., Any] = F.scaled_dot_product_attention
    interface: Any = None
    get_interface: Callable[..., Any] | None = None


class _OfThread(threading.local):
    watch: Watch | None = None


_thread = _OfThread()


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    """Stand for `F.scaled_dot_product_attention`, under its name."""
    plain = _State.plain
    if torch.compiler.is_compiling() or _thread.watch is None:
        return plain(*args, **kwargs)
    return _thread.watch(plain, args, kwargs, 0, False)


def _get_interface(self: Any, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for `AttentionInterface.get_interface`."""
    assert _State.get_interface is not None
    function: Callable[..., Any] = _State.get_interface(self, name, default)
    watch = None if torch.compiler.is_compiling() else _thread.watch
    return function if watch is None else lambda *args, **kwargs: watch(function, args, kwargs, 1, True)


def fused() -> Callable[..., Any]:
    """Return the process's fused attention, below a capture's stand-in."""
    now = F.scaled_dot_product_attention
    return _State.plain if now is scaled_dot_product_attention else now


def set_fused(function: Callable[..., Any]) -> None:
    """Replace the process's fused attention, below a capture's stand-in."""
    if F.scaled_dot_product_attention is scaled_dot_product_attention:
        _State.plain = function
    else:
        F.scaled_dot_product_attention = function


@contextmanager
def shown_to(watch: Watch) -> Iterator[None]:
    """Show the attention calls of this thread to `watch`, which returns their result."""
    before = _thread.watch
    with lock:
        _State.captures += 1
        _replace()
    _thread.watch = watch
    try:
        yield
    finally:
        _thread.watch = before
        with lock:
            _State.captures -= 1
            if not _State.captures:
                _restore()


def _replace() -> None:
    now = F.scaled_dot_product_attention
    # Another library may have put its wrapper around the stand-in, which then stays below it.
    if now is not scaled_dot_product_attention and not (_State.on and now is not _State.plain):
        _State.on, _State.plain, F.scaled_dot_product_attention = True, now, scaled_dot_product_attention
    # Looked up in sys.modules: without an import of transformers by the user, none of its modules exists.
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    if interface is not None and _State.interface is None:
        _State.interface, _State.get_interface = interface, interface.get_interface
        interface.get_interface = _get_interface


def _restore() -> None:
    if F.scaled_dot_product_attention is scaled_dot_product_attention:
        F.scaled_dot_product_attention = _State.plain
        _State.on = False
    if _State.interface is not None and _State.interface.get_interface is _get_interface:
        _State.interface.get_interface = _State.get_interface
    _State.interface = None
