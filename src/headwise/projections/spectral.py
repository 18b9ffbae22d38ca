"""A weight divided by its largest singular value, block by block, tracked by one power iteration per step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.core.precision import at_least_fp32
from headwise.files.errors import LEAVE_OUT
from headwise.projections.block import Block, multiply_, whole

# Initial singular vectors: exact for matrices whose decomposition takes milliseconds. For larger ones a block of
# vectors is iterated: if the largest singular values are close together, one vector would need thousands of steps.
EXACT_UP_TO, VECTORS, ITERATIONS = 128, 8, 300


class Spectral(nn.Module):
    """The parametrization gamma / sigma * W of each block of a weight; its forward changes no state.

    Args:
        weight: the parameter: a matrix, or that of a convolution, read as (outputs, inputs x kernel).
        blocks: its parts, each with its own sigma; rows outside all blocks are unchanged.
        init: the initial gamma: sigma ("current") or 1 ("one"); None for no gamma, so that the factor is 1 / sigma.

    Raises:
        ValueError: if a block is all zero.
    """

    owner: Tensor
    gamma: nn.Parameter | None

    def __init__(self, weight: Tensor, blocks: list[Block], init: str | None) -> None:
        super().__init__()
        full = whole(weight.detach())
        self.kinds = [b.kind for b in blocks]
        outputs = 1 if blocks[0].transposed else 0
        # The block of an output projection lists inputs. If it lists all inputs, it is the whole matrix.
        self.columns = blocks[0].kind == "o" and not _covers(blocks[0], full.shape[1 - outputs])
        self.axis = 1 - outputs if self.columns else outputs
        # The index of each row's block; rows outside all blocks get the last factor, which is 1.
        owner = torch.full((full.shape[self.axis],), len(blocks), device=full.device)
        for index, block in enumerate(blocks):
            owner[slice(None) if block.kind == "o" and not self.columns else block.rows] = index
        self.register_buffer("owner", owner, persistent=False)
        self.places = [(owner == i).nonzero().flatten().tolist() for i in range(len(blocks))]
        for block, matrix in zip(blocks, self._matrices(full), strict=True):
            if not matrix.any():
                raise ValueError(
                    f"{block.where} is all zero in its {block.kind} part, and a weight of spectral norm 0 cannot be "
                    f"divided by it: initialise it with other numbers first, or {LEAVE_OUT}"
                )
            u, v = leading(matrix)
            self.register_buffer(f"u_{block.kind}", u)
            self.register_buffer(f"v_{block.kind}", v)
        sigma = self.sigma(full)
        start = {"current": sigma.clone(), "one": torch.ones_like(sigma), None: None}[init]
        self.gamma = None if start is None else nn.Parameter(start)

    def _matrices(self, weight: Tensor) -> list[Tensor]:
        """Return each block as (outputs, inputs)."""
        rows = at_least_fp32(weight.transpose(0, self.axis).flatten(1))
        parts = [_take(rows, place) for place in self.places]
        return [part.t() for part in parts] if self.columns else parts

    def sigma(self, weight: Tensor) -> Tensor:
        """Return u W v of each block, (blocks,) in fp32 or wider, differentiable in W alone."""
        values = []
        for kind, matrix in zip(self.kinds, self._matrices(weight), strict=True):
            # Normalized again: a model that was cast to fewer bits has rounded vectors.
            u, v = (_unit(getattr(self, f"{name}_{kind}").to(matrix.dtype)) for name in "uv")
            values.append(torch.dot(u, matrix @ v))
        return torch.stack(values)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the reparametrized weight, in the shape and dtype of the plain one."""
        with torch.autocast(weight.device.type, enabled=False):
            sigma = self.sigma(weight)
            ratio = 1 / sigma if self.gamma is None else self.gamma.to(sigma.dtype) / sigma
            factor = torch.cat([ratio, ratio.new_ones(1)])[self.owner]
            shape = [1] * weight.dim()
            shape[self.axis] = -1
            return (at_least_fp32(weight) * factor.view(shape)).to(weight.dtype)

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        """Run one power iteration on each block, right vector to left and back, as the authors' code does."""
        for kind, matrix in zip(self.kinds, self._matrices(whole(weight.detach())), strict=True):
            u, v = getattr(self, f"u_{kind}"), getattr(self, f"v_{kind}")
            u.copy_(_unit(matrix @ v.to(matrix.dtype)))
            v.copy_(_unit(matrix.t() @ u.to(matrix.dtype)))

    @torch.no_grad()
    def rescale_(self, weight: Tensor, factors: Tensor, axis: int) -> None:
        """Multiply rows of the computed weight by factors: W is multiplied, and gamma by the change of sigma.

        Raises:
            RuntimeError: if there is no gamma, because the heads' norms cannot then change separately.
        """
        if self.gamma is None:
            raise RuntimeError(
                "a weight of spectral norm 1 cannot be rescaled by head: fold or remove SpectralNorm first"
            )
        before = self.sigma(whole(weight.detach()))
        shape = [1] * weight.dim()
        shape[axis] = -1
        multiply_(weight, factors.view(shape))
        # The result is correct with any vectors; one iteration tracks the change, as after a training step.
        self.iterate(weight)
        multiply_(self.gamma, (self.sigma(whole(weight.detach())) / before).to(self.gamma.dtype))


def _covers(block: Block, size: int) -> bool:
    return len(torch.arange(size)[block.rows.cpu() if isinstance(block.rows, Tensor) else block.rows]) == size


def _take(rows: Tensor, indices: list[int]) -> Tensor:
    start, count = indices[0], len(indices)
    return rows[start : start + count] if indices[-1] - start == count - 1 else rows[indices]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp(min=1e-12)


@torch.no_grad()
def leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors (u, v) of a matrix in fp32 or wider, converged; torch's generators are not
    used."""
    matrix = at_least_fp32(matrix.detach())
    if min(matrix.shape) <= EXACT_UP_TO:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, 0].clone(), right[0].clone()
    start = torch.randn(matrix.shape[1], VECTORS, generator=torch.Generator().manual_seed(0)).to(matrix)
    basis, last = torch.linalg.qr(start)[0], 0.0
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.t() @ (matrix @ basis))[0]
        size = float(torch.linalg.matrix_norm(matrix @ basis, ord=2))
        if abs(size - last) <= 1e-7 * size:
            break
        last = size
    left, _, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[:, 0].clone(), _unit(basis @ right[0])
