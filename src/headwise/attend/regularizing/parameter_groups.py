"""Parameter groups with separate weight decays for attention and MLPs, and none for norms, biases and vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from headwise.attend import hosts, projections
from headwise.attend.core import Site
from headwise.attend.hosts.layers.declared import LIKE
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.adapted import adapters_of, base_of, originals
from headwise.attend.projections.leaves import Leaf
from headwise.attend.regularizing.handle import handle
from headwise.borders import BatchNormLayer, Convolution, own_modules
from headwise.files.arguments import finite_number, is_a

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def mlp_weights(model: nn.Module, sites: list[Site], attention: set[int]) -> list[nn.Parameter]:
    """Return the other matrices of the blocks that hold attention layers, also those of experts and their router.

    The block of a layer is the smallest module around it that holds further matrices. It is below any stack of similar
    layers and below the model itself, which holds embeddings and heads. `attention` holds the ids of attention's
    weights.
    """
    weights: dict[int, nn.Parameter] = {}
    for site in sites:
        own = _inside(site)
        for block in _ancestors(model, site):
            if _is_stack(block, sites):
                break
            matrices = [p for p in _matrices(block, own) if id(p) not in attention]
            if matrices:
                weights |= {id(p): p for p in matrices}
                break
    return list(weights.values())


def _inside(site: Site) -> set[int]:
    """Return the ids of the attention layer's own parameters; of a block that computes attention, only the methods'."""
    module = site.module
    if not LIKE.search(type(module).__name__):
        added = own_modules(module).get("headwise")
        return {id(p) for p in added.parameters()} if added is not None else set()
    return {id(p) for p in module.parameters()}


def _ancestors(model: nn.Module, site: Site) -> Iterator[nn.Module]:
    """Return the layer itself, then the modules around it from the inside out, without the model."""
    # A site is named in the model that was regularized, which adapters or DDP may have wrapped since.
    around, parts = site.model or model, site.name.split(".")
    for end in range(len(parts), 0, -1):
        yield around.get_submodule(".".join(parts[:end]))


def _is_stack(module: nn.Module, sites: list[Site]) -> bool:
    """Return whether a module is a stack of layers: two of its children hold attention and have the same type."""
    if not isinstance(module, CONTAINERS):
        return False
    attending = {id(site.module) for site in sites}
    kinds = [type(child) for child in module.children() if any(id(part) in attending for part in child.modules())]
    return len(kinds) > len(set(kinds))


def _matrices(block: nn.Module, own: set[int]) -> Iterator[nn.Parameter]:
    for place, module in block.named_modules():
        norm = type(module).__name__.lower().endswith("norm")
        if isinstance(module, nn.Embedding) or norm or ".headwise" in f".{place}":
            continue
        for name, parameter in module.named_parameters(recurse=False):
            matrix = parameter.ndim > 1 and parameter.numel() > max(parameter.shape)
            if matrix and "bias" not in name and id(parameter) not in own:
                yield parameter


MATRICES = (nn.Linear, nn.Embedding, Convolution)


class ParameterGroups(list[dict[str, Any]]):
    """Parameter groups that know the model and attention layers of their parameters; to torch's optimizers, a list.

    Attributes:
        model: as it was given to `parameter_groups`.
        sites: its attention layers, also those that methods cannot reach.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], model: nn.Module, sites: list[Site]) -> None:
        super().__init__(groups)
        self.model, self.sites = model, sites


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    attention_weight_decay: float | None = None,
    *,
    mlp_weight_decay: float | None = None,
    example: Any = None,
    **rest: Any,
) -> ParameterGroups:
    """Return parameter groups for an optimizer, with separate weight decays for attention (q, k, v, o) and the MLPs.

    Every trainable parameter is in exactly one group, also if it is shared. Attention weights are those of the sites,
    MLP weights the other matrices of a block with attention; neither is identified by name. Not decayed are biases,
    norms, and all vectors and scalars: gains, sinks, logit scales, class tokens, the learned scalars of methods.
    Embeddings, heads and other matrices get `weight_decay`.

    Args:
        model: plain or regularized, also compiled or wrapped.
        lr: learning rate of all groups.
        weight_decay: of all other parameters that decay.
        attention_weight_decay: of q, k, v and o weights; None means `weight_decay`.
        mlp_weight_decay: of the matrices of the blocks' MLPs; None means `weight_decay`.
        example: a batch, if an attention layer's layout cannot be known without one.
        rest: further settings of all groups, such as `betas`.

    Returns:
        A list of the groups "attention", "mlp", "other" and "undecayed" (key "name"), without the empty ones. It also
        knows the model, from which headwise's optimizers tell the heads of each weight.

    Raises:
        ValueError: if a decay is negative, the weights of an attention layer cannot be identified, or the model has
            no weights to which a given decay would apply.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> groups = headwise.parameter_groups(model, lr=1e-3, weight_decay=0.1, attention_weight_decay=0.01)
        >>> {group["name"]: group["weight_decay"] for group in groups}
        {'attention': 0.01, 'mlp': 0.1, 'undecayed': 0.0}
        >>> optimizer = torch.optim.AdamW(groups)
    """
    is_a("model", model, nn.Module, "a torch module")
    # a tensor is a learning rate that torch's optimizers accept too
    if not isinstance(lr, Tensor):
        finite_number("lr", lr)
    decays = {
        "attention": weight_decay if attention_weight_decay is None else attention_weight_decay,
        "mlp": weight_decay if mlp_weight_decay is None else mlp_weight_decay,
        "other": weight_decay,
        "undecayed": 0.0,
    }
    _check_decays(weight_decay, attention_weight_decay, mlp_weight_decay)
    sites = _sites(model, example)
    kinds = {id(parameter): "attention" for parameter in _attention(sites)}
    kinds |= {id(parameter): "mlp" for parameter in mlp_weights(model, sites, set(kinds))}
    if attention_weight_decay is not None and "attention" not in kinds.values():
        raise ValueError(
            f"attention_weight_decay={attention_weight_decay:g}: {type(model).__name__} has no attention layer"
        )
    if mlp_weight_decay is not None and "mlp" not in kinds.values():
        raise ValueError(
            f"mlp_weight_decay={mlp_weight_decay:g}: no attention layer of {type(model).__name__} has an MLP in its "
            "block. Leave it out, or build groups by hand"
        )
    kinds = {id(parameter): "undecayed" for parameter in undecayed(model)} | kinds
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in decays}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[kinds.get(id(parameter), "other")].append(parameter)
    filled = [
        {"name": name, "lr": lr, "params": parameters, "weight_decay": decays[name], **rest}
        for name, parameters in groups.items()
        if parameters
    ]
    return ParameterGroups(filled, model, sites)


