"""The matrices that an optimizer treats one by one: the heads, groups or whole projections inside each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.attend import projections
from headwise.attend.core import Site
from headwise.attend.projections import ProjectionError
from headwise.attend.projections.adapted import adapters_of, base_of, originals, underlying
from headwise.attend.projections.block import Block, Rows
from headwise.attend.projections.leaves import leaf, still
from headwise.attend.projections.sharded import sharded
from headwise.attend.regularizing.parameter_groups import ParameterGroups
from headwise.borders import Convolution, on_all
from headwise.files.arguments import is_a

Per = Literal["head", "group", "matrix"]
LAYERS = ("attention", "all")
FACTOR = "is a factor of an adapter, which has no heads"


@dataclass(eq=False)
class Part:
    """Rows of a parameter that are matrices of one shape, one after the other.

    Attributes:
        kind: "q", "k", "v" or "o", a part of latent attention, "mlp", "expert", or "rest" for rows of no head.
        axis: the dimension of the parameter along which the rows are counted; None for a stack of experts.
        rows: the rows of all matrices, count * size of them; a tensor of them moves to the device of its first use.
        count: the number of matrices.
        heads: the heads of one matrix; 0 if its rows belong to no head.
    """

    kind: str
    axis: int | None
    rows: Rows
    count: int
    heads: int = 0

    def rows_of(self, parameter: Tensor) -> Tensor | None:
        """Return the rows of a whole parameter as a view, or None if they are not successive."""
        if self.axis is None:
            return parameter
        if isinstance(self.rows, Tensor):
            # moved once, without waiting for the device
            self.rows = self.rows.to(parameter.device, non_blocking=True)
            return None
        return parameter.transpose(0, self.axis)[self.rows]

    def of(self, parameter: Tensor) -> Tensor:
        """Return the matrices (count, size, C) of a whole parameter, or of a tensor like it; a view where possible.

        Rows are outputs, for kind "o" inputs of the output projection.
        """
        if self.axis is None:
            return parameter
        rows = self.rows_of(parameter)
        rows = parameter.transpose(0, self.axis)[self.rows] if rows is None else rows
        return rows.flatten(1).unflatten(0, (self.count, -1))

    def write_(self, parameter: Tensor, matrices: Tensor) -> None:
        """Write matrices (count, size, C) to their rows of a whole parameter, or of a tensor like it."""
        rows = self.rows_of(parameter)
        if rows is not None:
            rows.copy_(matrices.reshape(rows.shape))
        else:
            assert self.axis is not None
            turned = parameter.transpose(0, self.axis)
            flat = matrices.flatten(0, 1)
            turned[self.rows] = flat.view(len(flat), *turned.shape[1:]).to(turned.dtype)

    def add_(self, parameter: Tensor, matrices: Tensor, share: float) -> None:
        """Add a share of matrices (count, size, C) to rows that are not successive."""
        assert self.axis is not None and isinstance(self.rows, Tensor)
        turned = parameter.transpose(0, self.axis)
        turned.index_add_(0, self.rows, matrices.reshape(len(self.rows), *turned.shape[1:]), alpha=share)

    def sides(self, shape: torch.Size) -> tuple[int, int]:
        """Return the outputs and inputs of one matrix, of a stack (count, size, C)."""
        size, others = shape[1], shape[2]
        return (others, size) if self.kind == "o" else (size, others)


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a model's parameters by `id`, the names of all, and why some matrices have none."""

    of: dict[int, list[Part]]
    names: dict[int, str]
    reasons: dict[int, str]

    def name(self, parameter: Tensor) -> str:
        """Return the qualified name of a parameter."""
        return self.names.get(id(parameter), "a parameter of another model")


