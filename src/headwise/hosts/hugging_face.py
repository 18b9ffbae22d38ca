"""transformers 5.x, through its attention interface and its mask interface."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..site import Site
from .host import Found, Hooks, first_number, is_cross, names_used

if TYPE_CHECKING:
    from ..fitted import Fitted

KEY = "headwise"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Implementations whose masks are those of a plain (B, 1, T, N) matrix.
PLAIN = ("eager", "sdpa", KEY)
IGNORED = frozenset(
    "position_ids cache_position output_attentions output_hidden_states use_cache return_dict cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k past_key_values num_items_in_batch position_embeddings layer_idx deterministic target_dtype "
    "attention_mask_2d labels is_first_iteration token_type_ids use_top_left_mask sliding_window".split()
)


def find(model: nn.Module, taken: set[nn.Module]) -> list[Found]:
    """Find the modules whose forward asks transformers' attention interface for their computation."""
    if "transformers" not in sys.modules:
        return []
    found: list[Found] = []
    for name, module in model.named_modules():
        if module in taken or INTERFACE not in names_used(type(module).forward):
            continue
        config = getattr(module, "config", None)
        site = _site(name, module, config)
        if config is None or not hasattr(config, "_attn_implementation"):
            found.append(Found(site, None, "it asks transformers' attention interface but keeps no config to route by"))
        elif config._attn_implementation not in (None, *PLAIN):
            kind = config._attn_implementation
            found.append(
                Found(
                    site,
                    None,
                    f"its attention implementation is {kind!r}, whose masks are not those of a matrix: load the model with "
                    "attn_implementation='sdpa'",
                )
            )
        else:
            found.append(Found(site, HuggingFaceAdapter(site)))
    return found


def _site(name: str, module: nn.Module, config: Any) -> Site:
    site = Site(name, module, host="transformers", is_cross=is_cross(name, module))
    own = ("num_heads", "num_attention_heads", "n_heads", "n_head")
    site.heads = first_number(module, *own) or first_number(config, *own, "decoder_attention_heads", "encoder_attention_heads")
    site.head_dim = first_number(module, "head_dim", "attention_head_size", "key_value_proj_dim", "dim_head")
    groups = first_number(module, "num_key_value_groups") or 1
    site.kv_heads = first_number(module, "num_key_value_heads", "num_kv_heads")
    if site.kv_heads is None and site.heads is not None:
        site.kv_heads = site.heads // groups
    site.hidden = first_number(config, "hidden_size", "d_model", "dim", "n_embd")
    site.qk_norm = isinstance(getattr(module, "q_norm", None), nn.Module) or isinstance(getattr(module, "q_layernorm", None), nn.Module)
    site.rope = "apply_rotary_pos_emb" in names_used(type(module).forward) or "rotary_emb" in dict(module.named_children())
    causal = getattr(module, "is_causal", None)
    site.causal = causal if isinstance(causal, bool) else None
    return site


class HuggingFaceAdapter:
    """Gives one attention module a config of its own that names our implementation; other modules keep theirs."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.fitted: Fitted | None = None
        self.config: Any = None
        self.implementation: str | None = None
        self.handles: list[Any] = []

    def attach(self, fitted: Fitted) -> None:
        """Route the module's attention through `fitted`."""
        register()
        module = self.site.module
        self.fitted, self.config = fitted, module.config
        self.implementation = self.config._attn_implementation or "eager"
        # A shallow copy: the model's own config, shared with others, still names the host's implementation and mask.
        own = copy.copy(self.config)
        own._attn_implementation_internal = KEY
        module.config = own
        module.__dict__["_headwise"] = self
        hooks = Hooks(fitted)
        self.handles = [module.register_forward_pre_hook(hooks.before, with_kwargs=True)]
        if fitted.needs("branch"):
            self.handles.append(self.site.projections().o.module.register_forward_hook(hooks.after))

    def detach(self) -> None:
        """Give the module its shared config back."""
        self.site.module.config = self.config
        self.site.module.__dict__.pop("_headwise", None)
        for handle in self.handles:
            handle.remove()
        self.fitted, self.handles = None, []

    def original(self) -> Any:
        """Give the host's own attention function."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = getattr(sys.modules[type(self.site.module).__module__], "eager_attention_forward", None)
        if self.implementation == "eager":
            return eager
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, eager)


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
    adapter = module.__dict__.get("_headwise")
    if adapter is None:
        raise RuntimeError(
            f"{type(module).__name__} asks for the attention implementation 'headwise' but no method is fitted on it: "
            "call headwise.regularize(model, ...) instead of setting attn_implementation='headwise'"
        )
    unknown = sorted(k for k, x in kwargs.items() if k not in IGNORED and x is not None)
    if unknown:
        raise RuntimeError(
            f"{adapter.site.name} passes the keyword(s) {', '.join(unknown)} to its attention, which headwise does not know "
            "and will not drop silently; leave this site out with where=, or report the model"
        )
    given = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias, "is_causal": is_causal}
    extra = {k: x for k, x in given.items() if x is not None}

    def original() -> tuple[Tensor, Tensor | None]:
        out, weights = adapter.original()(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **extra, **kwargs
        )
        return out.transpose(1, 2), weights

    mask, causal = _mask(adapter, query, key, attention_mask, is_causal, position_bias)
    out, weights = adapter.fitted.attention(
        query,
        key,
        value,
        original,
        training=module.training,
        need_weights=bool(kwargs.get("output_attentions")),
        mask=mask,
        causal=causal,
        scale=scaling,
        dropout=dropout,
        softcap=softcap,
        sinks=s_aux,
        samples=adapter.fitted.samples_in(query.shape[0]),
    )
    return out.transpose(1, 2).contiguous(), weights


def _mask(
    adapter: HuggingFaceAdapter, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool | None, bias: Tensor | None
) -> tuple[Tensor | None, bool]:
    # The interface's rule: without a mask, causality is the module's own, and a single query sees all keys. The eager
    # function knows no causality but its mask's.
    causal = bool(getattr(adapter.site.module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and mask is None and q.shape[2] > 1 and adapter.implementation != "eager"
    if mask is not None and mask.dim() != 4:
        raise RuntimeError(f"{adapter.site.name} passes a mask of shape {tuple(mask.shape)}; (B, 1, T, N) is understood")
    if mask is not None:
        mask = mask[..., : k.shape[2]]
    if bias is None:
        return mask, causal
    if mask is not None:
        mask = bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
        return mask, causal
    return bias, causal


def register() -> None:
    """Register the attention function and, under the same key, the mask function: without it padding would be dropped."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(KEY, routed)
    AttentionMaskInterface.register(KEY, sdpa_mask)
