"""The replacement of `flex_attention`, which routes calls inside a fitted site through its methods.

Models import the function by name and compile it, so it is replaced wherever a site's code reads it: in a module's
globals, a closure, a class or the layer itself. It is restored with the last site. `score_mod` and `block_mask` become
a dense mask of the call; flex attention's own sparse kernel runs if no method acts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.hosts.layers.declared import forward_of, names_used, reached
from headwise.attend.hosts.sdpa.call import serve
from headwise.attend.hosts.sdpa.open_sites import serving
from headwise.attend.hosts.sdpa.shape import SERVED
from headwise.attend.projections import stand_ins
from headwise.borders import indexing_by_tensors, not_compiled, uncompiled
from headwise.files.errors import LEAVE_OUT

NAME, LIBRARY = "flex_attention", "torch.nn.attention.flex_attention"
# levels of calls that are followed from a layer's forward
DEPTH = 2
# scores at which a score_mod is evaluated: a bias adds the same number to each
TRIED_SCORES = (0.0, 1.0, -3.0)

# by id of the holder and name: the holder, the name, and the original value
_replaced: dict[tuple[int, str], tuple[Any, str, Any]] = {}


def calls_flex(module: nn.Module) -> bool:
    """Return whether a module's forward names flex attention, compiled or not."""
    return next(_uses_of_flex(module), None) is not None


def stand_in(layer: nn.Module) -> None:
    """Replace flex attention wherever the code of a layer or of its submodules reads it."""
    with stand_ins.lock:
        for module in layer.modules():
            for holder, name, value in list(_uses_of_flex(module)):
                original = value.__func__ if isinstance(value, staticmethod) else value
                if getattr(original, "stands_for_flex", None) is None:
                    _replaced[id(holder), name] = holder, name, value
                    _put(holder, name, _stand_in_of(original))


def step_aside() -> None:
    """Restore the function everywhere when no fitted site is left."""
    with stand_ins.lock:
        if any(f.site.host in SERVED for f in FittedLayer.live()):
            return
        while _replaced:
            _, (holder, name, value) = _replaced.popitem()
            _put(holder, name, value)


