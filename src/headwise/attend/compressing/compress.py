"""The function `compress`, which cuts each head's products to their pseudo-rank and reports savings and costs."""

from __future__ import annotations

import reprlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from statistics import median
from typing import Any, Literal

import torch
from torch import nn

from headwise.attend import hosts, projections
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.compressing.exchange import in_place, put, refusal
from headwise.attend.compressing.record import Compressed, LayerCut, Pair
from headwise.attend.compressing.site_cut import FACTORS, Narrow, SiteCut, cut_site, parameters_of
from headwise.attend.core import Site
from headwise.attend.hosts.layers.declared import Candidate
from headwise.attend.projections import Block, ProjectionError, Projections, capture
from headwise.attend.projections.capture import feed
from headwise.attend.regularizing.ablation import candidate_at
from headwise.attend.regularizing.handle_place import HANDLE
from headwise.attend.regularizing.plan import Where, selection
from headwise.borders import forward_hooks_of, forward_pre_hooks_of
from headwise.files.arguments import is_function

ROTARY = (
    "rotary positions act between queries and keys, so that their product depends on the distance of two tokens: "
    'cut only values and output, parts="vo"'
)
NORMED = (
    "queries and keys are normalised, so that the scores are not their weights' product: cut only values and output, "
    'parts="vo"'
)
MULTIHEAD = (
    "nn.MultiheadAttention reads its weights directly and has no smaller form: use a layer that calls "
    "F.scaled_dot_product_attention on its own projections"
)


def reason(site: Site, layout: Projections, part: str, shared: Counter[int]) -> str:
    """Return why a product cannot be cut, or an empty string if it can.

    `shared` counts how often each parameter occurs in the model.
    """
    if isinstance(site.module, nn.MultiheadAttention):
        return MULTIHEAD
    if part == "qk" and site.rope:
        return ROTARY
    if part == "qk" and site.qk_norm:
        return NORMED
    try:
        blocks = layout.need("".join(FACTORS[part]), "compress")
    except ProjectionError as error:
        return str(error)
    return next(filter(None, (_block_reason(block, shared) for block in blocks)), "")


def _block_reason(block: Block, shared: Counter[int]) -> str:
    module = block.module
    if type(module) is not nn.Linear and not block.transposed:
        return (
            f"{block.maker} is a {type(module).__name__}: only a plain linear layer is cut; fold or merge what wraps "
            "it first"
        )
    if block.bias_module is not None and block.bias_module is not module:
        return f"{block.maker} has its bias outside of it, as {type(block.bias_module).__name__}.{block.bias_name}"
    if forward_hooks_of(module) or forward_pre_hooks_of(module):
        return f"{block.maker} has hooks on it, which a smaller layer would lose: remove them first"
    if not all(bool(parameter.detach().isfinite().all()) for parameter in module.parameters()):
        return f"{block.maker} has weights that are not finite"
    if any(shared[id(parameter)] > 1 for parameter in module.parameters()):
        return f"{block.maker} shares its weights with another layer"
    return ""


Parts = Literal["both", "qk", "vo"]
PARTS: dict[str, tuple[str, ...]] = {"both": ("qk", "vo"), "qk": ("qk",), "vo": ("vo",)}
# number of timed pairs of forwards, the plain and the cut model in turn
TIMED = 7


