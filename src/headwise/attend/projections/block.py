"""Block: the part of a parameter that computes the queries, keys, values or output of an attention layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.projections.adapted import base_of, effective, is_adapted, obstacle, parts, trains
from headwise.attend.projections.sharded import sharded
from headwise.numerics.precision import at_least_fp32

Rows = slice | Tensor


class ProjectionError(ValueError):
    """Raised if a site's projections cannot be determined, with the reason and the remedy."""


@dataclass(eq=False)
class Block:
    """The rows of a parameter that are one of q, k, v or o of a site, head after head.

    Attributes:
        kind: "q", "k", "v" or "o".
        module: the module that holds the parameter.
        where: qualified name of the parameter, for messages.
        name: the parameter's name in the module.
        rows: heads * head_dim indices, head-major: output rows for q, k and v, input columns for o.
        heads: number of heads of this block (key/value heads for k and v).
        head_dim: number of rows of one head.
        transposed: whether the parameter is stored (in, out), as in GPT-2's Conv1D.
        bias_module, bias_name, bias_rows: the bias, if there is one.
        convolved: why the parameter is not a matrix that maps single tokens (a convolution over several positions or
            in groups); empty if it is one.
        grouped: whether the parameter is a grouped convolution, which is not a matrix of patches either.
        along: further tensors (module, name), heads * head_dim long, that act as rows of this block, such as `bias_k`.
        beyond: why the layer does not compute with this parameter alone; empty if it does.
    """

    kind: str
    module: nn.Module
    where: str
    name: str
    rows: Rows
    heads: int
    head_dim: int
    transposed: bool = False
    bias_module: nn.Module | None = None
    bias_name: str = ""
    bias_rows: Rows | None = None
    along: tuple[tuple[nn.Module, str], ...] = ()
    convolved: str = ""
    grouped: bool = False
    beyond: str = ""

    def __post_init__(self) -> None:
        # Computed once, so that compiled code that reads weights need not check it.
        self.adapted = is_adapted(self.module)

    def bind(self, module: nn.Module) -> None:
        """Set the module that holds the parameter, after adapters were added or removed."""
        if self.bias_module is self.module:
            self.bias_module = module
        self.module, self.adapted = module, is_adapted(module)

    def unreadable(self) -> str:
        """Return why the effective weight cannot be read, as the end of a sentence, or an empty string."""
        return self.beyond or sharded(self.module, self.name) or obstacle(self.module)

    def trains(self) -> bool:
        """Return whether training can change this block, through its parameter or an adapter."""
        return trains(self.module, self.name)

    def frozen(self) -> str:
        """Return the name of a frozen parameter that `scale_` would change, or an empty string."""
        tensors = [(self.module, self.name, self.where)]
        if self.bias_module is not None and self.kind != "o":
            tensors.append((self.bias_module, self.bias_name, f"{self.where.rpartition('.')[0]}.{self.bias_name}"))
        tensors += [(module, name, f"{self.where.rpartition('.')[0]}.{name}") for module, name in self.along]
        return next(
            (where for module, name, where in tensors if not all(p.requires_grad for p in parts(module, name))), ""
        )

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the block as a differentiable matrix (heads * head_dim, C), rows in head-major order.

        Adapters are included, and under FSDP2 the matrix is whole. For q, k and v, C is the layer's input, or the patch
        (in·kh·kw) of a convolution. For o the matrix is transposed: a row is one input of the output projection, and C
        its output (out·kh·kw).

        Raises:
            ProjectionError: for a grouped convolution, which has no such matrix.
        """
        rows = self.by_rows(self.full())[self.rows]
        return rows if dtype is None else rows.to(dtype)

    def full(self) -> Tensor:
        """Return the whole parameter that holds the block, as `weight` reads it, in the parameter's layout.

        Raises:
            ProjectionError: for a grouped convolution.
        """
        if self.grouped:
            raise ProjectionError(f"{self.maker} is {self.convolved}")
        return whole(effective(self.module, self.name) if self.adapted else getattr(self.module, self.name))

    @property
    def maker(self) -> str:
        """Return the qualified name of the module that holds the parameter."""
        return self.where.rpartition(".")[0]

    @property
    def width(self) -> int:
        """Return the number of input channels of q, k or v, or of output channels of o."""
        channels = getattr(self.module, "out_channels" if self.kind == "o" else "in_channels", None)
        return self.weight().shape[1] if channels is None else channels

    def by_head(self, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return the block as (heads, head_dim, C)."""
        return self.weight(dtype).unflatten(0, (self.heads, self.head_dim))

    def bias(self) -> Tensor | None:
        """Return the bias, (heads * head_dim,) for q, k and v and (C,) for o, or None."""
        if self.bias_module is None:
            return None
        adapted = self.adapted and self.bias_module is self.module
        bias = whole(effective(self.module, "bias") if adapted else getattr(self.bias_module, self.bias_name))
        return bias if self.bias_rows is None else bias[self.bias_rows]

    def by_rows(self, full: Tensor) -> Tensor:
        """Return the whole parameter as a matrix with this block's rows along dimension 0."""
        if full.dim() > 2:
            # A convolution has its inputs at dimension 1, followed by its kernel.
            return (full.transpose(0, 1) if self.kind == "o" else full).flatten(1)
        return full.t() if self.transposed != (self.kind == "o") else full

    @torch.no_grad()
    def scale_(self, factors: Tensor) -> None:
        """Multiply each head's rows, bias, `along` tensors and adapters by a factor (heads,).

        Raises:
            RuntimeError: if the parameter has a parametrization without `rescale_`.
        """
        per_row = factors.repeat_interleave(self.head_dim)
        axis = 1 if self.transposed != (self.kind == "o") else 0
        _scale(self.module, self.name, self.rows, per_row, axis, self.where)
        if self.kind == "o":
            return
        if self.bias_module is not None:
            _scale(self.bias_module, self.bias_name, self.bias_rows, per_row, 0, self.where)
        for module, name in self.along:
            tensor = getattr(module, name)
            _scale(module, name, None, per_row, tensor.dim() - 1, self.where)

    def __repr__(self) -> str:
        return f"Block({self.kind}: {self.where}, {self.heads} heads of {self.head_dim})"