def _put(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    elif isinstance(holder, CellType):
        setattr(holder, name, value)
    else:
        # static: like the compiled function, it must not be bound to an instance
        setattr(holder, name, value if isinstance(value, staticmethod) else staticmethod(value))


def _uses_of_flex(module: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yield each (holder, name, function) from which the code of a module's forward reads flex attention."""
    if type(module).__module__.startswith("torch."):
        return
    code = [(function, names_used(function)) for function in reached(forward_of(module), type(module), DEPTH)]
    if LIBRARY not in sys.modules and not any(LIBRARY in used for _, used in code):
        return
    modules = torch, importlib.import_module(LIBRARY)
    library, words = vars(modules[1]), set[str]()
    for function, used in code:
        words |= used
        space = function.__globals__
        if space is library:
            continue
        yield from ((space, name, space[name]) for name in used if _is_flex(space.get(name)))
        yield from ((cell, "cell_contents", value) for cell, value in _closed_over(function) if _is_flex(value))
        # read as an attribute of the library, or imported from it inside the function
        if NAME in used and (LIBRARY in used or any(space.get(name) is m for name in used for m in modules)):
            yield library, NAME, library[NAME]
    holders = ((module.__dict__, module.__dict__), *((base, vars(base)) for base in type(module).__mro__))
    for holder, attributes in holders:
        yield from (
            (holder, name, attributes[name]) for name in words & attributes.keys() if _is_flex(attributes[name])
        )


def _closed_over(function: Any) -> Iterator[tuple[CellType, Any]]:
    """Yield the closure cells of a function with their values."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            # an empty cell raises: its variable has no value yet
            yield cell, cell.cell_contents


def _is_flex(value: Any) -> bool:
    value = value.__func__ if isinstance(value, staticmethod) else value
    value = getattr(value, "stands_for_flex", value)
    value = value.func if isinstance(value, functools.partial) else value
    value = uncompiled(value)
    return callable(value) and getattr(value, "__name__", "") == NAME and getattr(value, "__module__", "") == LIBRARY


def _stand_in_of(original: Any) -> Any:
    if not isinstance(original, functools.partial):
        return _routed(original)
    partial: Any = functools.partial(_routed(original.func), *original.args, **original.keywords)
    partial.stands_for_flex = original
    return partial


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of flex attention, plain or compiled."""

    def routed(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        **others: Any,
    ) -> Any:
        plain = functools.partial(
            original, query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, **others
        )
        adapter = serving()
        fitted = None if adapter is None else adapter.fitted
        if adapter is None or fitted is None:
            return plain()
        training = fitted.site.module.training
        if fitted.untouched(training):
            return fitted.attention(query, key, value, lambda: (plain(), None), training=training, scale=scale)[0]
        # return_aux may request no auxiliary output; the result is a pair all the same.
        paired = others.get("return_aux") is not None
        if paired and not any(others["return_aux"]):
            others = {**others, "return_aux": None}
        unsupported = [name for name, value in {"return_lse": return_lse, **others}.items() if value]
        _refuse(fitted, unsupported)
        own = (lambda: (plain()[0], None)) if paired else (lambda: (plain(), None))
        mask = dense_mask(block_mask, query, key)
        if score_mod is not None:
            bias = _bias(fitted, score_mod, query, key)
            mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
        out = serve(adapter, query, key, value, own, mask=mask, dropout=0.0, causal=False, scale=scale)
        return (out, vars(sys.modules[LIBRARY])["AuxOutput"]()) if paired else out

    routed.stands_for_flex = original  # type: ignore[attr-defined]
    return routed


def _refuse(fitted: FittedLayer, arguments: list[str]) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{fitted.site.name} calls flex_attention in a compiled graph, where its masks cannot be read: compile the "
            f"parts of the model around it, call F.scaled_dot_product_attention in it, or {LEAVE_OUT}"
        )
    if arguments:
        raise RuntimeError(
            f"{fitted.site.name} calls flex_attention with {', '.join(arguments)}, which only its own kernel "
            f"supports: call it without, or {LEAVE_OUT}"
        )


def dense_mask(block_mask: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """Return what a BlockMask allows, bool (B|1, H|1, T, N): its blocks, and inside them its mask function."""
    if block_mask is None:
        return None
    create_mask = sys.modules[LIBRARY].create_mask
    blocks = block_mask.to_dense().bool()
    rows, heads = blocks.shape[:2]
    for dim, size in zip((-2, -1), block_mask.BLOCK_SIZE):
        blocks = blocks.repeat_interleave(size, dim)
    queries, keys = q.shape[2], k.shape[2]
    inside = create_mask(block_mask.mask_mod, rows, heads, queries, keys, device=q.device)
    return blocks[..., :queries, :keys].to(q.device) & inside


@not_compiled
def _bias(fitted: FittedLayer, score_mod: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return what a score_mod adds to each score, (B, H, T, N), with its gradients."""
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    places = [torch.arange(size, device=q.device) for size in shape]
    mod = score_mod
    for depth in (4, 3, 2, 1):
        mod = torch.vmap(mod, in_dims=(0, *(0 if dim == depth else None for dim in range(1, 5))))
    with indexing_by_tensors():
        first, *others = (mod(torch.full(shape, score, device=q.device), *places) for score in TRIED_SCORES)
    for score, scores in zip(TRIED_SCORES[1:], others):
        same = torch.isclose(scores - score, first, rtol=1e-4, atol=1e-4) | (scores == first) & first.isinf()
        if not same.all():
            raise RuntimeError(
                f"the score_mod of {fitted.site.name} does more than add a bias to the scores, which methods and "
                "readings cannot take into account: write a soft cap as headwise.SoftCap and a mask as block_mask, or "
                f"{LEAVE_OUT}"
            )
    return first
