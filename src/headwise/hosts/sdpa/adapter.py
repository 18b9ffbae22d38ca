"""Any module that calls `torch.nn.functional.scaled_dot_product_attention`: timm, nanoGPT-like models, your own."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headwise.core.site import Site
from headwise.hosts.code import calls, passes_true, uses
from headwise.hosts.host import Found, Hooks, attends_across, first_number, looks_like_attention, over_channels
from headwise.hosts.sdpa import call as fused_call
from headwise.hosts.sdpa.limits import Limits
from headwise.hosts.sdpa.windows import declared

if TYPE_CHECKING:
    from headwise.regularizing.fitted_site import Fitted

NAME = "scaled_dot_product_attention"
HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads", "nhead", "nheads", "num_head")
OFF = (
    "its fused attention is switched off (fused_attn=False), so that it computes an explicit softmax: switch it on, for timm "
    "with timm.layers.set_fused_attn(True, experimental=True) before the model is made"
)


class FusedAdapter:
    """Marks the module's forward, so that the calls inside it are this site's."""

    limits: Limits

    def __init__(self, site: Site) -> None:
        self.site = site
        # As the module declares them: the site's own number may be what an example showed.
        self.heads = site.heads
        self.fitted: Fitted | None = None
        self.hooks: Hooks | None = None
        self.handles: list[Any] = []
        # The calls seen while the model is examined on an example.
        self.record: list[tuple[Tensor, Tensor, Tensor, int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedAdapter:
        twin = object.__new__(FusedAdapter)
        memo[id(self)] = twin
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        _give_back_with(twin)
        return twin

    def attach(self, fitted: Fitted) -> None:
        """Hook the module and, for the first site of all, stand in for the function."""
        output = fitted.site.projections().need("o", "branch")[0].module if fitted.needs("branch") else None
        self.fitted, self.limits = fitted, Limits(fitted)
        module = self.site.module
        self.hooks = Hooks(fitted, inside=output is not None and any(m is output for m in module.modules()))
        self.handles = [
            module.register_forward_pre_hook(self.hooks.before, with_kwargs=True),
            module.register_forward_pre_hook(self.enter, prepend=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]
        if output is not None:
            self.handles.append(output.register_forward_hook(self.hooks.after))
        fused_call.stand_in()
        _give_back_with(self)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Say that the calls from now on are this site's."""
        fused_call.enter(self, module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Say that they no longer are."""
        fused_call.leave(self)
        # None: the forward raised, and its error is the one to show.
        if output is not None and self.hooks is not None:
            self.hooks.check_output()

    def detach(self) -> None:
        """Unhook; the last site of all gives the function back."""
        for handle in self.handles:
            handle.remove()
        fused_call.leave(self)
        self.fitted, self.hooks, self.handles = None, None, []
        fused_call.step_aside()


def _give_back_with(adapter: FusedAdapter) -> None:
    # A fitted model may be thrown away without remove().
    weakref.finalize(adapter, fused_call.step_aside).atexit = False


def find(model: nn.Module, taken: set[nn.Module]) -> list[Found]:
    """Find the modules whose own code calls fused attention, in their forward or in what it calls by name."""
    found: dict[nn.Module, Found] = {}
    names = {name: module for name, module in model.named_modules() if module not in taken}
    calling = [
        n for n, m in names.items() if not _container(m) and calls(m, NAME, depth=2 if looks_like_attention(m) else 1)
    ]
    for name in calling:
        layer = _owner(name, names, calling)
        found.setdefault(names[layer], _found(model, layer, names[layer]))
    return list(found.values())


def _container(module: nn.Module) -> bool:
    return isinstance(module, nn.MultiheadAttention | nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _owner(name: str, names: dict[str, nn.Module], calling: list[str]) -> str:
    """Give the name of the layer around a module that calls the function but holds no weights: that is the site."""
    layer = name
    while layer and next(names[layer].parameters(), None) is None:
        layer = layer.rpartition(".")[0]
        while layer and _container(names[layer]):
            layer = layer.rpartition(".")[0]
    inside = [n for n in calling if n != layer and (not layer or n.startswith(f"{layer}."))]
    # Around several of them it is no attention layer: each stays a site of its own.
    return layer if layer in names and inside in ([], [name]) else name


def _found(model: nn.Module, name: str, module: nn.Module) -> Found:
    site = Site(name, module, host="fused", is_cross=attends_across(name, module))
    site.heads = first_number(module, *HEADS)
    site.head_dim = first_number(module, "head_dim", "dim_head", "head_size", "d_head")
    site.kv_heads = first_number(module, "num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads") or site.heads
    site.qk_norm = any(_is_norm(getattr(module, n, None)) for n in ("q_norm", "k_norm", "norm_q", "norm_k", "qk_norm"))
    site.rope = uses(module, "rot|rope") and any(_has_rope(m) for m in model.modules())
    if passes_true(module, "is_causal") or True in (
        getattr(module, "is_causal", None),
        getattr(module, "causal", None),
    ):
        site.causal = True
    declared(model, site)
    reason = over_channels(module) or (OFF if getattr(module, "fused_attn", True) is False else "")
    return Found(site, None if reason else FusedAdapter(site), reason)


def _is_norm(module: Any) -> bool:
    return isinstance(module, nn.Module) and not isinstance(module, nn.Identity)


def _has_rope(module: nn.Module) -> bool:
    return any(
        "rope" in name or "rotary" in name for name, child in module.__dict__.items() if child is not None
    ) or any(
        "rope" in name or "rotary" in name
        for name, child in (*module._modules.items(), *module._buffers.items())
        if child is not None
    )
