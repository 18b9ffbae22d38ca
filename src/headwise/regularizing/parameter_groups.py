"""Parameter groups: attention's projections get a weight decay of their own, and what must not decay gets none."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise import hosts, projections
from headwise.core.site import Site
from headwise.hosts.host import LIKE
from headwise.projections import ProjectionError
from headwise.projections.adapted import adapters_of, base_of, underlying
from headwise.projections.leaves import leaves
from headwise.regularizing.handle import handle

MATRICES = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    attention_weight_decay: float | None = None,
    *,
    example: Any = None,
    **rest: Any,
) -> list[dict[str, Any]]:
    """Give parameter groups for an optimizer, in which attention's q, k, v and o weights have their own weight decay.

    Every trainable parameter stands in exactly one group, shared ones once. Attention is found by the sites, not by names. Not
    decayed: biases, norms, and whatever is a vector or a scalar: gains, sinks, logit scales, class tokens, the learned
    scalars of methods. Embeddings and other matrices take `weight_decay`.

    Args:
        model: plain or regularized, also compiled or wrapped.
        lr: learning rate of all groups.
        weight_decay: of everything else that decays.
        attention_weight_decay: of q, k, v and o weights; None means `weight_decay`.
        example: a batch, where an attention layer's layout cannot be seen without one.
        rest: further settings of all groups, such as `betas`.

    Returns:
        Groups "attention", "other" and "undecayed" (key "name"), those that are empty left out.

    Raises:
        ValueError: where a decay is negative, or the weights of an attention layer cannot be told.
    """
    attention_weight_decay = weight_decay if attention_weight_decay is None else attention_weight_decay
    for name, value in (("weight_decay", weight_decay), ("attention_weight_decay", attention_weight_decay)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    attention = {id(parameter) for parameter in _attention(model, example)}
    undecayed = {id(parameter) for parameter in _undecayed(model)}
    groups: dict[str, dict[str, Any]] = {
        "attention": {"params": [], "weight_decay": attention_weight_decay},
        "other": {"params": [], "weight_decay": weight_decay},
        "undecayed": {"params": [], "weight_decay": 0.0},
    }
    for parameter in model.parameters():
        if parameter.requires_grad:
            which = (
                "attention" if id(parameter) in attention else "undecayed" if id(parameter) in undecayed else "other"
            )
            groups[which]["params"].append(parameter)
    return [{"name": name, "lr": lr, **group, **rest} for name, group in groups.items() if group["params"]]


def _attention(model: nn.Module, example: Any) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for site in _sites(model, example):
        for module, name in _weights(site):
            found += [underlying(base_of(module), name), *adapters_of(module)]
        # An adapter around nn.MultiheadAttention stands around the site.
        around = _around(site)
        found += adapters_of(around) if around is not None else []
    return found


def _around(site: Site) -> nn.Module | None:
    return None if site.model is None or not site.name else site.model.get_submodule(site.name.rpartition(".")[0])


def _sites(model: nn.Module, example: Any) -> list[Site]:
    """Give all attention layers, also those that methods cannot reach; a regularized model's are known already."""
    try:
        found = handle(model).found
    except ValueError:
        found = hosts.find(model)
        for one in found:
            one.site.model, one.site.example = model, example
    return [one.site for one in found]


def _weights(site: Site) -> list[tuple[nn.Module, str]]:
    try:
        return projections.of(site).parameters()
    except ProjectionError as error:
        # Which head a row belongs to does not matter here: all matrices of a layer named attention are attention's.
        if LIKE.search(type(site.module).__name__):
            return [(one.module, "weight") for one in leaves(site.module, site.name)]
        raise ValueError(f"parameter_groups cannot tell attention's weights from others: {error}") from error


def _undecayed(model: nn.Module) -> list[nn.Parameter]:
    found = []
    for place, module in model.named_modules():
        norm = type(module).__name__.lower().endswith("norm") or isinstance(module, nn.modules.batchnorm._NormBase)
        for name, parameter in module.named_parameters(recurse=False):
            matrix = (
                (isinstance(module, MATRICES)
                and name == "weight")
                or (name == "original" and ".parametrizations." in f".{place}")
            )
            vector = parameter.numel() == max(parameter.shape, default=1) and not matrix
            # A learned bias of the logits, such as T5's, is an embedding named bias.
            bias = "bias" in name or "bias" in place.rpartition(".")[2]
            if norm or vector or bias:
                found.append(parameter)
    return found
