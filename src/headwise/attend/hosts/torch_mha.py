"""torch.nn.MultiheadAttention, alone and inside nn.TransformerEncoder and nn.TransformerDecoder.

Every step keeps torch's order of operations, so that a call in which no method acts is bitwise equal to torch's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.attention.softmax import fused
from headwise.attend.core import Method, Site
from headwise.attend.core.shared_state import Entered
from headwise.attend.hosts.layers.branch_walk import last_before_sum
from headwise.attend.hosts.layers.declared import Candidate, is_cross
from headwise.attend.hosts.layers.refusal import refusal
from headwise.borders import packs_projections
from headwise.files.errors import LEAVE_OUT


def find(model: nn.Module, taken: set[nn.Module]) -> list[Candidate]:
    """Return the nn.MultiheadAttention modules, with the encoder layers whose native path would bypass them."""
    candidates: list[Candidate] = []
    modules = dict(model.named_modules())
    layers = [m for m in modules.values() if isinstance(m, nn.TransformerEncoderLayer)]
    for name, module in modules.items():
        if module in taken or not isinstance(module, nn.MultiheadAttention):
            continue
        site = _site(name, module, modules.get(name.rpartition(".")[0]))
        reason = _obstacle(module)
        around = [layer for layer in layers if layer.self_attn is module]
        candidates.append(Candidate(site, None if reason else TorchAdapter(site, around), reason))
    return candidates


def _site(name: str, module: nn.MultiheadAttention, parent: nn.Module | None) -> Site:
    site = Site(name, module, host="torch", heads=module.num_heads, kv_heads=module.num_heads)
    site.head_dim, site.hidden = module.head_dim, module.embed_dim
    if module.kdim != module.embed_dim or module.vdim != module.embed_dim:
        site.is_cross = True
    elif name.rpartition(".")[2] == "multihead_attn":
        # nn.TransformerDecoderLayer's name for cross attention; encoders that use it have no `self_attn` next to it.
        site.is_cross = isinstance(getattr(parent, "self_attn", None), nn.MultiheadAttention)
    else:
        site.is_cross = is_cross(name, module)
    # Pooling heads (SigLIP) attend from a learned query to all tokens.
    site.pooled = not site.is_cross and "pool" in type(parent).__name__.lower()
    return site


def _obstacle(module: nn.MultiheadAttention) -> str:
    if type(module).forward is not nn.MultiheadAttention.forward:
        return (
            f"{type(module).__name__} overrides nn.MultiheadAttention.forward, which headwise replaces: let it "
            "hold an nn.MultiheadAttention instead of deriving from it"
        )
    own = module.__dict__.get("forward")
    if own is not None and not isinstance(getattr(own, "__self__", None), TorchAdapter):
        name = getattr(own, "__qualname__", type(own).__name__)
        return (
            f"its forward was replaced on the module itself by {name}: undo that, call regularize(), replace it again"
        )
    return ""


class TorchAdapter:
    """Replaces the forward of one module; its class, hooks, parameters and state-dict keys are unchanged.

    `layers` are the nn.TransformerEncoderLayers around the module. In eval mode without gradients their native path
    would compute the attention without calling the module.
    """

    def __init__(self, site: Site, layers: list[nn.TransformerEncoderLayer]) -> None:
        self.site, self.layers = site, layers
        self.fitted: FittedLayer | None = None
        self.native: list[int] = []
        self.dropout: Any = None
        # for each method that does not apply to cross attention, the reason
        self.not_across: dict[Method, str] = {}

    @property
    def module(self) -> nn.MultiheadAttention:
        """Return the site's module."""
        module = self.site.module
        assert isinstance(module, nn.MultiheadAttention)
        return module

    def attach(self, fitted: FittedLayer) -> None:
        """Route the module's attention through `fitted`; disable the native path if a method acts in evaluation."""
        self.fitted = fitted
        crossed = replace(self.site, is_cross=True)
        reasons = {} if self.site.is_cross else {method: refusal(method, crossed) for method in fitted.methods}
        self.not_across = {method: reason for method, reason in reasons.items() if reason is not None}
        # Bypasses nn.Module.__setattr__, and changes only this module, not its class.
        self.module.__dict__["forward"] = self.forward
        dropout = last_before_sum(self.site) if fitted.needs("branch") else None
        if dropout is not None:
            fitted.later = Entered()
            self.dropout = dropout.register_forward_hook(self.leave)
        if _acts(fitted):
            # The native path is taken if this flag means relu or gelu. Nothing else reads it (the activation that runs
            # is `layer.activation`), so that 0 disables the path and changes no number.
            self.native = [layer.activation_relu_or_gelu for layer in self.layers]
            for layer in self.layers:
                layer.activation_relu_or_gelu = 0

    def detach(self) -> None:
        """Restore the module's own forward and its layers' native path."""
        for layer, native in zip(self.layers, self.native, strict=False):
            layer.activation_relu_or_gelu = native
        # A wrapper around ours stays, and calls the module's own forward from now on.
        if getattr(self.module.__dict__.get("forward"), "__self__", None) is self:
            del self.module.__dict__["forward"]
        if self.dropout is not None:
            self.dropout.remove()
        self.fitted, self.native, self.dropout = None, [], None

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """Pass the output of the last dropout or norm before the residual through the `branch` stages."""
        fitted = self.fitted
        if fitted is None or fitted.later is None or fitted.later.take() is None:
            return output
        if output.dim() == 2:
            return fitted.leave(output.unsqueeze(0)).squeeze(0)
        first = self.module.batch_first
        y = fitted.leave(output if first else output.transpose(0, 1))
        return y if first else y.transpose(0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Replace nn.MultiheadAttention.forward, with the same arguments and results."""
        arguments = Arguments(key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        fitted = self.fitted
        if fitted is None:
            return self._plain(query, key, value, arguments)
        # In evaluation a layer on which nothing acts keeps torch's own code, its native path and its bits.
        if (self.module.training or _acts(fitted)) and not fitted.idle(self.module.training):
            return self._routed(fitted, query, key, value, arguments)
        result = self._plain(query, key, value, arguments)
        if fitted.armed:
            # The host may take its native path: an observer computes separately, so that no bit of the result changes.
            with torch.no_grad():
                self._routed(fitted, query, key, value, arguments)
        return result

    def _plain(self, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> tuple[Tensor, Tensor | None]:
        return type(self.module).forward(
            self.module,
            query,
            key,
            value,
            key_padding_mask=arguments.key_padding_mask,
            need_weights=arguments.need_weights,
            attn_mask=arguments.attn_mask,
            average_attn_weights=arguments.average_attn_weights,
            is_causal=arguments.is_causal,
        )

    def _routed(
        self, fitted: FittedLayer, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            return self._nested(fitted, query, key, value, arguments)
        if not fits(self.module, query, key, value, arguments):
            # torch's own error names what is wrong with the arguments.
            self._plain(query, key, value, arguments)
            shapes = [tuple(x.shape) for x in (query, key, value)]
            raise RuntimeError(
                f"{self.site.name} was called with query, key and value of shapes {shapes}, which do not fit it"
            )
        self._refuse_across(fitted, query, key)
        return attend(fitted, query, key, value, arguments)

    def _refuse_across(self, fitted: FittedLayer, query: Tensor, key: Tensor) -> None:
        """Raise RuntimeError if a method that acts now does not apply to a call to other tokens."""
        if not self.not_across or not across(self.site, query, key):
            return
        for method in fitted.active(self.module.training):
            if method in self.not_across:
                raise RuntimeError(
                    f"{self.site.name} is called with a key that is not its query, as cross attention is, and "
                    f"{method!r} {self.not_across[method]}; if they are the same tokens, pass one tensor as "
                    f"both, or {LEAVE_OUT}"
                )

    def _nested(
        self, fitted: FittedLayer, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
    ) -> tuple[Tensor, Tensor | None]:
        is_self = query is key and key is value and query.layout == torch.strided
        masked = arguments.key_padding_mask is not None or arguments.attn_mask is not None
        if not is_self or masked or arguments.need_weights or self.module.training:
            raise RuntimeError(
                f"{self.site.name} got nested tensors. Methods support them only in eval mode, in self-attention "
                "on one strided nested tensor, without masks and weights. Pass padded tensors and key_padding_mask= "
                "instead."
            )
        # Methods know padded batches with a mask; the result is nested again.
        lengths = [rows.shape[0] for rows in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        place = torch.arange(padded.shape[1], device=padded.device)
        missing = place >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = attend(fitted, padded, padded, padded, Arguments(missing, False, None, True, False))
        return torch.nested.as_nested_tensor([rows[:n] for rows, n in zip(out, lengths, strict=True)]), None


def _acts(fitted: FittedLayer) -> bool:
    """Return whether a method or gate acts on the layer in evaluation too, or its values are carried to others."""
    acting: Any = fitted.active(False)
    return (
        fitted.shares_values
        or fitted.gate is not None
        or any(m.touches_call() or m.overrides("hidden") or m.overrides("branch") for m in acting)
    )


@dataclass(frozen=True)
class Arguments:
    """The arguments of nn.MultiheadAttention.forward besides query, key and value."""

    key_padding_mask: Tensor | None
    need_weights: bool
    attn_mask: Tensor | None
    average_attn_weights: bool
    is_causal: bool


def fits(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments) -> bool:
    """Return whether the arguments fit the module and each other; if not, torch itself raises."""
    attn, padding = arguments.attn_mask, arguments.key_padding_mask
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        return False
    token_dim = 1 if module.batch_first and query.dim() == 3 else 0
    batch = query.shape[1 - token_dim] if query.dim() == 3 else 1
    sizes = (query.shape[token_dim], key.shape[token_dim])
    same = key.shape == value.shape if packs_projections(module) else key.shape[:-1] == value.shape[:-1]
    if not same or query.shape[-1] != module.embed_dim or (arguments.is_causal and attn is None):
        return False
    if any(m is not None and m.dtype != torch.bool and not m.is_floating_point() for m in (attn, padding)):
        return False
    if attn is not None and tuple(attn.shape) not in (sizes, (batch * module.num_heads, *sizes)):
        return False
    expected = (batch, sizes[1]) if query.dim() == 3 else (sizes[1],)
    return padding is None or tuple(padding.shape) == expected


def across(site: Site, query: Tensor, key: Tensor) -> bool:
    """Return whether a call attends to tokens other than its queries, unless the layer's name says that it is self
    attention."""
    if site.is_cross:
        return True
    if key is query:
        return False
    if "self" in site.name.rpartition(".")[2].lower():
        # Queries and keys may be computed separately from the same tokens; a cache adds earlier keys.
        tokens = 1 if site.module.batch_first and query.dim() == 3 else 0
        return query.shape[tokens] > key.shape[tokens]
    if torch.compiler.is_compiling() or key.shape != query.shape or key.stride() != query.stride():
        return True
    try:
        # Two views of one tensor, such as x.transpose(0, 1) written twice.
        return key.data_ptr() != query.data_ptr()
    except RuntimeError:
        # Tensors of a transform (vmap) have no address.
        return True


def attend(
    fitted: FittedLayer, query: Tensor, key: Tensor, value: Tensor, arguments: Arguments
) -> tuple[Tensor, Tensor | None]:
    """Return the module's forward, (output, weights), with the methods of `fitted` at their stages."""
    module = _module(fitted)
    batched, cross = query.dim() == 3, across(fitted.site, query, key)
    query, key, value = _entered(fitted, query, key, value)
    query, key, value = _tokens_first(query, key, value, batched, module.batch_first)
    q, k, v = _heads(module, *_projected(module, query, key, value))
    extra = k.shape[2] - key.shape[0]
    mask, causal = _mask(arguments, q, extra, query.dtype)
    dropout = module.dropout if module.training else 0.0
    front = extra > 0 and fitted.needs_own_tokens()

    def original() -> tuple[Tensor, Tensor | None]:
        added = None if mask is None else _added(mask, query.dtype)
        out, weights = _own(q, k, v, added, causal, dropout, arguments.need_weights)
        return out, weights.roll(extra, -1) if front and weights is not None else weights

    out, weights = fitted.attention(
        q,
        _extra_first(k, extra, causal, 2) if front else k,
        _extra_first(v, extra, causal, 2) if front else v,
        original,
        training=module.training,
        need_weights=arguments.need_weights,
        mask=_extra_first(mask, extra, causal, -1) if front and mask is not None else mask,
        causal=causal,
        scale=None,
        dropout=dropout,
        cross=cross,
        samples=fitted.samples_in(q.shape[0]),
    )
    if not arguments.need_weights or weights is None:
        weights = None
    else:
        weights = weights.roll(-extra, -1) if front else weights
        weights = weights.mean(dim=1) if arguments.average_attn_weights else weights
        weights = weights if batched else weights.squeeze(0)
    return _left(fitted, out, batched), weights


def _module(fitted: FittedLayer) -> nn.MultiheadAttention:
    module = fitted.site.module
    assert isinstance(module, nn.MultiheadAttention)
    return module


def _entered(fitted: FittedLayer, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pass the queries' tokens through the `hidden` stages; keys and values that are the same tensor follow."""
    batched, batch_first = query.dim() == 3, _module(fitted).batch_first
    x = query if batched and batch_first else query.transpose(0, 1) if batched else query.unsqueeze(0)
    edited = fitted.enter(x)
    if edited is x:
        return query, key, value
    back = edited if batched and batch_first else edited.transpose(0, 1) if batched else edited.squeeze(0)
    return back, back if key is query else key, back if value is query else value


def _tokens_first(
    query: Tensor, key: Tensor, value: Tensor, batched: bool, batch_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, batch, C) inputs; one tensor remains one tensor where torch keeps it so."""
    if not batched:
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if not batch_first:
        return query, key, value
    q = query.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k if value is key else value.transpose(0, 1)


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each (tokens, batch, C), with bias_k and bias_v; parameters are read once per call."""
    bias = module.in_proj_bias
    if not packs_projections(module):
        bq, bk, bv = (None, None, None) if bias is None else bias.chunk(3)
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        q, k, v = F.linear(query, weights[0], bq), F.linear(key, weights[1], bk), F.linear(value, weights[2], bv)
    else:
        q, k, v = _packed(query, key, value, module.in_proj_weight, bias)
    if module.bias_k is not None and module.bias_v is not None:
        batch = query.shape[1]
        k, v = torch.cat([k, module.bias_k.repeat(1, batch, 1)]), torch.cat([v, module.bias_v.repeat(1, batch, 1)])
    return q, k, v


def _packed(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    size = query.shape[-1]
    if key is value and query is key:
        q, k, v = _parts(F.linear(query, weight, bias), 3)
        return q, k, v
    if key is value:
        wq, wkv = weight.split([size, 2 * size])
        bq, bkv = (None, None) if bias is None else bias.split([size, 2 * size])
        q = F.linear(query, wq, bq)
        k, v = _parts(F.linear(key, wkv, bkv), 2)
        return q, k, v
    wq, wk, wv = weight.chunk(3)
    bq, bk, bv = (None, None, None) if bias is None else bias.chunk(3)
    return F.linear(query, wq, bq), F.linear(key, wk, bk), F.linear(value, wv, bv)


def _parts(projected: Tensor, count: int) -> Tensor:
    return projected.unflatten(-1, (count, -1)).movedim(-2, 0).contiguous()


def _heads(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (B, H, T, D), (B, H, N, D) and (B, H, N, D), with the zero key where the module adds one."""
    q, k, v = (x.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    if module.add_zero_attn:
        zero = k.new_zeros(*k.shape[:2], 1, k.shape[3])
        k, v = torch.cat([k, zero], dim=2), torch.cat([v, zero.to(v.dtype)], dim=2)
    return q, k, v


def _mask(arguments: Arguments, q: Tensor, extra: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """Return the mask for (B, H, T, N) and whether causality takes its place, as torch decides.

    Bool (True: allowed) where all masks are bool, else float and added to the logits; extra keys are always allowed.
    """
    if arguments.is_causal and arguments.key_padding_mask is None and not arguments.need_weights:
        return None, True
    parts = []
    if arguments.attn_mask is not None:
        attn = arguments.attn_mask
        parts.append(attn[None, None] if attn.dim() == 2 else attn.unflatten(0, (q.shape[0], q.shape[1])))
    if arguments.key_padding_mask is not None:
        padding = arguments.key_padding_mask
        parts.append(padding.view(q.shape[0], 1, 1, padding.shape[-1]))
    parts = [F.pad(part, (0, extra)) if extra else part for part in parts]
    if not parts:
        return None, False
    if all(part.dtype == torch.bool for part in parts):
        return ~(parts[0] | parts[-1]), False
    added = [_added(~part, dtype) if part.dtype == torch.bool else part for part in parts]
    return added[0] if len(added) == 1 else added[0] + added[1], False


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask in the form that is added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _extra_first(x: Tensor, extra: int, causal: bool, dim: int) -> Tensor:
    """Move the extra keys before the tokens: methods that carry values between layers use the last keys as tokens.

    Under pure causality no query sees the extra keys, which come after all tokens, so they are dropped.
    """
    return x.narrow(dim, 0, x.shape[dim] - extra) if causal else x.roll(extra, dim)


def _own(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the attention as the module itself computes it: fused, or explicit if the weights are requested."""
    if not need_weights:
        return fused(q, k, v, mask, dropout, causal), None
    batch, heads, _, size = q.shape
    scaled = q.flatten(0, 1) * math.sqrt(1.0 / float(size))
    keys = k.flatten(0, 1).transpose(-2, -1)
    if mask is None:
        s = torch.bmm(scaled, keys)
    else:
        # As torch: one mask for all, or one for each sample and head.
        whole = mask[0] if mask.shape[:2] == (1, 1) else mask.expand(batch, heads, -1, -1).flatten(0, 1)
        s = torch.baddbmm(whole, scaled, keys)
    a = F.softmax(s, dim=-1)
    if dropout > 0.0:
        a = F.dropout(a, p=dropout)
    return torch.bmm(a, v.flatten(0, 1)).unflatten(0, (batch, heads)), a.unflatten(0, (batch, heads))


def _left(fitted: FittedLayer, out: Tensor, batched: bool) -> Tensor:
    """Project the heads' output, pass it through the `branch` stages and return it in the layout of the inputs."""
    module = _module(fitted)
    tokens, batch = out.shape[2], out.shape[0]
    y = F.linear(
        out.permute(2, 0, 1, 3).reshape(tokens * batch, module.embed_dim), module.out_proj.weight, module.out_proj.bias
    )
    y = y.view(tokens, batch, module.embed_dim).transpose(0, 1)
    if fitted.later is None:
        y = fitted.leave(y)
    else:
        fitted.later.put(True)
    if not batched:
        return y.squeeze(0)
    return y if module.batch_first else y.transpose(0, 1)
