"""Kernels of transformers' attention interface without a GPU: reference functions with the very signatures of flash
attention 2, 3 and 4, flex attention uncompiled, and a function as users register them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers.integrations.flex_attention as flex_integration
import transformers.masking_utils as masking
import transformers.modeling_flash_attention_utils as flash_utils
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask, sdpa_mask


def attend(q, k, v, scale, causal, window, softcap, sinks, dropout=0.0):
    """Compute softmax(scale·QKᵀ)·V of one batch in flash attention's layout, (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    queries, keys = s.shape[-2:]
    # Flash attention 2 and later put the last query on the last key.
    ahead = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = ahead >= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    left, right = (None if x is None or x < 0 else x for x in window)
    seen = seen if left is None else seen & (ahead <= left)
    seen = seen if right is None else seen & (-ahead <= right)
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    a = F.dropout(s.softmax(-1)[..., :keys], dropout)
    return (a @ v).transpose(1, 2)


def of_sequences(one, q, k, v, cu_seqlens_q, cu_seqlens_k):
    """Compute each sequence of a packed row (total, H, D) apart."""
    bounds = zip(cu_seqlens_q[:-1], cu_seqlens_q[1:], cu_seqlens_k[:-1], cu_seqlens_k[1:], strict=True)
    return torch.cat([one(q[a:b][None], k[c:d][None], v[c:d][None])[0] for a, b, c, d in bounds])


# Flash attention 2.8


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, None, dropout_p)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    def one(q, k, v):
        return attend(q, k, v, softmax_scale, causal, window_size, softcap, None, dropout_p)

    return of_sequences(one, q, k, v, cu_seqlens_q, cu_seqlens_k)


# Flash attention 3, with the sinks that hub builds of it take


def flash3_func(
    q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False, s_aux=None
):
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, s_aux)


def flash3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    deterministic=False,
    s_aux=None,
):
    def one(q, k, v):
        return attend(q, k, v, softmax_scale, causal, window_size, softcap, s_aux)

    return of_sequences(one, q, k, v, cu_seqlens_q, cu_seqlens_k)


# Flash attention 4, which gives its log-sum-exp beside the output


def flash4_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
):
    return attend(q, k, v, softmax_scale, causal, window_size, softcap, learnable_sink), None


def flash4_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    deterministic=False,
):
    def one(q, k, v):
        return attend(q, k, v, softmax_scale, causal, window_size, softcap, learnable_sink)

    return of_sequences(one, q, k, v, cu_seqlens_q, cu_seqlens_k), None


def user_function(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attend as functions do that users model on transformers' sdpa function: keys are repeated here, as often as the
    module says."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = attention_mask is None and query.shape[2] > 1 and module.is_causal
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def varlen_function(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Attend within the sequences of a row as functions do that take no mask: by bounds, else by positions."""
    assert attention_mask is None and query.shape[0] == 1
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None:
        first = (kwargs["position_ids"][0] == 0).nonzero()[:, 0]
        bounds = torch.cat([first, first.new_tensor([query.shape[2]])])

    def one(q, k, v):
        return attend(q, k, v, scaling, module.is_causal, (-1, -1), 0.0, None, dropout)

    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return of_sequences(one, *rows, bounds, bounds)[None], None


FLASH = {
    "flash_attention_2": (flash_attn_func, flash_attn_varlen_func),
    "flash_attention_3": (flash3_func, flash3_varlen_func),
    "flash_attention_4": (flash4_func, flash4_varlen_func),
    "kernels-community/flash-attn2": (flash_attn_func, flash_attn_varlen_func),
}
KINDS = [*FLASH, "flex_attention", "users_own"]


def put_in_place(monkeypatch):
    """Let transformers find these functions under their names, as if the packages were installed."""

    def loaded(implementation, attention_wrapper=None, allow_all_kernels=False):
        return *FLASH[implementation], None, flash_utils._pad_input, flash_utils._unpad_input

    monkeypatch.setattr(flash_utils, "_lazy_imports", loaded)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    # Uncompiled, flex attention runs forward in every dtype on every processor.
    monkeypatch.setattr(
        flex_integration,
        "compile_friendly_flex_attention",
        lambda q, k, v, training=False, **more: flex_attention(q, k, v, **more),
    )
    monkeypatch.setattr(
        masking, "create_block_mask", lambda *args, _compile=None, **more: create_block_mask(*args, **more)
    )
    hub = "kernels-community/flash-attn2"
    functions, masks = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    functions |= {hub: functions["flash_attention_2"], "users_own": user_function}
    masks |= {hub: flash_attention_mask, "users_own": sdpa_mask}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    monkeypatch.setattr(AttentionMaskInterface, "_global_mapping", masks)


def use(model, kind):
    """Let a model ask for an implementation, past the checks for installed packages."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation_internal = kind
    return model
