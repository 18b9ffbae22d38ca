"""One call of transformers' attention interface, converted to the arguments of the core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.attention.softmax import logits, normalize
from headwise.attend.core import Call, Packed, Site
from headwise.attend.hosts.layers.declared import names_used
from headwise.attend.hosts.transformers.masks import is_block_mask, is_flash, matrix_of, newest_last, packing_of
from headwise.borders import collected_outputs
from headwise.files.errors import LEAVE_OUT, LOAD_SDPA, SET_SDPA
from headwise.numerics.masked import hide_other_regions

# Our name among transformers' attention implementations, and the attribute of a routed module with its adapter.
KEY = "headwise"
PLACE = "_headwise"
# Keywords that models pass to each layer and that neither the eager nor the sdpa function reads: bookkeeping of
# caches, outputs and losses, and arguments already applied to queries, keys and masks.
IGNORED = frozenset(
    "attention_mask_2d cache_params cache_position cu_seq_lens_k cu_seq_lens_q deterministic grid_thw input_ids "
    "interpolate_pos_encoding is_first_iteration labels layer_idx logits_to_keep max_length_k max_length_q "
    "mm_token_type_ids num_items_in_batch output_attentions output_hidden_states "
    "output_hidden_states_before_downsampling output_router_logits padding_cache past_key_values position_embeddings "
    "position_ids query_length return_dict seq_idx sliding_window target_dtype token_type_ids use_cache "
    "use_top_left_mask".split()
)


# Keywords of the attention itself, which headwise computes too.
TERMS = ("is_causal", "softcap", "s_aux", "position_bias")
# The number of queries that `verify` compares.
COMPARED = 64


class ModuleAdapter(Protocol):
    """The adapter of an attention module that is routed to headwise.

    Attributes:
        asked: the host's implementation when the module was routed.
        config: the config that the module shares with its model.
        fitted: the fitted layer; None while there is none.
        cache: the cache of the running forward, if it has one.
        verified: the eager implementation or kernel whose result was last compared with the core's.
    """

    site: Site
    config: Any
    asked: str
    fitted: FittedLayer | None
    cache: Any
    verified: str

    @property
    def implementation(self) -> str:
        """Return the name of the host's own implementation."""
        ...

    @property
    def plain(self) -> bool:
        """Return whether that is transformers' own eager or sdpa attention, which headwise computes itself."""
        ...

    def original(self) -> Callable[..., Any]:
        """Return the host's own attention function."""
        ...


def routed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for the keys "headwise" and "headwise|..." of transformers' attention interface."""
    adapter, fitted = _adapter_of(module)

    def host(q: Tensor, k: Tensor, v: Tensor, dropout: float = dropout) -> tuple[Tensor, Tensor | None]:
        function = adapter.original()
        if plain:
            return function(module, q, k, v, attention_mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]
        with _as_host_expects(adapter, module, k.shape[1] != key.shape[1]):
            return function(module, q, k, v, attention_mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]

    def original() -> tuple[Tensor, Tensor | None]:
        out, weights = host(query, key, value)
        return out.transpose(1, 2), weights

    plain = adapter.plain
    eager = plain and adapter.implementation == "eager"
    if _paged(adapter, kwargs):
        _refuse_acting(adapter, fitted)
        return host(query, key, value)
    _refuse_unknown(adapter, kwargs)
    _follow_kernel(adapter, module)
    if fitted.idle(module.training):
        # Returned without transposing it twice, which may change what compiled code fuses.
        return host(query, key, value)
    q, k, v, mask, causal, packed = _inputs(adapter, fitted, (query, key, value), attention_mask, kwargs)
    settings = {
        "mask": mask,
        "causal": causal,
        "scale": scaling,
        # The eager functions apply no dropout in evaluation, whatever its argument is.
        "dropout": dropout if module.training or not eager else 0.0,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
        "samples": fitted.samples_in(q.shape[0]) if packed is None else None,
    }
    if _unverified(adapter, fitted, eager):
        with torch.no_grad():
            # Detached: flex attention checks requires_grad of its inputs even under no_grad.
            theirs = host(query.detach(), key.detach(), value.detach(), 0.0)[0].transpose(1, 2)
        verify(adapter, fitted, theirs, q, k, v, settings, packed)
    by_kernel = not plain and not adapter.site.own_attention
    out, weights = fitted.attention(
        q,
        k,
        v,
        original,
        training=module.training,
        need_weights=plain and _weights_wanted(kwargs),
        kernel=(lambda q, k, v: host(q, k, v)[0].transpose(1, 2)) if by_kernel else None,
        packed=packed,
        **settings,
    )
    return out.transpose(1, 2).contiguous(), weights