def compress(
    model: nn.Module,
    energy: float = 0.95,
    *,
    parts: Parts = "both",
    where: Where = None,
    example: Any = None,
    loss: Callable[[nn.Module], float] | None = None,
    idle: Mapping[str | int, Sequence[int]] | None = None,
) -> Compressed:
    """Cut W_KᵀW_Q and W_OW_V of every head to their pseudo-rank, in place, with smaller linear layers as projections.

    The pseudo-rank (Kobayashi et al. 2024, arXiv 2410.23819) is the least number of singular values that hold a share
    of their sum. Each head has its own; heads that share keys and values have one together. A bias counts as the weight
    of an input that is always 1. Before anything is cut, each layer is run with other factors of the same products; if
    its output changes, it is refused. `headwise.load_compressed` loads the state dict of a compressed model.

    Args:
        model: any model that `regularize` reaches, not regularized itself (fold or remove its methods first).
        energy: share of the singular values' sum to keep, above 0; 1 keeps all that are not 0, and the outputs up to
            rounding.
        parts: "qk", "vo" or "both". Rotary positions and norms of queries and keys allow only "vo".
        where: which sites are cut: a function of `Site`, or names of sites; None selects every site that can be cut.
        example: a batch (tensor, tuple of arguments or dict of keywords) to find layouts and to time forwards.
        loss: evaluates the model before and after, for example a mean loss over held-out data.
        idle: query heads to remove, by the name or the index of the site as `headwise.sites` lists them, such as the
            least important of `headwise.importance`: their products count as zero. Keys and values of their own keep
            one row, those that they share all.

    Returns:
        The products that were cut, those refused and why, and parameters, time and loss before and after.

    Raises:
        ValueError: if a requested product can be cut nowhere, or not on a site that `where` names. The message lists
            all problems at once, and the model is unchanged.

    Example:
        >>> import torch, headwise
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
        ... )
        >>> model, tokens = BertModel(config), torch.randint(0, 64, (2, 8))
        >>> done = headwise.compress(model, energy=0.9, example=tokens)
        >>> done.attention.after < done.attention.before
        True
    """
    _check(model, energy, parts)
    is_function("loss", loss)
    candidates = hosts.find(model)
    removed = _removed(idle, parts, candidates)
    for candidate in candidates:
        candidate.site.model, candidate.site.example = model, example
    cuts, refused = _cut_all(model, candidates, PARTS[parts], where, energy, example, removed)
    layers: dict[str, Narrow] = {name: layer for cut in cuts.values() for name, layer in cut.layers.items()}
    plain = {name: model.get_submodule(name) for name in layers}
    before = (
        parameters_of(iter([model])),
        parameters_of(iter(_projections(candidates))),
        loss(model) if loss else None,
    )
    seconds = _seconds(model, layers, example) if example is not None else None
    put(model, layers)
    try:
        after = loss(model) if loss else None
    except BaseException:
        put(model, plain)
        raise
    saved = parameters_of(iter(plain.values())) - parameters_of(iter(layers.values()))
    return Compressed(
        energy=energy,
        layers=tuple(
            LayerCut(site, part, cut.ranks[part], cut.size[part]) for site, cut in cuts.items() for part in cut.ranks
        ),
        refused=refused,
        parameters=Pair(before[0], before[0] - saved),
        attention=Pair(before[1], before[1] - saved),
        seconds=seconds,
        loss=None if after is None or before[2] is None else Pair(before[2], after),
    )


