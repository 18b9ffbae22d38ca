"""Reparametrization: adding parametrizations to weights and removing them without a trace.

What is assigned to the `.data` of a weight that methods compute would be lost, as a merged adapter is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from headwise.attend import hosts, projections
from headwise.attend.core import MethodState, Site
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.adapted import MERGE, MERGERS, is_adapted
from headwise.attend.projections.block import Block
from headwise.attend.projections.leaves import Leaf
from headwise.attend.projections.named import sibling_output
from headwise.attend.projections.spectral import Spectral
from headwise.borders import Convolution, TransposedConvolution, own_modules, own_parameters

LAYERS = ("attention", "all")
# The key in a parametrization's `__dict__` under which the name of the method that added it is stored.
OURS = "_headwise_reparametrized"
# The key in a module's `__dict__` under which the names of the methods that write its plain weights after each step are
# stored, by the name of the weight.
HOLDS = "_headwise_holds"
Make = Callable[[Tensor, list[Block]], nn.Module | None]


def reparametrize(module: nn.Module, name: str, by: nn.Module) -> None:
    """Compute `module.name` by the module `by` from the parameter, which stays the same object.

    Raises:
        ValueError: if the parameter is already parametrized.
    """
    if (chain := _chain(module, name)) is not None:
        known = ", ".join(type(part).__name__ for part in chain)
        raise ValueError(f"{type(module).__name__}.{name} is parametrized already by {known}; remove that first")
    # Registration removes the parameter from the module's parameters; `restore` needs their original order.
    order = list(own_parameters(module))
    # Unchecked: torch would compute the whole weight twice to see that its shape stays.
    parametrize.register_parametrization(module, name, by, unsafe=True)
    # torch made this class for the module alone, with an error that knows no remedy
    type(module).__getstate__ = _unsaved  # type: ignore[assignment]
    guard(module, name)
    if isinstance(by, Spectral):
        chain = _chain(module, name)
        assert chain is not None
        by.place(chain)
    module.__dict__.setdefault("_headwise_places", {})[name] = order


def _unsaved(module: nn.Module) -> Any:
    """Raise RuntimeError with the remedy, where torch.save and pickle ask for the state of a parametrized module."""
    raise RuntimeError(
        f"this {type(module).__bases__[0].__name__} has weights that headwise's methods compute, and torch saves such "
        "modules by state_dict() alone: call handle.save_pretrained(folder), or handle.fold() before torch.save(model)"
    )


def restore(module: nn.Module, name: str, *, folded: bool) -> None:
    """Make `module.name` a plain parameter again: the same object, at its old position among the parameters.

    `folded` says whether it gets the values that the parametrization computes, bit for bit, or its own values back.
    """
    # A deep copy shares the class that torch made for the parametrized module, which torch modifies on removal.
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
    parametrize.remove_parametrizations(module, name, leave_parametrized=folded)
    orders = module.__dict__.get("_headwise_places", {})
    order = orders.pop(name, [])
    if not orders:
        module.__dict__.pop("_headwise_places", None)
    now = dict(own_parameters(module))
    # State dicts list parameters in the order of registration.
    for key in [key for key in order if key in now] + [key for key in now if key not in order]:
        own_parameters(module)[key] = own_parameters(module).pop(key)


def without_numbers(site: Site) -> str | None:
    """Return the reason why a method that reads weights when it is fitted cannot act on the meta device, or None."""
    if any(p.is_meta for p in site.module.parameters()):
        return "needs the numbers of the weights, and these have none (meta device): load them first, then regularize"
    return None


def refusal(site: Site, who: str) -> str | None:
    """Return the reason why the weights of a site cannot be reparametrized, or None if they can."""
    if reason := without_numbers(site):
        return reason
    try:
        layer = projections.of(site)
        for stream in layer.streams():
            stream.need(("" if stream.latent else "qkv") + ("" if stream.o is None else "o"), who, of="patches")
    except ProjectionError as error:
        return str(error)
    for block in layer.blocks:
        if block.adapted:
            # Scaling the base weight would not scale the adapter's part.
            return f"{who} scales whole weights, and {block.maker} is adapted: {MERGE}"
        if reason := block.unreadable():
            return f"{who} needs the whole weight; {block.where} {reason}"
    return None


def put_on(site: Site, state: MethodState, who: str, layers: str, make: Make) -> None:
    """Reparametrize a site's q, k, v and o weights, and with `layers="all"` the rest of the model once.

    Args:
        layers: "attention", "qk" (only its queries and keys) or "all": also every other linear layer and convolution of
            the model, except attention layers that are not regularized, and a head that shares its matrix with an
            embedding.
        make: returns the parametrization of a weight with these blocks, or None to leave it plain.

    Raises:
        ValueError: if a weight is parametrized already, is shared or cannot be reparametrized; then nothing is changed.
    """
    parts: list[tuple[nn.Module, str]] = []
    state.mark()
    state.keep("parts", parts)
    try:
        for module, name, blocks in matrices(site, state, who, layers):
            owner = _owner(module, name)
            # Layers that share a weight also share its reparametrization.
            if owner == who:
                continue
            if owner is not None:
                raise ValueError(f"{who} and {owner} would both compute {blocks[0].where}: use one of them")
            if writers := module.__dict__.get(HOLDS, {}).get(name):
                raise ValueError(f"{who} computes {blocks[0].where}, and {writers[0]} writes it: use one of them")
            by = make(getattr(module, name), blocks)
            if by is None:
                continue
            by.__dict__[OURS] = who
            reparametrize(module, name, by)
            parts.append((module, name))
    except BaseException:
        take_off(state, folded=False)
        raise


def take_off(state: MethodState, *, folded: bool) -> None:
    """Make the weights that `put_on` reparametrized plain again, with the computed values if `folded`."""
    for module, name in state.kept("parts"):
        chain = _chain(module, name)
        if folded and chain is not None and isinstance(chain[0], Spectral):
            chain[0].settle()
        restore(module, name, folded=folded)
    state.kept("parts").clear()


def hold(state: MethodState, who: str, weights: list[tuple[nn.Module, str, str]]) -> list[int]:
    """Mark plain weights that a method writes after each step, and return the indices of the newly marked ones.

    Args:
        weights: module, name in it, and qualified name; a weight that several layers share is marked once.

    Raises:
        ValueError: if a weight is parametrized or frozen; then nothing is marked.
    """
    marked: list[tuple[nn.Module, str, str]] = []
    state.keep("held", marked)
    indices = []
    try:
        for index, (module, name, path) in enumerate(weights):
            if who in module.__dict__.get(HOLDS, {}).get(name, ()):
                continue
            _check_plain(module, name, path, who)
            module.__dict__.setdefault(HOLDS, {}).setdefault(name, []).append(who)
            marked.append((module, name, who))
            indices.append(index)
    except BaseException:
        release(state)
        raise
    return indices


def _check_plain(module: nn.Module, name: str, path: str, who: str) -> None:
    if (owner := _owner(module, name)) is not None:
        raise ValueError(f"{who} writes {path}, and {owner} computes it: use one of them")
    if (chain := _chain(module, name)) is not None:
        known = ", ".join(type(part).__name__ for part in chain)
        raise ValueError(f"{who} writes {path}, which is parametrized by {known}; remove that first")
    if not getattr(module, name).requires_grad:
        raise ValueError(
            f"{who} would rewrite {path}, which is frozen (requires_grad=False): train it, or leave the layer out "
            "with where="
        )


def release(state: MethodState) -> None:
    """Remove the marks of `hold`."""
    for module, name, who in state.kept("held"):
        marks = module.__dict__[HOLDS]
        marks[name].remove(who)
        if not marks[name]:
            del marks[name]
        if not marks:
            del module.__dict__[HOLDS]
    state.kept("held").clear()


def matrices(site: Site, state: MethodState, who: str, layers: str) -> list[tuple[nn.Module, str, list[Block]]]:
    """Return the weights of a site with their blocks; `layers` is as in `put_on`.

    The rest of the model comes with the method's first site alone: reading it for each would take quadratic time.
    """
    if layers == "qk":
        parts = [(module, name, [b for b in blocks if b.kind in "qk"]) for module, name, blocks in _of_site(site)]
        return [part for part in parts if part[2]]
    return [*_of_site(site), *(_outside_attention(site, who) if layers == "all" and state.first else ())]


def chains(states: Iterable[MethodState]) -> list[parametrize.ParametrizationList]:
    """Return the lists of parametrizations that `put_on` made, each with the weight it computes from."""
    found = [_chain(module, name) for state in states for module, name in state.kept("parts")]
    return [chain for chain in found if chain is not None]


def spectrals(states: Iterable[MethodState]) -> list[Spectral]:
    """Return the `Spectral` parametrizations that `put_on` added."""
    first = (own_modules(chain)["0"] for chain in chains(states))
    return [part for part in first if isinstance(part, Spectral)]


def _chain(module: nn.Module, name: str) -> parametrize.ParametrizationList | None:
    # Asked in each step: reading attributes and items of modules takes ten times as long.
    chains = own_modules(module).get("parametrizations")
    return None if chains is None else own_modules(chains).get(name)  # type: ignore[return-value]  # torch's own list


def is_reparametrized(module: nn.Module, name: str) -> bool:
    """Return whether a method has reparametrized a parameter; other parametrizations do not count."""
    return _owner(module, name) is not None


def _owner(module: nn.Module, name: str) -> str | None:
    """Return the name of the method that reparametrized a weight, or None."""
    chain = _chain(module, name)
    return None if chain is None else chain[0].__dict__.get(OURS)


def _of_site(site: Site) -> list[tuple[nn.Module, str, list[Block]]]:
    layer = projections.of(site)
    return [
        (module, name, [b for b in layer.blocks if b.module is module and b.name == name])
        for module, name in layer.parameters()
    ]


def _outside_attention(site: Site, who: str) -> list[tuple[nn.Module, str, list[Block]]]:
    """Return the weights of the model's linear layers and convolutions outside of attention layers."""
    model = site.model
    if model is None:
        return []
    adapted = next((name for name, module in model.named_modules() if is_adapted(module)), None)
    if adapted is not None:
        raise ValueError(f'layers="all" scales whole weights, and {adapted} is adapted: {MERGE}')
    attention = _of_attention(model)
    # A head that shares its matrix with an embedding stays plain: the embedding looks up rows of that parameter.
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    names: dict[int, str] = {}
    weights: list[tuple[nn.Module, str, list[Block]]] = []
    for leaf in Leaf.below(model, ""):
        module, weight = leaf.module, leaf.module.weight
        if module in attention or id(weight) in embedded or _owner(module, "weight") == who:
            continue
        if not (isinstance(module, nn.Linear | Convolution) or leaf.transposed):
            continue
        if id(weight) in names:
            raise ValueError(
                f"{leaf.name} and {names[id(weight)]} share one weight, which two reparametrizations would pull apart: "
                'use layers="attention"'
            )
        names[id(weight)] = leaf.name
        transposed = leaf.transposed or isinstance(module, TransposedConvolution)
        assert isinstance(weight, Tensor)
        size = weight.shape[1 if transposed else 0]
        block = Block("w", module, f"{leaf.name}.weight", "weight", slice(0, size), 1, size, transposed)
        weights.append((module, "weight", [block]))
    return weights