def parts_of(groups: ParameterGroups, per: Per, heads_per_group: int | None, layers: str, who: str) -> Parts:
    """Return the matrices of a model's trainable attention weights, and of its MLPs if `layers` is "all".

    Args:
        per: "head", "group" or "matrix".
        heads_per_group: the query heads of a group; None for those that share a key head.

    Raises:
        TypeError, ValueError: naming the argument, or the layer, the reason and the remedy, if its heads cannot be told
            or divided.
    """
    check_groups(groups, who)
    _check(per, heads_per_group, layers)
    names = {id(parameter): name for name, parameter in groups.model.named_parameters()}
    found: dict[int, list[Part]] = {}
    reasons = {id(p): FACTOR for module in groups.model.modules() for p in adapters_of(module)}
    for site in groups.sites:
        for block, size in _sized(site, per, heads_per_group, who):
            parameter = underlying(base_of(block.module), block.name)
            if not parameter.requires_grad:
                continue
            if block.grouped:
                reasons[id(parameter)] = f"is {block.convolved}"
                continue
            _add(found.setdefault(id(parameter), []), _part(block, size, parameter), parameter, block.where)
    trained = {id(p): p for group in groups for p in group["params"]}
    for key, parts in found.items():
        parts += rest(parts, trained[key]) if key in trained else []
    names_whole = {"mlp"} if layers == "all" else set()
    # a projection whose heads cannot be told is a matrix all the same
    names_whole |= {"attention"} if per == "matrix" else set()
    others = [p for group in groups if group["name"] in names_whole for p in group["params"] if id(p) not in found]
    found |= {id(p): [part] for p, part in _whole(groups.model, others) if id(p) not in reasons}
    return Parts(found, names, reasons)


def _sized(site: Site, per: Per, heads_per_group: int | None, who: str) -> Iterator[tuple[Block, int]]:
    """Return the blocks of a site, each with the number of heads of one matrix."""
    try:
        found = projections.of(site)
    except ProjectionError as error:
        if per == "matrix":
            return
        remedy = 'per="matrix" needs no heads'
        if any(hasattr(parameter, "full_tensor") for parameter in site.module.parameters()):
            remedy = "Here the weights are sharded and stored in one: build the optimizer before, as Accelerate does"
        raise ValueError(f'{who}(per="{per}"): {error}. {remedy}') from error
    for block in found.blocks:
        if reason := sharded(block.module, block.name):
            raise ValueError(f"{who} cannot move {block.where}, which {reason}")
        if len(made := originals(base_of(block.module), block.name)) > 1:
            raise ValueError(
                f"{who} cannot move {block.where}, which torch computes from {len(made)} parameters: call "
                f"torch.nn.utils.parametrize.remove_parametrizations(layer, {block.name!r})"
            )
    for stream in found.streams():
        queries = next((b.heads for b in (stream.q, stream.latent.get("up_q"), stream.o) if b is not None), 1)
        for block in stream.blocks:
            yield block, _heads(block, queries, per, heads_per_group, f"{who}: {site.name}")