def _check(model: Any, energy: float, parts: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress() takes a torch module first, got {type(model).__name__}")
    if isinstance(energy, bool) or not isinstance(energy, Real) or not 0 < energy <= 1:
        raise ValueError(f"energy must be a share of the singular values' sum, above 0 and at most 1, got {energy!r}")
    if parts not in PARTS:
        raise ValueError(f'parts must be "qk", "vo" or "both", got {parts!r}')
    if any(HANDLE in module.__dict__ for module in model.modules()):
        raise ValueError(
            "the model is regularized: call fold() or remove() on its handle (headwise.handle(model)) first"
        )
    if any(bare.observer is not None for bare in FittedLayer.bare_in(model).values()):
        raise ValueError("the model is watched by headwise.watch: call remove() of the watch first")


def _removed(idle: Any, parts: str, candidates: list[Candidate]) -> dict[str, tuple[int, ...]]:
    """Return the heads to remove by site; raise ValueError if no site has the name or the cut would keep them."""
    if idle is None:
        return {}
    if not isinstance(idle, Mapping) or not all(
        isinstance(heads, Sequence) and all(type(head) is int for head in heads) for heads in idle.values()
    ):
        raise TypeError(f"idle must map names or indices of sites to lists of heads, got {reprlib.repr(idle)}")
    if idle and parts == "qk":
        raise ValueError('idle heads are removed from values and output: take parts="vo" or "both"')
    # A site may stand in it by its name and by its index.
    removed: dict[str, set[int]] = {}
    for layer, heads in idle.items():
        removed.setdefault(candidate_at(candidates, layer, "idle").site.name, set()).update(heads)
    return {name: tuple(sorted(heads)) for name, heads in removed.items() if heads}


def _cut_all(
    model: nn.Module,
    candidates: list[Candidate],
    parts: tuple[str, ...],
    where: Where,
    energy: float,
    example: Any,
    idle: dict[str, tuple[int, ...]],
) -> tuple[dict[str, SiteCut], dict[str, str]]:
    """Return the cut of every site by name, and the reasons of refused products; raise ValueError with all problems."""
    wanted, named = selection(where, candidates)
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    cuts: dict[str, SiteCut] = {}
    refused: dict[str, str] = {}
    for candidate in (candidate for candidate in candidates if wanted(candidate.site)):
        name, possible = candidate.site.name, []
        for part in parts:
            why = _why_not(candidate, part, shared, model, example)
            if why:
                refused[f"{name} {part}".strip()] = why
            else:
                possible.append(part)
        if possible:
            cuts[name] = cut_site(_layout(candidate.site, idle), tuple(possible), energy, idle.get(name, ()))
    nowhere = [part for part in parts if not any(part in cut.ranks for cut in cuts.values())]
    problems = [f"{key}: {why}" for key, why in refused.items() if key[-2:] in nowhere or key[:-3] in named]
    problems += [
        f"{name}: its idle heads cannot be removed: {refused.get(f'{name} vo'.strip(), 'where= leaves it out')}"
        for name in idle
        if name not in cuts or "vo" not in cuts[name].ranks
    ]
    if candidates and not cuts and not refused:
        raise ValueError("where= chooses no attention layer: there is nothing to cut")
    if nowhere or problems:
        raise ValueError("\n".join(problems) or f"{type(model).__name__} has no attention layer that headwise can see")
    return cuts, refused


def _layout(site: Site, idle: dict[str, tuple[int, ...]]) -> Projections:
    layout = projections.of(site)
    heads = layout.o.heads if layout.o is not None else 0
    if wrong := [head for head in idle.get(site.name, ()) if not 0 <= head < heads]:
        raise ValueError(f"idle: heads of {site.name} are 0 to {heads - 1}, got {', '.join(map(str, wrong))}")
    return layout


def _why_not(candidate: Candidate, part: str, shared: Counter[int], model: nn.Module, example: Any) -> str:
    if candidate.adapter is None:
        return f"it cannot be reached: {candidate.reason}"
    if narrow := next(
        (name for name, layer in candidate.site.module.named_modules() if isinstance(layer, Narrow)), None
    ):
        return f"it is compressed already, see its {narrow}: compress the plain model with another energy"
    try:
        layout = projections.of(candidate.site)
    except ProjectionError as error:
        return str(error)
    return reason(candidate.site, layout, part, shared) or refusal(candidate.site, layout, part, model, example)


def _projections(candidates: list[Candidate]) -> list[nn.Module]:
    """Return the layers that hold the projections of all sites whose projections are known."""
    layers: list[nn.Module] = []
    for candidate in candidates:
        layout = candidate.site.__dict__.get("found_projections")
        layers += [block.module for block in layout.blocks] if layout is not None else []
    return layers


def _seconds(model: nn.Module, layers: dict[str, Narrow], example: Any) -> Pair:
    """Time forwards of the plain and the cut model in turn, and return the medians."""
    plain: list[float] = []
    cut: list[float] = []
    with capture.untouched(model):
        # the first forward of each model is slower and not counted
        for _ in range(TIMED + 1):
            plain.append(_timed(model, example))
            with in_place(model, layers):
                cut.append(_timed(model, example))
    return Pair(median(plain[1:]), median(cut[1:]))


def _timed(model: nn.Module, example: Any) -> float:
    start = time.perf_counter()
    feed(model, example)
    # a GPU call returns before the work is done
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
