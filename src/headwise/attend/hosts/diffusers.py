"""Attention layers of diffusers, whose attention is computed by a separate object, the processor."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Site
from headwise.attend.core.shared_state import Entered
from headwise.attend.hosts.layers.declared import (
    Candidate,
    forward_of,
    is_cross,
    names_used,
    normalises,
    reached,
    without_softmax,
)
from headwise.attend.hosts.sdpa import call
from headwise.attend.hosts.sdpa.adapter import NAME, SdpaAdapter
from headwise.attend.hosts.sdpa.flex import dense_mask
from headwise.attend.hosts.sdpa.open_sites import serving
from headwise.attend.projections.adapted import base_of
from headwise.attend.projections.names import HEAD_DIM, HEADS, first_number
from headwise.attend.projections.sharded import CONTEXT_PARALLEL
from headwise.borders import TORCH_BACKENDS, active_backend, own_modules
from headwise.files.errors import LEAVE_OUT

DISPATCH, LIBRARY = "dispatch_attention_fn", "diffusers.models.attention_dispatch"
DEPTH = 2

# The module globals in which the dispatcher is replaced, by their id.
_replaced_in: dict[int, dict[str, Any]] = {}
_plain: list[Any] = []


def stand_in(layer: nn.Module) -> None:
    """Replace the dispatcher in all module globals from which the code of a layer's processor reads it."""
    library = sys.modules.get(LIBRARY)
    if library is None:
        return
    processor: Any = layer.processor
    for function in reached(
        type(processor).__call__ if not isinstance(processor, nn.Module) else type(processor).forward,
        type(processor),
        DEPTH,
    ):
        space = function.__globals__
        if space is not vars(library) and space.get(DISPATCH) is getattr(library, DISPATCH):
            _plain[:] = [getattr(library, DISPATCH)]
            _replaced_in[id(space)] = space
            space[DISPATCH] = routed


def step_aside() -> None:
    """Restore the dispatcher everywhere when no fitted layer of diffusers is left."""
    if any(f.site.host == "diffusers" for f in FittedLayer.live()):
        return
    while _replaced_in:
        _, space = _replaced_in.popitem()
        if space.get(DISPATCH) is routed:
            space[DISPATCH] = _plain[0]


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    backend: Any = None,
    parallel_config: Any = None,
) -> Tensor:
    """Replace `dispatch_attention_fn`: route a fitted layer's calls through its methods unless torch's own backend
    runs, which is routed separately."""
    plain = partial(_plain[0], query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, attention_kwargs)
    plain = partial(plain, backend=backend, parallel_config=parallel_config)
    if parallel_config is None and _backend(backend) in TORCH_BACKENDS:
        out: Tensor = plain()
        return out
    adapter = serving()
    fitted = None if adapter is None else adapter.fitted
    if adapter is None or fitted is None:
        return plain()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))

    def original() -> tuple[Tensor, None]:
        return plain().transpose(1, 2), None

    if fitted.untouched(fitted.site.module.training):
        settings: dict[str, Any] = {"causal": is_causal, "scale": scale}
        out, _ = fitted.attention(q, k, v, original, training=fitted.site.module.training, **settings)
        return out.transpose(1, 2)
    _refuse(fitted, attention_kwargs, parallel_config, backend)
    mask = _mask(attn_mask, q, k)
    return call.serve(
        adapter, q, k, v, original, mask=mask, dropout=dropout_p, causal=is_causal, scale=scale
    ).transpose(1, 2)


def _backend(backend: Any) -> str:
    if backend is None:
        backend = active_backend(sys.modules[LIBRARY])
    return str(getattr(backend, "value", backend))


def _refuse(fitted: FittedLayer, settings: dict[str, Any] | None, parallel: Any, backend: Any) -> None:
    name = fitted.site.name
    if parallel is not None:
        raise RuntimeError(
            f"{name} cannot be reached: {CONTEXT_PARALLEL.replace('context_parallel', 'enable_parallelism()')}"
        )
    if settings:
        raise RuntimeError(
            f"{name} calls the attention backend {_backend(backend)!r} with {', '.join(sorted(settings))}, which "
            f"only that backend supports: call set_attention_backend('native') on the model, or {LEAVE_OUT}"
        )