def by_heads(blocks: Iterable[Block]) -> dict[int, Tensor]:
    """Return blocks as (heads, head_dim, C) in fp32 or wider, by `id`, each once.

    A parameter that holds several is read and converted once, and its gradient is put together by one operator.
    """
    sharing: dict[tuple[int, str, bool], list[Block]] = {}
    for block in dict.fromkeys(blocks):
        sharing.setdefault((id(block.module), block.name, block.kind == "o"), []).append(block)
    read: dict[int, Tensor] = {}
    for group in sharing.values():
        matrix = group[0].by_rows(at_least_fp32(group[0].full()))
        for block, rows in zip(group, _parted(matrix, [block.rows for block in group]), strict=True):
            read[id(block)] = rows.unflatten(0, (block.heads, block.head_dim))
    return read


def _parted(matrix: Tensor, rows: list[Rows]) -> Sequence[Tensor]:
    bounds = [(r.start, r.stop) for r in rows if isinstance(r, slice)]
    starts, ends = [0, *(stop for _, stop in bounds)], [*(start for start, _ in bounds), len(matrix)]
    if len(bounds) == len(rows) and starts == ends:
        return matrix.split([stop - start for start, stop in bounds])
    return [matrix[r] for r in rows]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of one that FSDP2 shards (a collective operation), or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _scale(module: nn.Module, name: str, rows: Rows | None, per_row: Tensor, axis: int, where: str) -> None:
    chain = getattr(base_of(module), "parametrizations", {})
    target, *adapters = parts(module, name)
    size = target.shape[axis]
    # Multiplying by 1 elsewhere is exact, and the same code handles slices, index tensors and shards.
    factors = torch.ones(size, dtype=target.dtype, device=target.device)
    factors[slice(None) if rows is None else rows] = per_row.to(factors)
    if name in chain:
        _rescale(chain[name], factors, axis, where)
    else:
        multiply_(target, along(factors, axis, target))
    for other in adapters:
        # An adapter's B has its outputs at dimension 0, whatever the layout of its base.
        multiply_(other, along(factors, 0, other))


def _rescale(chain: nn.Module, factors: Tensor, axis: int, where: str) -> None:
    steps: list[Any] = list(chain.children())
    if len(steps) != 1 or not hasattr(steps[0], "rescale_"):
        names = ", ".join(type(step).__name__ for step in steps)
        raise RuntimeError(
            f"{where} is parametrized by {names}, which cannot be rescaled by head; fold or remove it first"
        )
    steps[0].rescale_(chain.original, factors, axis)


def along(vector: Tensor, axis: int, like: Tensor) -> Tensor:
    """Return a vector in a shape that broadcasts along an axis of a tensor."""
    return vector.view([-1 if at == axis else 1 for at in range(like.dim())])


def multiply_(target: Tensor, factor: Tensor) -> None:
    """Multiply a parameter, sharded by FSDP2 or not, in place by a plain tensor."""
    target = target.detach()
    target.mul_(_like_target(target, factor))


def overwrite_(target: Tensor, value: Tensor) -> None:
    """Copy a plain tensor into a parameter, sharded by FSDP2 or not."""
    target = target.detach()
    target.copy_(_like_target(target, value))


def _like_target(target: Tensor, plain: Tensor) -> Tensor:
    """Return a plain tensor as a distributed one if FSDP2 shards the target."""
    if not hasattr(target, "full_tensor"):
        return plain
    # Imported here: the import takes long, and the module is missing in builds without distributed.
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(target, DTensor)
    mesh = target.device_mesh
    # Each process has the same numbers, so no check between processes is needed.
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)


def as_rows(index: Tensor) -> slice | Tensor:
    """Return an index (heads, size) flattened head-major, as a slice if it is contiguous."""
    flat = index.reshape(-1)
    start = int(flat[0])
    if torch.equal(flat, torch.arange(start, start + flat.numel())):
        return slice(start, start + flat.numel())
    return flat.clone()