def _inputs(
    adapter: ModuleAdapter, fitted: FittedLayer, given: tuple[Tensor, Tensor, Tensor], mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool, Packed | None]:
    """Return q, k, v, the mask and whether causality must be added to it, and how rows pack several sequences."""
    packed = _packed(adapter, fitted, given[0], mask, kwargs)
    causal, bias = kwargs.get("is_causal"), kwargs.get("position_bias")
    seen, causal = masking(adapter, given[0], given[1], mask, causal, bias, kwargs, packed)
    q, k, v = _expanded(*given)
    if packed is None:
        ordered, v, seen = newest_last(fitted, adapter.cache, q, k, v, seen, causal)
        _refuse_reordered(adapter, k, ordered)
        k = ordered
    return q, k, v, seen, causal, packed


@contextmanager
def _as_host_expects(adapter: ModuleAdapter, module: nn.Module, repeated: bool) -> Iterator[None]:
    """Set the attributes of the module that the host's function reads: its shared config, and a group size of 1 if the
    keys are already repeated."""
    own, groups = module.config, module.__dict__.get("num_key_value_groups")
    module.config = adapter.config
    if repeated and groups is not None:
        module.num_key_value_groups = 1  # type: ignore[assignment]  # the host's attribute is an int
    try:
        yield
    finally:
        module.config = own
        if repeated and groups is not None:
            module.num_key_value_groups = groups


def _unverified(adapter: ModuleAdapter, fitted: FittedLayer, eager: bool) -> bool:
    """Return whether the host's own attention is still to be compared with the core's, which takes its place."""
    known = torch.compiler.is_compiling() or adapter.verified == adapter.implementation
    return not known and (eager or (not adapter.plain and reads(adapter, fitted)))


def reads(adapter: ModuleAdapter, fitted: FittedLayer) -> bool:
    """Return whether we compute or read the weights of this call, so that our computation must equal the kernel's."""
    acting = fitted.active(adapter.site.module.training)
    reading = any(m.overrides("read") or m.overrides("read_free") for m in acting)
    return adapter.site.own_attention or reading or fitted.armed


def _packed(adapter: ModuleAdapter, fitted: FittedLayer, q: Tensor, mask: Any, kwargs: dict[str, Any]) -> Packed | None:
    """Return how the rows of this call pack several sequences, or None."""
    of_layer: Packed | None = fitted.packing.look()
    arguments = {**kwargs, "attention_mask": mask}
    packing = packing_of(
        adapter.site.name, adapter.implementation, arguments, (q.shape[0], q.shape[2]), fitted.running()
    )
    if packing is None or of_layer is not None:
        return packing if of_layer is None or packing is None else of_layer
    outside = [m for m in fitted.active(adapter.site.module.training) if _acts_outside(m)]
    if outside:
        raise RuntimeError(
            f"{adapter.site.name} tells only its attention call how rows pack several sequences, but {outside[0]!r} "
            f"acts on the layer's input or output: pass cu_seq_lens_q and cu_seq_lens_k to the layer, or {LEAVE_OUT}"
        )
    # The layer's input was recorded as rows, which methods would take for samples.
    fitted.entered.take()
    return packing


def _acts_outside(method: Any) -> bool:
    return any(map(method.overrides, ("hidden", "branch"))) or ("hidden" in method.shapes and method.learns)


def _follow_kernel(adapter: ModuleAdapter, module: nn.Module) -> None:
    """Note the kernel of this call, which may have changed after the methods were fitted.

    Raises RuntimeError if a module prepares its call for flash kernels and was fitted for others, or the reverse.
    """
    now = adapter.implementation
    if not adapter.plain and adapter.site.kernel != now:
        adapter.site.kernel = now
    if is_flash(adapter.asked) == is_flash(now) or "is_flash_attention_requested" not in names_used(
        type(module).forward
    ):
        return
    raise RuntimeError(
        f"{adapter.site.name} was fitted when its model used {adapter.asked!r} and prepares its calls for that, but "
        f"the model now uses {now!r}: set the implementation before regularize() or watch(), or call remove() and fit "
        "again"
    )


# Arguments of attention over a paged cache, whose keys are stored in pages for several requests at once.
PAGED = ("cache", "block_table", "read_index", "k_cache")