def _mask(mask: Any, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a mask that broadcasts to (B, H, T, N); a mask of shape (B, N) is taken as one of the keys."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() > 2):
        return mask
    if not isinstance(mask, Tensor):
        return dense_mask(mask, q, k)
    keys = mask.shape == (q.shape[0], k.shape[2])
    whole = mask[:, None, None] if keys else mask[None, None]
    return whole if whole.dtype == torch.bool or whole.is_floating_point() else whole.bool()


TEXT_ARGUMENT = "encoder_hidden_states"
TEXT_NAME = re.compile(r"encoder|txt|text|context|_t$")


@functools.lru_cache(maxsize=256)
def text_first(function: Any) -> bool | None:
    """Return whether a function concatenates text tokens before image tokens, or None if it does not concatenate them.

    The answer is read from the source: of two concatenated variables, exactly one has a name that means text.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    orders = {order for node in ast.walk(tree) if (order := _text_first_in(node)) is not None}
    # Code that concatenates in both orders gives no answer.
    return orders.pop() if len(orders) == 1 else None


def _text_first_in(node: ast.AST) -> bool | None:
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cat") and node.args):
        return None
    parts = node.args[0].elts if isinstance(node.args[0], ast.List | ast.Tuple) else []
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    if len(parts) != 2 or len(names) != 2 or not all(re.search("key|^k_|_k$|hidden_states", name) for name in names):
        return None
    text = [TEXT_NAME.search(name) is not None for name in names]
    return text[0] if text[0] != text[1] else None


class OtherTokens:
    """The number of text tokens that a layer or its block was called with, kept until attention is computed.

    Args:
        layer: the attention layer.
        block: the parent module, which concatenates image and text itself if the layer gets one sequence.
        first: whether the layer's processor puts the text first; None if it concatenates nothing.
    """

    def __init__(self, layer: nn.Module, block: nn.Module | None, first: bool | None) -> None:
        self.layer, self.block, self.first = layer, block, first
        self.block_first = None if block is None else text_first(forward_of(block))
        self.own, self.around = Entered(), Entered()

    def hooks(self) -> list[Any]:
        """Hook the layer, and the block if its own code concatenates image and text; return the handles."""
        handles = [self.layer.register_forward_pre_hook(self._before, with_kwargs=True)]
        if self.block is not None and self.block_first is not None:
            handles.append(self.block.register_forward_pre_hook(self._before_block, with_kwargs=True))
        return handles

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.own.put(_text_length(module, args, kwargs))

    def _before_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.around.put(_text_length(module, args, kwargs))

    def at(self, queries: int, keys: int) -> tuple[slice | None, bool, bool]:
        """Return the slice of the text tokens in this call, whether the text was passed separately, and whether the
        keys are tokens other than the queries."""
        own, around = self.own.take(), self.around.take()
        if own is not None:
            joined = queries == keys and queries > own
            text = _text_slice(own, keys, self.first) if joined and self.first is not None else None
            # Where the code shows no concatenation, the length alone does not prove one.
            return text, text is not None, text is None
        joined = around is not None and queries == keys and queries > around
        return (_text_slice(around, keys, self.block_first) if joined else None), False, False


def _text_slice(length: int, keys: int, first: bool | None) -> slice:
    return slice(0, length) if first else slice(keys - length, keys)


def _text_length(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the number of text tokens that a module is called with, or None if there are none."""
    text = kwargs.get(TEXT_ARGUMENT)
    if text is None:
        names = list(inspect.signature(forward_of(module)).parameters)[1:]
        index = names.index(TEXT_ARGUMENT) if TEXT_ARGUMENT in names else len(args)
        text = args[index] if index < len(args) else None
    return text.shape[1] if isinstance(text, Tensor) and text.dim() > 2 else None


SET_PROCESSOR = (
    "call {model}.set_attn_processor(...) with one that calls F.scaled_dot_product_attention, such as diffusers' "
    "{known}"
)


def find(model: nn.Module, taken: set[nn.Module]) -> list[Candidate]:
    """Return the layers of diffusers whose attention is computed by a processor."""
    if "diffusers" not in sys.modules:
        return []
    candidates = []
    for name, module in model.named_modules():
        processor = processor_of(module)
        if processor is None or module in taken:
            continue
        site = _describe(name, module, processor)
        if reason := _unreachable(module, processor, type(model).__name__):
            candidates.append(Candidate(site, None, reason))
        else:
            tokens = OtherTokens(module, _parent(model, name), text_first(_function_of(processor)))
            candidates.append(Candidate(site, SdpaAdapter(site, tokens, stand_in, step_aside)))
    return candidates


def processor_of(module: nn.Module) -> Any:
    """Return the object that computes the attention of a layer of diffusers, or None for any other module."""
    if not any(base.__module__.startswith("diffusers.") for base in type(module).__mro__):
        return None
    processor = vars(module).get("processor", own_modules(module).get("processor"))
    return processor if callable(processor) and "processor" in names_used(forward_of(module)) else None


def _function_of(processor: Any) -> Any:
    """Return the function that a processor runs."""
    own = type(processor).__dict__.get("__call__")
    return (
        own
        if inspect.isfunction(own)
        else forward_of(processor)
        if isinstance(processor, nn.Module)
        else type(processor).__call__
    )


def _functions(processor: Any) -> list[Any]:
    return list(reached(_function_of(processor), type(processor), DEPTH))


def _parent(model: nn.Module, name: str) -> nn.Module | None:
    above = name.rpartition(".")[0]
    return model.get_submodule(above) if above else None


def _describe(name: str, module: nn.Module, processor: Any) -> Site:
    site = Site(name, module, host="diffusers", is_cross=_is_cross(name, module))
    query, key = (
        base_of(layer) if isinstance(layer, nn.Module) else None
        for layer in (getattr(module, n, None) for n in ("to_q", "to_k"))
    )
    site.heads, site.head_dim = first_number(module, HEADS), first_number(module, HEAD_DIM)
    if isinstance(query, nn.Linear):
        site.hidden = query.in_features
        if site.heads and not site.head_dim:
            site.head_dim = query.out_features // site.heads
    if isinstance(key, nn.Linear) and site.head_dim:
        site.kv_heads = key.out_features // site.head_dim
    site.qk_norm = normalises(module)
    words = {word for f in _functions(processor)[:1] for word in (*names_used(f), *f.__code__.co_varnames)}
    site.rope = any(re.search("rotary|rope", word) for word in words)
    # The same classes are used for single-stream layers, which then have no projections for text.
    site.joint = text_first(_function_of(processor)) is not None and getattr(module, "added_kv_proj_dim", 0) is not None
    return site


def _is_cross(name: str, module: nn.Module) -> bool:
    declared = getattr(module, "is_cross_attention", None)
    # Blocks name self attention attn1 and cross attention attn2.
    return declared if isinstance(declared, bool) else is_cross(name, module) or name.rpartition(".")[2] == "attn2"


def _unreachable(module: nn.Module, processor: Any, model: str) -> str:
    """Return why the attention of a processor cannot be routed, or an empty string."""
    kind = type(processor).__name__
    used = set().union(*(names_used(function) for function in _functions(processor)))
    processor_name = "JointAttnProcessor2_0" if getattr(module, "add_q_proj", None) is not None else "AttnProcessor2_0"
    remedy = SET_PROCESSOR.format(model=model, known=processor_name)
    if isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None:
        return (
            f"its processor {kind} holds weights and attends to additional tokens (an IP-Adapter, custom diffusion): "
            f"unload it, or {remedy}"
        )
    if used & {NAME, DISPATCH}:
        return ""
    if reason := without_softmax(module) or ("Linear" in kind and "a linear form"):
        return (
            reason
            if "softmax" in reason
            else f"its processor {kind} computes {reason} of attention, which has no softmax: leave it as it is"
        )
    computation = "an explicit softmax" if "get_attention_scores" in used else "its attention with a custom kernel"
    return f"its processor {kind} computes {computation} and calls neither F.{NAME} nor {DISPATCH}: {remedy}"