def _of_attention(model: nn.Module) -> set[nn.Module]:
    """Return all modules of attention layers, including output projections next to the attention module."""
    modules: set[nn.Module] = set()
    for match in hosts.find(model):
        modules.update(match.site.module.modules())
        parent = model.get_submodule(match.site.name.rpartition(".")[0])
        output = sibling_output(match.site, parent)
        if output is not None:
            modules.add(output.module)
    return modules


class ComputedWeight(Tensor):
    """A computed weight, whose operations give plain tensors, and whose data cannot be replaced."""

    # as of parameters: operations take as long as on a plain tensor
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The numbers, as a plain tensor; assignment raises RuntimeError."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise RuntimeError(
            "headwise's methods compute this weight, so what is merged into it would be lost: call handle.fold() "
            "before adapters are merged"
        )


def guard(module: nn.Module, name: str) -> None:
    """Let `module.name`, a property of torch's class for this parametrized module alone, give guarded weights."""
    cls = type(module)
    compute = cls.__dict__[name]

    def read(self: nn.Module) -> Any:
        weight = compute.fget(self)
        # compiled graphs write to no weight
        if torch.compiler.is_compiling() or MERGERS not in sys.modules or type(weight) is not Tensor:
            return weight
        return weight.as_subclass(ComputedWeight)

    setattr(cls, name, property(read, compute.fset))