def _paged(adapter: ModuleAdapter, kwargs: dict[str, Any]) -> bool:
    return adapter.implementation.startswith("paged|") or any(kwargs.get(name) is not None for name in PAGED)


def _refuse_acting(adapter: ModuleAdapter, fitted: FittedLayer) -> None:
    """Raise RuntimeError if a method, an ablation or a watch is active on a call over a paged cache."""
    acting = fitted.active(adapter.site.module.training)
    if fitted.armed or fitted.gate is not None or any(m.touches_call() or _acts_outside(m) for m in acting):
        raise RuntimeError(
            f"{adapter.site.name} attends over a paged cache ({adapter.implementation!r}), whose keys it does not "
            "pass and whose rows hold several requests: generate with model.generate() without continuous batching, "
            "fold() the methods first if they can be folded, or remove() them"
        )


def _refuse_reordered(adapter: ModuleAdapter, k: Tensor, ordered: Tensor) -> None:
    if not adapter.plain and ordered is not k:
        raise RuntimeError(
            f"{adapter.site.name} attends by {adapter.implementation!r} over a static cache, whose keys are not in "
            f"the order that methods need: use a growing cache (cache_implementation=None), {SET_SDPA}, or {LEAVE_OUT}"
        )


def _adapter_of(module: nn.Module) -> tuple[ModuleAdapter, FittedLayer]:
    adapter: ModuleAdapter | None = module.__dict__.get(PLACE)
    if adapter is None or adapter.fitted is None:
        raise RuntimeError(
            f"{type(module).__name__} asks for the attention implementation {KEY!r} but no method is fitted on it: "
            f"call headwise.regularize(model, ...) instead of setting attn_implementation={KEY!r}"
        )
    return adapter, adapter.fitted