def _check_decays(weight_decay: float, attention: float | None, mlp: float | None) -> None:
    decays = {"weight_decay": weight_decay, "attention_weight_decay": attention, "mlp_weight_decay": mlp}
    for name, value in decays.items():
        if name == "weight_decay" or value is not None:
            finite_number(name, value)


def _attention(sites: list[Site]) -> list[nn.Parameter]:
    weights: list[nn.Parameter] = []
    for site in sites:
        for module, name in _weights(site):
            # of a weight that several parameters make, those that are matrices
            made = originals(base_of(module), name)
            weights += [p for p in made if len(made) == 1 or p.numel() > max(p.shape, default=1)]
            weights += adapters_of(module)
        # An adapter for nn.MultiheadAttention wraps the whole site.
        wrapper = _wrapper(site)
        weights += adapters_of(wrapper) if wrapper is not None else []
    return weights


def _wrapper(site: Site) -> nn.Module | None:
    return None if site.model is None or not site.name else site.model.get_submodule(site.name.rpartition(".")[0])


def _sites(model: nn.Module, example: Any) -> list[Site]:
    """Return all attention layers, also those that methods cannot reach; the handle of a regularized model has them."""
    try:
        candidates = handle(model).found
    except ValueError:
        candidates = hosts.find(model)
        for candidate in candidates:
            candidate.site.model, candidate.site.example = model, example
    return [candidate.site for candidate in candidates]


def _weights(site: Site) -> list[tuple[nn.Module, str]]:
    try:
        return projections.of(site).parameters()
    except ProjectionError as error:
        # The head of a row does not matter here, so all matrices of a layer named attention count.
        if LIKE.search(type(site.module).__name__) or LIKE.search(site.name.rpartition(".")[2]):
            return [(leaf.module, "weight") for leaf in Leaf.below(site.module, site.name)]
        raise ValueError(f"parameter_groups cannot tell attention's weights from others: {error}") from error


def undecayed(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that must not decay: norms, biases, vectors and scalars."""
    parameters = []
    for place, module in model.named_modules():
        norm = type(module).__name__.lower().endswith("norm") or isinstance(module, BatchNormLayer)
        for name, parameter in module.named_parameters(recurse=False):
            matrix = (isinstance(module, MATRICES) and name == "weight") or (
                name == "original" and ".parametrizations." in f".{place}"
            )
            vector = parameter.numel() == max(parameter.shape, default=1) and not matrix
            # A learned bias of the logits, such as T5's, is an embedding named bias.
            bias = "bias" in name or "bias" in place.rpartition(".")[2]
            if norm or vector or bias:
                parameters.append(parameter)
    return parameters
