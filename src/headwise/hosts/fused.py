"""Any module that calls `torch.nn.functional.scaled_dot_product_attention`: timm, nanoGPT-like models, your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import attention as core
from .. import passes
from ..site import Site
from .host import Found, Hooks, calls, first_number, is_cross, looks_like_attention

if TYPE_CHECKING:
    from ..fitted import Fitted

NAME = "scaled_dot_product_attention"


class _Current:
    """The site whose forward runs now; a plain attribute, which compiled graphs can follow."""

    fitted: Fitted | None = None


current = _Current()


def routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for `F.scaled_dot_product_attention`: calls inside a fitted site go through its methods."""
    fitted = current.fitted

    def original() -> tuple[Tensor, None]:
        return (
            core.fused(
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            ),
            None,
        )

    if fitted is None:
        return original()[0]
    q, k, v, mask, back = _four(fitted.site, query, key, value, attn_mask)
    out, _ = fitted.attention(
        q,
        k,
        v,
        lambda: (back.to4(original()[0]), None),
        training=fitted.site.module.training,
        mask=mask,
        causal=is_causal,
        scale=scale,
        dropout=dropout_p,
        samples=fitted.samples_in(q.shape[0]),
    )
    return back.from4(out)


class _Shape:
    """How a call's leading dimensions map to (B, H): 3-D calls have no head dimension, 5-D ones carry windows."""

    def __init__(self, shape: torch.Size, heads_at: int) -> None:
        self.shape, self.heads_at = shape, heads_at

    def to4(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x
        if x.dim() == 3:
            return x.unsqueeze(1)
        return x.movedim(self.heads_at, -3).flatten(0, -4)

    def from4(self, x: Tensor) -> Tensor:
        if len(self.shape) == 4:
            return x
        if len(self.shape) == 3:
            return x.squeeze(1)
        lead = [n for i, n in enumerate(self.shape[:-2]) if i != self.heads_at]
        return x.unflatten(0, lead).movedim(-3, self.heads_at)


def _four(site: Site, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None, _Shape]:
    at = q.dim() - 3
    if q.dim() > 4 and site.heads is not None and q.shape[at] != site.heads:
        at = next((i for i in range(1, q.dim() - 2) if q.shape[i] == site.heads), at)
    back = _Shape(q.shape, at)
    if mask is not None and q.dim() != 4:
        whole = mask.expand(*q.shape[:-2], mask.shape[-2], mask.shape[-1])
        mask = back.to4(whole)
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return back.to4(q), back.to4(k), back.to4(v), mask, back


class FusedAdapter:
    """Marks the module's forward, so that the calls inside it are this site's."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.fitted: Fitted | None = None
        self.handles: list[Any] = []

    def attach(self, fitted: Fitted) -> None:
        """Hook the module and, for the first site of all, stand in for the function."""
        self.fitted = fitted
        module, hooks = self.site.module, Hooks(fitted)
        self.handles = [
            module.register_forward_pre_hook(hooks.before, with_kwargs=True),
            module.register_forward_pre_hook(self.enter, prepend=True),
            module.register_forward_hook(self.leave),
        ]
        if fitted.needs("branch"):
            self.handles.append(fitted.site.projections().o.module.register_forward_hook(hooks.after))
        F.scaled_dot_product_attention = routed

    def enter(self, module: nn.Module, args: Any) -> None:
        """Say that the calls from now on are this site's."""
        current.fitted = self.fitted

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Say that they no longer are."""
        current.fitted = None

    def detach(self) -> None:
        """Unhook; the last site of all gives the function back."""
        for handle in self.handles:
            handle.remove()
        fitted, self.fitted, self.handles = self.fitted, None, []
        current.fitted = None
        if not any(f is not fitted and f.site.host == "fused" and f.alive for f in passes.enrolled()):
            F.scaled_dot_product_attention = core.fused


def find(model: nn.Module, taken: set[nn.Module]) -> list[Found]:
    """Find the modules whose own forward calls fused attention, and attention-like ones that do not."""
    found: list[Found] = []
    for name, module in model.named_modules():
        if module in taken or isinstance(module, nn.MultiheadAttention | nn.ModuleList | nn.Sequential):
            continue
        if calls(type(module), NAME, depth=2 if looks_like_attention(module) else 1) and _innermost(module):
            found.append(_found(name, module))
    return found


def _innermost(module: nn.Module) -> bool:
    inner = [m for m in module.modules() if m is not module]
    return not any(looks_like_attention(m) and calls(type(m), NAME, depth=2) for m in inner)


def _found(name: str, module: nn.Module) -> Found:
    site = Site(name, module, host="fused", is_cross=is_cross(name, module))
    site.heads = first_number(module, "num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "nhead")
    site.head_dim = first_number(module, "head_dim", "dim_head", "head_size", "d_head")
    site.kv_heads = first_number(module, "num_kv_heads", "n_kv_heads", "num_key_value_heads") or site.heads
    site.qk_norm = any(_is_norm(getattr(module, n, None)) for n in ("q_norm", "k_norm", "norm_q", "qk_norm"))
    if getattr(module, "fused_attn", True) is False:
        return Found(site, None, "its fused attention is switched off (fused_attn=False): switch it on, for timm with timm.layers.set_fused_attn(True) before the model is made")
    return Found(site, FusedAdapter(site))


def _is_norm(module: Any) -> bool:
    return isinstance(module, nn.Module) and not isinstance(module, nn.Identity)