def _heads(block: Block, queries: int, per: Per, heads_per_group: int | None, where: str) -> int:
    """Return how many heads of a block form one matrix."""
    if per == "matrix" or block.heads == 1:
        return block.heads
    if per == "head":
        return 1
    if heads_per_group is None:
        raise ValueError(
            f'{where}: per="group" needs heads_per_group, the number of query heads of a group. For those that share '
            "a key head give query heads / key heads"
        )
    if queries % heads_per_group:
        raise ValueError(f"{where} has {queries} query heads, which are not groups of {heads_per_group}")
    # a group has the key and value heads that its query heads use
    shared = heads_per_group * block.heads
    if shared % queries and queries % shared:
        raise ValueError(
            f"{where} has {queries} query heads and {block.heads} heads of {block.kind}, so that groups of "
            f"{heads_per_group} would share a part of a head"
        )
    return max(1, shared // queries)


def _part(block: Block, heads: int, parameter: Tensor) -> Part:
    axis = 1 if block.transposed != (block.kind == "o") else 0
    return Part(block.kind, axis, block.rows, block.heads // heads, heads)


def _indices(part: Part, parameter: Tensor) -> Tensor:
    assert part.axis is not None
    every = torch.arange(parameter.shape[part.axis])
    return every[part.rows.cpu() if isinstance(part.rows, Tensor) else part.rows]


def _add(parts: list[Part], part: Part, parameter: Tensor, where: str) -> None:
    """Add a part unless a layer that shares the weight has added it."""
    for other in parts:
        same = part.axis == other.axis and part.count == other.count
        if same and torch.equal(_indices(part, parameter), _indices(other, parameter)):
            return
        if part.axis != other.axis or torch.isin(_indices(part, parameter), _indices(other, parameter)).any():
            raise ValueError(
                f'{where} is shared by layers that divide it into heads in different ways: use per="matrix"'
                if part.count != other.count
                else f"{where} is shared by layers that divide it into projections in different ways: use AdamW"
            )
    parts.append(part)


def rest(parts: list[Part], parameter: Tensor) -> list[Part]:
    """Return the rows of no projection as one more matrix, such as those of a gate that is fused with the queries."""
    axis = parts[0].axis
    assert axis is not None
    free = torch.ones(parameter.shape[axis], dtype=torch.bool)
    for part in parts:
        free[_indices(part, parameter)] = False
    rows = free.nonzero().flatten()
    return [Part("rest", axis, rows, 1)] if len(rows) else []


def _whole(model: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Part]]:
    """Return matrices and stacks of matrices, each as one part."""
    # reading a reparametrized weight would change the state of some parametrizations
    with still(model):
        turned = {
            id(original)
            for name, module in model.named_modules()
            if (own := leaf(name, module)) is not None and own.transposed
            for original in originals(base_of(module), "weight")
        }
    convolved = {id(p) for module in model.modules() if isinstance(module, Convolution) for p in module.parameters()}
    for parameter in parameters:
        if parameter.ndim == 2:
            axis = 1 if id(parameter) in turned else 0
            yield parameter, Part("mlp", axis, slice(0, parameter.shape[axis]), 1)
        elif parameter.ndim == 3 and id(parameter) not in convolved:
            yield parameter, Part("expert", None, slice(0, len(parameter)), len(parameter))


def together_(
    many: Callable[..., Any], one: Callable[..., Any], rows: list[Tensor], values: list[Tensor], **settings: Any
) -> None:
    """Write values to views in few kernels where they lie alike in memory, and one by one elsewhere."""
    alike = [at for at, (row, value) in enumerate(zip(rows, values, strict=True)) if row.stride() == value.stride()]
    if alike:
        many([rows[at] for at in alike], [values[at] for at in alike], **settings)
    for at in sorted(set(range(len(rows))) - set(alike)):
        one(rows[at], values[at], **settings)


def write_all_(weights: Sequence[Tensor], parts: Sequence[list[Part]], matrices: Iterable[Tensor]) -> None:
    """Write the matrices of all parts, in their order, to whole weights."""
    rows, values, made = [], [], iter(matrices)
    for weight, part in ((weight, part) for weight, own in zip(weights, parts, strict=True) for part in own):
        view, value = part.rows_of(weight), next(made)
        if view is None:
            part.write_(weight, value)
        else:
            rows.append(view)
            values.append(value.reshape(view.shape))
    together_(on_all("copy_"), torch.Tensor.copy_, rows, values)


def _check(per: object, heads_per_group: object, layers: object) -> None:
    is_a("per", per, str, '"head", "group" or "matrix"')
    if per not in ("head", "group", "matrix"):
        raise ValueError(f'per must be "head", "group" or "matrix", got {per!r}')
    if heads_per_group is not None:
        is_a("heads_per_group", heads_per_group, int, "a whole number or None")
        if heads_per_group < 1:  # type: ignore[operator]  # checked above
            raise ValueError(f"heads_per_group must be at least 1, got {heads_per_group}")
        if per != "group":
            raise ValueError(f'heads_per_group={heads_per_group} is for per="group" alone, got per={per!r}')
    is_a("layers", layers, str, '"all" or "attention"')
    if layers not in LAYERS:
        raise ValueError(f"layers must be one of {', '.join(map(repr, LAYERS))}, got {layers!r}")


def check_groups(groups: object, who: str) -> None:
    """Raise TypeError if groups do not know the model whose parameters they hold."""
    if not isinstance(groups, ParameterGroups):
        raise TypeError(
            f"groups must be what headwise.parameter_groups returned, which knows the heads of each weight; {who}() "
            f"got {type(groups).__name__}"
        )
    lacking = [key for group in groups for key in ("name", "lr", "weight_decay") if key not in group]
    if lacking:
        raise ValueError(
            f"a group that was added or changed by hand has no {lacking[0]!r}: give it the name, lr and weight_decay "
            f"of the group of headwise.parameter_groups that its parameters come from, which {who} needs"
        )
