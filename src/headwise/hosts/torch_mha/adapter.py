"""torch.nn.MultiheadAttention, alone and inside nn.TransformerEncoder and nn.TransformerDecoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.forward import Entered
from headwise.core.method import Method, touches_call
from headwise.core.site import Site
from headwise.files.errors import LEAVE_OUT
from headwise.hosts.layers.declared import Candidate, is_cross
from headwise.hosts.layers.residual import last_before_sum, refusal
from headwise.hosts.torch_mha.call import Arguments, across, attend, fits


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
        # nn.TransformerDecoderLayer's name for cross attention; encoders that use it have no `self_attn` beside it.
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
        lengths = [rows.shape[0] for rows in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        place = torch.arange(padded.shape[1], device=padded.device)
        missing = place >= torch.tensor(lengths, device=padded.device)[:, None]
        out, _ = attend(fitted, padded, padded, padded, Arguments(missing, False, None, True, False))
        return torch.nested.as_nested_tensor([rows[:n] for rows, n in zip(out, lengths, strict=True)]), None


def _acts(fitted: FittedLayer) -> bool:
    """Return whether a method acts on the layer in evaluation too, or its values are carried to other layers."""
    acting: Any = fitted.active(False)
    return fitted.shares_values or any(
        touches_call(m) or m.overrides("hidden") or m.overrides("branch") for m in acting
    )
