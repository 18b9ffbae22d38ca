"""One call of transformers' attention interface, brought into the form the core understands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.attention.softmax import logits, normalize
from headwise.core.call import Call
from headwise.core.masked import hide_other_regions
from headwise.core.remedies import LEAVE_OUT
from headwise.hosts.layers.remedies import LOAD_SDPA, SET_SDPA
from headwise.hosts.transformers.cache import newest_last
from headwise.hosts.transformers.routed import KEY, PLACE, Routed

# Keywords that models hand down to each layer and that neither an eager nor the sdpa function reads: bookkeeping of caches,
# outputs and losses, and what was applied to queries, keys and masks before.
IGNORED = frozenset(
    "attention_mask_2d cache_params cache_position cu_seq_lens_k cu_seq_lens_q deterministic grid_thw input_ids "
    "interpolate_pos_encoding is_first_iteration labels layer_idx logits_to_keep max_length_k max_length_q "
    "mm_token_type_ids num_items_in_batch output_attentions output_hidden_states "
    "output_hidden_states_before_downsampling output_router_logits padding_cache past_key_values position_embeddings "
    "position_ids query_length return_dict seq_idx sliding_window target_dtype token_type_ids use_cache "
    "use_top_left_mask".split()
)


def routed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand behind the key "headwise" of transformers' attention interface."""
    adapter, fitted = _standing_on(module)
    _refuse_unknown(adapter, kwargs)
    given = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "is_causal": is_causal}
    extra = {k: x for k, x in given.items() if x is not None} | kwargs

    def original(dropout: float = dropout) -> tuple[Tensor, Tensor | None]:
        host = adapter.original()
        out, weights = host(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extra)
        return out.transpose(1, 2), weights

    if fitted.idle(module.training):
        # The host's own result as it is: no transpose there and back, which may change what compiled code fuses.
        host = adapter.original()
        return host(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extra)
    eager = adapter.implementation == "eager"
    mask, causal = masking(adapter, query, key, attention_mask, is_causal, position_bias)
    q, k, v = _matched(query, key, value)
    k, v, mask = newest_last(adapter, fitted, q, k, v, mask, causal)
    settings = {
        "mask": mask,
        "causal": causal,
        "scale": scaling,
        # The eager functions drop nothing in evaluation whatever they are told.
        "dropout": dropout if module.training or not eager else 0.0,
        "softcap": softcap,
        "sinks": s_aux,
        "samples": fitted.samples_in(q.shape[0]),
    }
    if eager and not torch.compiler.is_compiling() and not adapter.verified:
        verify(adapter, fitted, original, q, k, v, settings)
    out, weights = fitted.attention(
        q, k, v, original, training=module.training, need_weights=_weights_wanted(kwargs), **settings
    )
    return out.transpose(1, 2).contiguous(), weights


def _standing_on(module: nn.Module) -> tuple[Routed, FittedLayer]:
    adapter: Routed | None = module.__dict__.get(PLACE)
    if adapter is None or adapter.fitted is None:
        raise RuntimeError(
            f"{type(module).__name__} asks for the attention implementation {KEY!r} but no method is fitted on it: "
            f"call headwise.regularize(model, ...) instead of setting attn_implementation={KEY!r}"
        )
    return adapter, adapter.fitted


def _refuse_unknown(adapter: Routed, kwargs: dict[str, Any]) -> None:
    unknown = [k for k, x in kwargs.items() if k not in IGNORED and x is not None]
    if unknown:
        raise RuntimeError(
            f"{adapter.site.name} passes the keyword(s) {', '.join(sorted(unknown))} to its attention, which headwise does not "
            f"know and will not drop silently; {LEAVE_OUT}, or report the model"
        )


def _matched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Learned queries may come once for the whole batch, and keys in fewer heads than values.
    batch = max(q.shape[0], k.shape[0])
    q, k, v = (x if x.shape[0] == batch else x.expand(batch, *x.shape[1:]) for x in (q, k, v))
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return q, k, v


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    """Return whether the weights are asked for: by keyword, or by the collector that gathers them from modules' outputs."""
    if kwargs.get("output_attentions"):
        return True
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def masking(
    adapter: Routed, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool | None, bias: Tensor | None
) -> tuple[Tensor | None, bool]:
    """Return the mask, (B|1, H|1, T|1, N) bool or float with the bias in it, and whether causality is to be added."""
    implementation, name = adapter.implementation, adapter.site.name
    if implementation not in ("eager", "sdpa"):
        raise RuntimeError(
            f"{name} now asks for the attention implementation {implementation!r}, whose masks are not those of a matrix: "
            f"{SET_SDPA}"
        )
    # The interface's rule: without a mask, causality is the module's own, and a single query sees all keys. The eager
    # functions know no causality but their mask's.
    causal = bool(getattr(adapter.site.module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and mask is None and q.shape[2] > 1 and implementation != "eager"
    if mask is not None:
        mask = _four(mask, q, k, name)
        if adapter.site.shifted and mask.dtype != torch.bool:
            mask = hide_other_regions(mask)
    if bias is None:
        return mask, causal
    least = torch.finfo(bias.dtype).min
    if causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        return bias.masked_fill(~seen, least), False
    if mask is None:
        return bias, False
    return (bias.masked_fill(~mask, least) if mask.dtype == torch.bool else bias + mask), False


def _four(mask: Tensor, q: Tensor, k: Tensor, name: str) -> Tensor:
    fits = isinstance(mask, Tensor) and mask.dim() <= 4 and (mask.dtype == torch.bool or mask.is_floating_point())
    while fits and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    whole = (max(q.shape[0], k.shape[0]), q.shape[1], q.shape[2], k.shape[2])
    if not fits or any(n not in (1, m) for n, m in zip(mask.shape, whole, strict=True)):
        shown = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise RuntimeError(
            f"{name} passes a mask that is {shown}; understood is bool or float that broadcasts to (B, H, T, N) = {whole}: "
            f"{LOAD_SDPA}, or {LEAVE_OUT}"
        )
    return mask


def verify(
    adapter: Routed, fitted: FittedLayer, original: Any, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]
) -> None:
    """Compare a family's own eager function with the core once: what its keywords do not tell must not be lost.

    Raises:
        RuntimeError: naming the site and the difference, where the two compute something else.
    """
    adapter.verified = True
    # There are no numbers to compare.
    if q.device.type == "meta":
        return
    groups = q.shape[1] // k.shape[1]
    with torch.no_grad():
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        call = Call(fitted, q, k, v, **{**settings, "dropout": 0.0})
        weights = normalize(logits(call, q, k), call.sinks, empty=call.mask is not None)
        ours = (weights.to(v.dtype) @ v).float()
        theirs = original(dropout=0.0)[0].float()
        allowed = call.allowed()
        apart = (ours - theirs).abs()
        if allowed is not None:
            apart = apart * allowed.any(-1, keepdim=True)
        largest = float(apart.max())
        exact = q.dtype == torch.float32 and not torch.is_autocast_enabled(q.device.type)
        # An omitted term (a bias, a cap, a gate) shows at the size of the output. Rounding stays below: sums in another order in
        # fp32, and the 8 bits of bfloat16 in what the host rounds between its steps.
        bound = (1e-3 if exact else 5e-2) * max(1.0, float(theirs.abs().max()))
    if largest > bound:
        raise RuntimeError(
            f"{adapter.site.name} ({type(adapter.site.module).__name__}) has an eager attention of its own that does more than "
            f"its keywords tell: it differs by {largest:.2g} from softmax(scale·QKᵀ + mask)·V: {LOAD_SDPA}, or {LEAVE_OUT}"
        )