def _refuse_unknown(adapter: ModuleAdapter, kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for keywords that transformers' own attention might read; kernels read theirs themselves."""
    if not adapter.plain:
        return
    unknown = [k for k, x in kwargs.items() if k not in IGNORED and k not in TERMS and x is not None]
    if unknown:
        raise RuntimeError(
            f"{adapter.site.name} passes the keyword(s) {', '.join(sorted(unknown))} to its attention, which headwise "
            f"does not know and will not drop silently; {LEAVE_OUT}, or report the model"
        )


def _expanded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Learned queries may have batch size 1, and keys fewer heads than values.
    batch = max(q.shape[0], k.shape[0])
    q, k, v = (x if x.shape[0] == batch else x.expand(batch, *x.shape[1:]) for x in (q, k, v))
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return q, k, v


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Return whether the weights are requested, by keyword or by transformers' collector of outputs."""
    if kwargs.get("output_attentions"):
        return True
    return any("attentions" in key for key in collected_outputs())


def masking(
    adapter: ModuleAdapter,
    q: Tensor,
    k: Tensor,
    mask: Any,
    is_causal: bool | None,
    bias: Tensor | None,
    kwargs: dict[str, Any],
    packed: Packed | None,
) -> tuple[Tensor | None, bool]:
    """Return the mask (B|1, H|1, T|1, N), bool or float including the bias, and whether causality must be added.

    For packed rows the mask is that of their sequences, (S, H|1, L|1, L).
    """
    implementation, name = adapter.implementation, adapter.site.name
    if not adapter.plain and (mask is None or is_block_mask(mask) or mask.dim() == 2):
        causal = bool(getattr(adapter.site.module, "is_causal", True) if is_causal is None else is_causal)
        causal = causal and q.shape[2] > 1
        window, kept = kwargs.get("sliding_window"), bias is None and not adapter.site.own_attention
        mask, causal = matrix_of(mask, q, k.shape[2], causal, window, packed, kept)
        return _with_bias(mask, causal, bias if packed is None or bias is None else packed.unpack_matrix(bias), q, k)
    # The interface's rule: without a mask, the module declares causality, and a single query sees all keys. The eager
    # functions apply only the causality in their mask.
    causal = bool(getattr(adapter.site.module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and mask is None and q.shape[2] > 1 and implementation != "eager"
    if mask is not None:
        mask = _four_dimensional(mask, q, k, name)
        if adapter.site.shifted and mask.dtype != torch.bool:
            mask = hide_other_regions(mask)
    if packed is not None:
        assert mask is not None
        mask, bias = packed.unpack_matrix(mask), None if bias is None else packed.unpack_matrix(bias)
    return _with_bias(mask, causal, bias, q, k)


def _with_bias(
    mask: Tensor | None, causal: bool, bias: Tensor | None, q: Tensor, k: Tensor
) -> tuple[Tensor | None, bool]:
    if bias is None:
        return mask, causal
    least = torch.finfo(bias.dtype).min
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return bias.masked_fill(~seen, least), False
    if mask is None:
        return bias, False
    return (bias.masked_fill(~mask, least) if mask.dtype == torch.bool else bias + mask), False


def _four_dimensional(mask: Tensor, q: Tensor, k: Tensor, name: str) -> Tensor:
    fits = isinstance(mask, Tensor) and mask.dim() <= 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    while fits and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    whole = (max(q.shape[0], k.shape[0]), q.shape[1], q.shape[2], k.shape[2])
    if not fits or any(n not in (1, m) for n, m in zip(mask.shape, whole, strict=True)):
        description = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise RuntimeError(
            f"{name} passes a mask that is {description}; supported are bool and float masks that broadcast to "
            f"(B, H, T, N) = {whole}: {LOAD_SDPA}, or {LEAVE_OUT}"
        )
    return mask


def verify(
    adapter: ModuleAdapter,
    fitted: FittedLayer,
    theirs: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: dict[str, Any],
    packed: Packed | None = None,
) -> None:
    """Compare the result of a family's own eager function or kernel (B, H, T, Dv) with the core's, once per
    implementation: it may compute something that its keywords do not show.

    In long rows only the queries in the middle are compared, where causality, windows and padding all have an effect.

    Raises:
        RuntimeError: naming the site and the difference, if the two results differ.
    """
    # Compared at a later call where the host's own numbers are nan, as after rows without keys. Detached, because
    # checkpointing counts the tensors that are saved, and a repeated run does not ask again.
    if q.device.type != "meta" and not all(bool(x.detach().isfinite().all()) for x in (q, k, v)):
        return
    adapter.verified = adapter.implementation
    # Tensors on the meta device have no numbers to compare.
    if q.device.type == "meta":
        return
    groups = q.shape[1] // k.shape[1]
    with torch.no_grad():
        kernel = not adapter.plain
        if kernel:
            # A half-precision kernel rounds its inputs, but less between its steps than half-precision products do.
            q, k, v = (x.to(theirs.dtype).float() for x in (q, k, v))
        theirs = theirs.float()
        if packed is not None:
            q, k, v, theirs = (packed.unpack_heads(x) for x in (q, k, v, theirs))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        call = Call(fitted, q, k, v, **{**settings, "dropout": 0.0})
        if call.queries > COMPARED:
            rows = slice((call.queries - COMPARED) // 2, (call.queries + COMPARED) // 2)
            call, theirs = call.block(rows), theirs[:, :, rows]
        # Kernels skip padded queries, and packed rows have no result for them.
        largest = _difference(call, theirs, skips=packed is not None or kernel)
        exact = q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type) and not kernel
        # A missing term (a bias, a cap, a gate) changes the output by its own size. Rounding is below the bound: sums
        # in another order in fp32, and the 8 bits of bfloat16 to which the host rounds between its steps.
        bound = (1e-3 if exact else 5e-2) * max(0.0 if kernel else 1.0, float(theirs.abs().max()))
    if not largest <= bound:
        own = adapter.implementation == "eager" and not kernel
        kind = "its own eager attention" if own else f"an attention {adapter.implementation!r}"
        # Without a mask, a function must separate the sequences of a row itself.
        across = "a function that looks across the sequences of a packed row needs use_cache=False and a mask function"
        hint = f"{across} (AttentionMaskInterface.register); else " if packed is not None and kernel else ""
        raise RuntimeError(
            f"{adapter.site.name} ({type(adapter.site.module).__name__}) has {kind} that does more than its keywords "
            f"tell: it differs by {largest:.2g} from softmax(scale·QKᵀ + mask)·V: {hint}{LOAD_SDPA}, or {LEAVE_OUT}"
        )


def _difference(call: Call, theirs: Tensor, *, skips: bool) -> float:
    """Return by how much a host's result (B, H, T, Dv) differs from the core's at most.

    A row without keys is left out, as it may have any result in the host, even nan; with `skips` padded queries too.
    """
    weights = normalize(logits(call, call.q, call.k), call.sinks, empty=call.mask is not None)
    difference = ((weights.to(call.v.dtype) @ call.v).float() - theirs).abs()
    allowed = call.allowed()
    if allowed is not None:
        difference = difference.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    real = call.real_queries_at_hand() if skips else None
    if real is not None:
        difference = difference.masked_fill(~real[:, None, :, None], 0.0)
    return float(difference.max())
