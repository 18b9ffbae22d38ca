"""Block: the part of one parameter that makes the queries, keys, values or the output of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.projections.adapted import base_of, effective, is_adapted, obstacle, parts, trains
from headwise.projections.sharded import sharded

Rows = slice | Tensor


class ProjectionError(ValueError):
    """Raised where a site's projections cannot be told, with the reason and the remedy."""


@dataclass(eq=False)
class Block:
    """One of q, k, v, o of a site: which rows of which parameter, head after head.

    Attributes:
        kind: "q", "k", "v" or "o".
        module: the module that holds the parameter.
        where: qualified name of the parameter, for messages.
        name: the parameter's name in the module.
        rows: of q, k and v the output rows, of o the input columns, head-major: heads * head_dim of them.
        heads: heads of this block (key/value heads for k and v).
        head_dim: rows of one head.
        transposed: whether the parameter is stored (in, out), as GPT-2's Conv1D does.
        bias_module, bias_name, bias_rows: the bias, where there is one.
        convolved: why the parameter is no matrix that maps single tokens, or empty: a convolution over several
            positions, or in groups.
        grouped: whether it is a convolution in groups, which is no matrix of patches either.
        along: further tensors (module, name), heads * head_dim long, that act as rows of this block, such as `bias_k`.
        beyond: why the parameter is not what the layer computes with, where that was seen when the block was found.
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
        # Kept, so that compiled code that reads weights need not find out.
        self.adapted = is_adapted(self.module)

    def bind(self, module: nn.Module) -> None:
        """Take another module around, or inside of, the same parameter: adapters were put on or taken off."""
        if self.bias_module is self.module:
            self.bias_module = module
        self.module, self.adapted = module, is_adapted(module)

    def unreadable(self) -> str:
        """Say why the weight that the layer computes with cannot be told: the end of a sentence; else empty."""
        return self.beyond or sharded(self.module, self.name) or obstacle(self.module)

    def trains(self) -> bool:
        """Return whether training can change this block, by its parameter or an adapter's."""
        return trains(self.module, self.name)

    def frozen(self) -> str:
        """Name what `scale_` would write though it takes no gradient; empty where all of it is trained."""
        held = [(self.module, self.name, self.where)]
        if self.bias_module is not None and self.kind != "o":
            held.append((self.bias_module, self.bias_name, f"{self.where.rpartition('.')[0]}.{self.bias_name}"))
        held += [(module, name, f"{self.where.rpartition('.')[0]}.{name}") for module, name in self.along]
        return next(
            (where for module, name, where in held if not all(p.requires_grad for p in parts(module, name))), ""
        )

    def weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the block as (heads * head_dim, C), rows in head-major order; differentiable, adapters included, whole
        under FSDP2.

        For q, k, v: C is the layer's input, of a convolution its patch (in·kh·kw). For o the matrix is transposed: a
        row is one input of the output projection, to (out·kh·kw).

        Raises:
            ProjectionError: of a grouped convolution, which has no such matrix.
        """
        if self.grouped:
            raise ProjectionError(f"{self.maker} is {self.convolved}")
        full = effective(self.module, self.name) if self.adapted else getattr(self.module, self.name)
        rows = self.by_rows(whole(full))[self.rows]
        return rows if dtype is None else rows.to(dtype)

    @property
    def maker(self) -> str:
        """Return the qualified name of the module that holds the parameter."""
        return self.where.rpartition(".")[0]

    @property
    def width(self) -> int:
        """Return the channels that enter q, k or v, or that leave o."""
        channels = getattr(self.module, "out_channels" if self.kind == "o" else "in_channels", None)
        return self.weight().shape[1] if channels is None else channels

    def by_head(self, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return the block as (heads, head_dim, C)."""
        return self.weight(dtype).unflatten(0, (self.heads, self.head_dim))

    def bias(self) -> Tensor | None:
        """Return the bias: (heads * head_dim,) for q, k and v; (C,) for o; None where there is none."""
        if self.bias_module is None:
            return None
        adapted = self.adapted and self.bias_module is self.module
        bias = whole(effective(self.module, "bias") if adapted else getattr(self.bias_module, self.bias_name))
        return bias if self.bias_rows is None else bias[self.bias_rows]

    def by_rows(self, full: Tensor) -> Tensor:
        """View the whole parameter with this block's rows along dimension 0."""
        if full.dim() > 2:
            # Of a convolution, inputs stand at dimension 1 and what it spans behind them.
            return (full.transpose(0, 1) if self.kind == "o" else full).flatten(1)
        return full.t() if self.transposed != (self.kind == "o") else full

    @torch.no_grad()
    def scale_(self, factors: Tensor) -> None:
        """Multiply each head's rows, its bias and what acts along with them, by a factor (heads,); adapters on them
        too.

        Raises:
            RuntimeError: where a parametrization without `rescale_` stands on the parameter.
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


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that FSDP2 keeps in shards (a collective), or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _scale(module: nn.Module, name: str, rows: Rows | None, per_row: Tensor, axis: int, where: str) -> None:
    chain = getattr(base_of(module), "parametrizations", {})
    target, *adapters = parts(module, name)
    size = target.shape[axis]
    # Factors of 1 elsewhere: exact, and the same code serves slices, index tensors and shards.
    factors = torch.ones(size, dtype=target.dtype, device=target.device)
    factors[slice(None) if rows is None else rows] = per_row.to(factors)
    shape = [1] * target.dim()
    shape[axis] = size
    if name in chain:
        _rescale(chain[name], factors, axis, where)
    else:
        multiply_(target, factors.view(shape))
    for other in adapters:
        # An adapter's B has the outputs first, however its base is stored.
        multiply_(other, factors.view(-1, *[1] * (other.dim() - 1)))


def _rescale(chain: nn.Module, factors: Tensor, axis: int, where: str) -> None:
    steps: list[Any] = list(chain.children())
    if len(steps) != 1 or not hasattr(steps[0], "rescale_"):
        names = ", ".join(type(step).__name__ for step in steps)
        raise RuntimeError(
            f"{where} is parametrized by {names}, which cannot be rescaled by head; fold or remove it first"
        )
    steps[0].rescale_(chain.original, factors, axis)


def multiply_(target: Tensor, factor: Tensor) -> None:
    """Multiply a parameter in place by a plain tensor, also where FSDP2 keeps it in shards."""
    target = target.detach()
    target.mul_(_beside(target, factor))


def overwrite_(target: Tensor, value: Tensor) -> None:
    """Write a plain tensor into a parameter, also where FSDP2 keeps it in shards."""
    target = target.detach()
    target.copy_(_beside(target, value))


def _beside(target: Tensor, plain: Tensor) -> Tensor:
    """Return a plain tensor as one that can meet the target, which FSDP2 may keep in shards."""
    if not hasattr(target, "full_tensor"):
        return plain
    # Imported here alone: torch's own import of it takes long, and is not there in builds without distributed.
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(target, DTensor)
    mesh = target.device_mesh
    # Each process made the same numbers, so that nothing need be sent to check them.
    return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
