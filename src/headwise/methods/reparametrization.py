"""Reparametrization: put a parametrization on a parameter and take it off, in the place where the parameter stood."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from headwise import hosts, projections
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.projections import ProjectionError
from headwise.projections.adapted import MERGE, is_adapted
from headwise.projections.block import Block
from headwise.projections.leaves import leaves
from headwise.projections.named import sibling_output
from headwise.projections.spectral import Spectral

LAYERS = ("attention", "all")
# A mark in the `__dict__` of a parametrization: it says which method put it there.
OURS = "_headwise_reparametrized"
# The key, in the `__dict__` of a module, of what writes its plain weights after each step: the names of the methods, by
# that of the weight.
HOLDS = "_headwise_holds"
Make = Callable[[Tensor, list[Block]], nn.Module | None]


def reparametrize(module: nn.Module, name: str, by: nn.Module) -> None:
    """Let `module.name` be computed by `by` from the parameter, which keeps its identity.

    Raises:
        ValueError: where a parametrization stands there already.
    """
    if (chain := _chain(module, name)) is not None:
        known = ", ".join(type(part).__name__ for part in chain)
        raise ValueError(f"{type(module).__name__}.{name} is parametrized already by {known}; remove that first")
    # Registration takes the parameter out of its place among the others; `restore` puts it back there.
    places = list(module._parameters)
    parametrize.register_parametrization(module, name, by)
    module.__dict__.setdefault("_headwise_places", {})[name] = places


def restore(module: nn.Module, name: str, *, folded: bool) -> None:
    """Make `module.name` a plain parameter again: the same object, at its old place among the others.

    Args:
        module: the module.
        name: the parameter.
        folded: whether it takes the values the parametrization computes, bit for bit, or keeps those under it.
    """
    # A deep copy shares the class torch made for the parametrized module: what is taken off must be off this one alone.
    cls = type(module)
    module.__class__ = type(cls.__name__, cls.__bases__, dict(cls.__dict__))
    parametrize.remove_parametrizations(module, name, leave_parametrized=folded)
    kept = module.__dict__.get("_headwise_places", {})
    places = kept.pop(name, [])
    if not kept:
        module.__dict__.pop("_headwise_places", None)
    now = dict(module._parameters)
    # State dicts list parameters in the order of registration.
    for key in [key for key in places if key in now] + [key for key in now if key not in places]:
        module._parameters[key] = module._parameters.pop(key)


def refusal(site: Site, who: str) -> str | None:
    """Say why the weights of a site cannot be reparametrized, or None where they can."""
    if any(p.is_meta for p in site.module.parameters()):
        return "needs the numbers of the weights, and these have none (meta device): load them first, then regularize"
    try:
        found = projections.of(site)
        for one in found.streams():
            one.need(("" if one.latent else "qkv") + ("" if one.o is None else "o"), who, of="patches")
    except ProjectionError as error:
        return str(error)
    for block in found.blocks:
        if block.adapted:
            # what scales the base would leave the adapter's part as it is
            return f"{who} scales whole weights, and {block.maker} is adapted: {MERGE}"
        if reason := block.unreadable():
            return f"{who} needs the whole weight; {block.where} {reason}"
    return None


def put_on(site: Site, state: MethodState, who: str, layers: str, make: Make) -> None:
    """Reparametrize a site's q, k, v and o, and with `layers="all"` the rest of the model once; kept under `parts`.

    Args:
        site: the attention layer.
        state: the method's, on this site.
        who: the method's name.
        layers: "attention", "qk" (its queries and keys alone) or "all": every other linear layer and convolution of the
            model too. Attention layers that are no chosen site stay as they are, and so does a head that shares its
            matrix with an embedding.
        make: gives the parametrization of a weight with these blocks, or None for one that stays plain.

    Raises:
        ValueError: where a weight is parametrized already, is shared or cannot be reparametrized; nothing is changed
            then.
    """
    parts: list[tuple[nn.Module, str]] = []
    state.mark()
    state.keep("parts", parts)
    try:
        for module, name, blocks in matrices(site, who, layers):
            owner = _owner(module, name)
            # Layers that share their weights share the reparametrization too.
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
    """Make the weights that `put_on` took plain again, folded or as they are underneath."""
    for module, name in state.kept("parts"):
        restore(module, name, folded=folded)
    state.kept("parts").clear()


def hold(state: MethodState, who: str, weights: list[tuple[nn.Module, str, str]]) -> list[int]:
    """Mark plain weights that a method writes after each step, and give the places of those it did not hold already.

    Args:
        state: the method's, on one site; `release` takes its marks away.
        who: the method's name.
        weights: module, name in it, and qualified name; layers that share a weight hold it once.

    Raises:
        ValueError: where a weight is parametrized or frozen; nothing is marked then.
    """
    held: list[tuple[nn.Module, str, str]] = []
    state.keep("held", held)
    found = []
    try:
        for place, (module, name, where) in enumerate(weights):
            if who in module.__dict__.get(HOLDS, {}).get(name, ()):
                continue
            _check_plain(module, name, where, who)
            module.__dict__.setdefault(HOLDS, {}).setdefault(name, []).append(who)
            held.append((module, name, who))
            found.append(place)
    except BaseException:
        release(state)
        raise
    return found


def _check_plain(module: nn.Module, name: str, where: str, who: str) -> None:
    if (owner := _owner(module, name)) is not None:
        raise ValueError(f"{who} writes {where}, and {owner} computes it: use one of them")
    if (chain := _chain(module, name)) is not None:
        known = ", ".join(type(part).__name__ for part in chain)
        raise ValueError(f"{who} writes {where}, which is parametrized by {known}; remove that first")
    if not getattr(module, name).requires_grad:
        raise ValueError(
            f"{who} would rewrite {where}, which is frozen (requires_grad=False): train it, or leave the layer out "
            "with where="
        )


def release(state: MethodState) -> None:
    """Take the marks of `hold` away."""
    for module, name, who in state.kept("held"):
        marks = module.__dict__[HOLDS]
        marks[name].remove(who)
        if not marks[name]:
            del marks[name]
        if not marks:
            del module.__dict__[HOLDS]
    state.kept("held").clear()


def matrices(site: Site, who: str, layers: str) -> list[tuple[nn.Module, str, list[Block]]]:
    """Return the weights of a site with their blocks, with `layers="all"` those of the rest of the model too, with "qk"
    q and k alone."""
    if layers == "qk":
        parts = [(module, name, [b for b in blocks if b.kind in "qk"]) for module, name, blocks in _of_site(site)]
        return [part for part in parts if part[2]]
    return [*_of_site(site), *(_beside_attention(site, who) if layers == "all" else ())]


def iterate(state: MethodState) -> None:
    """Take one power iteration of each `Spectral` that `put_on` put on a weight."""
    for module, name in state.kept("parts"):
        chain = _chain(module, name)
        assert chain is not None
        spectral = chain[0]
        assert isinstance(spectral, Spectral)
        spectral.iterate(chain.original)


def _chain(module: nn.Module, name: str) -> parametrize.ParametrizationList | None:
    chains = getattr(module, "parametrizations", {})
    if name not in chains:
        return None
    chain: parametrize.ParametrizationList = chains[name]
    return chain


def is_reparametrized(module: nn.Module, name: str) -> bool:
    """Return whether a method computes a parameter of a module from another one; torch's own parametrizations do not
    count."""
    return _owner(module, name) is not None


def _owner(module: nn.Module, name: str) -> str | None:
    """Name the method that put a parametrization on a weight; None where none did."""
    chain = _chain(module, name)
    return None if chain is None else chain[0].__dict__.get(OURS)


def _of_site(site: Site) -> list[tuple[nn.Module, str, list[Block]]]:
    found = projections.of(site)
    return [
        (module, name, [b for b in found.blocks if b.module is module and b.name == name])
        for module, name in found.parameters()
    ]


def _beside_attention(site: Site, who: str) -> list[tuple[nn.Module, str, list[Block]]]:
    """Return the linear layers and convolutions of the model that belong to no attention layer."""
    model = site.model
    if model is None:
        return []
    adapted = next((name for name, module in model.named_modules() if is_adapted(module)), None)
    if adapted is not None:
        raise ValueError(f'layers="all" scales whole weights, and {adapted} is adapted: {MERGE}')
    attention = _of_attention(model)
    # A head that is the embedding's matrix stays plain: the embedding reads that parameter by its index.
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    seen: dict[int, str] = {}
    found: list[tuple[nn.Module, str, list[Block]]] = []
    for one in leaves(model, ""):
        if one.module in attention or id(one.module.weight) in embedded or _owner(one.module, "weight") == who:
            continue
        if not (isinstance(one.module, nn.Linear | _ConvNd) or one.transposed):
            continue
        if id(one.module.weight) in seen:
            raise ValueError(
                f"{one.name} and {seen[id(one.module.weight)]} share one weight, which two reparametrizations would "
                "pull apart: "
                'use layers="attention"'
            )
        seen[id(one.module.weight)] = one.name
        transposed = one.transposed or isinstance(one.module, _ConvTransposeNd)
        weight = one.module.weight
        assert isinstance(weight, Tensor)
        size = weight.shape[1 if transposed else 0]
        block = Block("w", one.module, f"{one.name}.weight", "weight", slice(0, size), 1, size, transposed)
        found.append((one.module, "weight", [block]))
    return found


def _of_attention(model: nn.Module) -> set[nn.Module]:
    """Return all modules inside attention layers, the output projections that stand beside them included."""
    inside: set[nn.Module] = set()
    for found in hosts.find(model):
        inside.update(found.site.module.modules())
        parent = model.get_submodule(found.site.name.rpartition(".")[0])
        beside = sibling_output(found.site, parent)
        if beside is not None:
            inside.add(beside.module)
    return inside
