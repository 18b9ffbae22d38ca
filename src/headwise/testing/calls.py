"""Attention calls of each kind that run through methods in either form, and comparisons of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend import Call, FittedLayer, Method, Site
from headwise.attend.core import SharedState
from headwise.attend.hosts import refusal


def standalone_site(
    q: Tensor, k: Tensor, *, cross: bool = False, hidden: Tensor | None = None, depth: int = 1, layers: int = 2
) -> Site:
    """Return a site without a host, for the shapes of q (B, H, T, D) and k (B, Hk, N, D)."""
    site = Site("standalone", nn.Module(), depth=depth, layers=layers, is_cross=cross)
    site.heads, site.kv_heads, site.head_dim = q.shape[1], k.shape[1], q.shape[-1]
    site.hidden = hidden.shape[-1] if hidden is not None else None
    return site


def fit_standalone(
    methods: list[Method], site: Site, *, seed: int = 0, first_values: Tensor | None = None
) -> FittedLayer:
    """Return a layer without a host with methods fitted and their parameters built."""
    fitted = FittedLayer(site, methods, SharedState(seed))
    # Without values of a first layer, this layer is the first.
    fitted.shares_values = first_values is None
    if first_values is not None:
        fitted.shared.forward.begin(None)
        fitted.running().carried[site.stack] = first_values
    for method, state in zip(methods, fitted.states, strict=True):
        if method.overrides("build"):
            method.build(site, state)
    return fitted


def attend_with(
    methods: list[Method],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str = "fast",
    training: bool = True,
    need_weights: bool = False,
    fitted: FittedLayer | None = None,
    cross: bool = False,
    hidden: Tensor | None = None,
    first_values: Tensor | None = None,
    seed: int = 0,
    whole: int | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """Run one call through methods and return the output (B, H, T, Dv) and the sum of their penalties.

    Args:
        form: "fast" or "textbook".
        fitted: from `fit_standalone`, if learned parameters are needed; its draw counter is reset to 0.
        whole: the most entries for which the matrix is built whole and not in blocks of queries; by default as in a
            model.
        settings: mask, causal, scale, dropout, softcap, sinks, samples, as in `Call`.
    """
    fitted = fitted or fit_standalone(
        methods, standalone_site(q, k, cross=cross, hidden=hidden), seed=seed, first_values=first_values
    )
    fitted.passes.recount(0)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    call = Call(fitted, q, k, v, training=training, hidden=hidden, **settings)
    out, _ = fitted.computed(call, form=form, need_weights=need_weights, whole=whole)
    parts = [total / weight for total, weight in call.penalties] + [w * s.sqrt() / n for s, n, w in call.norms]
    return out, torch.stack(parts).sum() if parts else torch.zeros(())


B, H, T, D = 2, 4, 9, 8
KINDS = ("plain", "causal", "padded", "left padded", "sliding", "cross", "grouped", "bias", "sinks", "padded sinks")
CAUSAL = ("causal", "left padded", "sliding", "grouped", "bias", "sinks")


@dataclass
class CallResult:
    """The results of one call.

    Attributes:
        out: the output (B, H, T, D).
        penalty: the sum of the penalties, 0-d.
        grads: the gradient of each input and each learned parameter, None if it got none.
        kernels: the names of the kernels that ran.
        passes: the number of passes that were opened, by drawing, penalizing or carrying.
    """

    out: Tensor
    penalty: Tensor
    grads: dict[str, Tensor | None]
    kernels: set[str]
    passes: int


def tensors(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return q, k, v, the layer's input and first values, and the settings of one kind of call."""
    g = torch.Generator().manual_seed(seed)
    keys = 7 if kind == "cross" else T
    groups = 2 if kind == "grouped" else H
    inputs = {
        "q": torch.randn(B, H, T, D, generator=g),
        "k": torch.randn(B, groups, keys, D, generator=g),
        "v": torch.randn(B, groups, keys, D, generator=g),
        "hidden": torch.randn(B, T, 16, generator=g),
        "first_values": torch.randn(B, H, keys, D, generator=g),
    }
    settings: dict[str, Any] = {}
    order = torch.ones(T, T, dtype=torch.bool).tril()
    if kind in ("causal", "grouped"):
        settings["causal"] = True
    elif kind in ("padded", "cross"):
        settings["mask"] = _padding(keys)
    elif kind == "left padded":
        seen = torch.arange(T) >= torch.tensor([0, 3])[:, None]
        settings["mask"] = seen[:, None, None, :] & order
    elif kind == "sliding":
        settings["mask"] = (order & ~order.tril(-3))[None, None]
    elif kind == "bias":
        settings["mask"] = torch.randn(1, H, T, T, generator=g).to(dtype).masked_fill(~order, float("-inf"))
    elif kind in ("sinks", "padded sinks"):
        settings["sinks"] = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=dtype)
        settings["causal"] = kind == "sinks"
        if kind == "padded sinks":
            settings["mask"] = _padding(keys)
    settings["cross"] = kind == "cross"
    return {name: x.to(dtype) for name, x in inputs.items()}, settings


def _padding(keys: int) -> Tensor:
    return (torch.arange(keys) < torch.tensor([keys, keys - 3])[:, None])[:, None, None, :]


def why_not(method: Method, kind: str) -> str | None:
    """Return why a method cannot run on a kind of call, or None if it can."""
    if not method.touches_call():
        return "acts outside of the attention call"
    inputs, settings = tensors(kind)
    site = standalone_site(inputs["q"], inputs["k"], cross=settings["cross"], hidden=inputs["hidden"])
    site.causal = kind in CAUSAL
    return refusal(method, site)


def run(
    methods: Sequence[Method],
    kind: str,
    form: str,
    dtype: torch.dtype = torch.float32,
    *,
    dropout: float = 0.0,
    whole: int | None = None,
    inputs: dict[str, Tensor] | None = None,
    trained: bool = True,
    training: bool = True,
    seed: int = 2,
) -> CallResult:
    """Return the results of one call, run forward and backward.

    Args:
        methods: in order of action; none gives plain attention.
        kind: one of `KINDS`.
        form: "fast" or "textbook".
        dtype: of the inputs.
        dropout: of the host.
        whole: the most entries for which the matrix is built whole and not in blocks of queries.
        inputs: replace those of `tensors`.
        trained: whether learned parameters are moved away from their initial values.
        training: the mode.
        seed: of torch's own generator.
    """
    defaults, settings = tensors(kind, dtype)
    leaves = {name: x.clone().requires_grad_() for name, x in (inputs or defaults).items()}
    site = standalone_site(leaves["q"], leaves["k"], cross=settings["cross"], hidden=leaves["hidden"])
    fitted = fit_standalone(list(methods), site, first_values=leaves["first_values"])
    g = torch.Generator().manual_seed(1)
    for name, parameter in site.module.named_parameters():
        with torch.no_grad():
            moved = 0.3 * torch.randn(parameter.shape, generator=g)
            parameter.add_(moved if trained else torch.zeros_like(moved))
        leaves[name] = parameter
    torch.manual_seed(seed)
    out, penalty = attend_with(
        list(methods),
        *(leaves[name] for name in "qkv"),
        form=form,
        training=training,
        fitted=fitted,
        dropout=dropout,
        hidden=leaves["hidden"],
        whole=whole,
        **settings,
    )
    real = torch.ones(out.shape[:3], dtype=torch.bool)
    if kind == "left padded":
        real = settings["mask"].any(-1).expand(out.shape[:3])
    cotangent = torch.randn(out.shape, generator=g) * real[..., None]
    loss = (out.float() * cotangent).sum() + penalty
    if loss.requires_grad:
        loss.backward()
    grads = {name: x.grad for name, x in leaves.items()}
    return CallResult(out.detach(), penalty.detach(), grads, fitted.kernels, fitted.passes.count())


def assert_close(
    got: Tensor | None, wanted: Tensor | None, what: str, dtype: torch.dtype = torch.float32, worse: float = 1.0
) -> None:
    """Raise AssertionError with the largest difference if two results differ by more than rounding."""
    if got is None or wanted is None:
        if got is not wanted:
            raise AssertionError(f"{what}: only one of the two runs has it")
        return
    got, wanted = got.detach().float(), wanted.detach().float()
    if not got.isfinite().all():
        raise AssertionError(f"{what} is not finite")
    # The gradient of a scalar, or of a number per head, sums over all queries, and its terms cancel.
    summed = got.dim() <= 1
    limit = (1e-4 if summed else 1e-5) if dtype == torch.float32 else (1e-1 if summed else 4e-2)
    limit *= worse
    # The absolute term is for gradients that are exactly zero but for rounding (of a scale before a norm).
    if (got - wanted).norm() > limit * wanted.norm() + limit * 2e-2:
        raise AssertionError(f"{what}: the largest difference is {(got - wanted).abs().max():.3g}")


def assert_same_run(
    got: CallResult, wanted: CallResult, dtype: torch.dtype = torch.float32, worse: float = 1.0
) -> None:
    """Raise AssertionError if output, penalty or a gradient of two runs differ by more than rounding."""
    assert_close(got.out, wanted.out, "output", dtype, worse)
    assert_close(got.penalty, wanted.penalty, "penalty", dtype, worse)
    for name, grad in wanted.grads.items():
        assert_close(got.grads[name], grad, f"gradient of {name}", dtype, worse)
