"""SigmaReparam."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headwise.core.method import Method
from headwise.projections import ProjectionError
from headwise.projections.block import Block, multiply_, whole
from headwise.projections.reparametrization import reparametrize, restore

if TYPE_CHECKING:
    from headwise.core.site import Site
    from headwise.regularizing.fitted_site import Store

ITERATIONS, VECTORS, EXACT_UP_TO = 300, 8, 128


class SigmaReparam(Method):
    """Replaces each q, k, v and o weight W by gamma / sigma(W) * W with a learned gamma.

    Zhai et al. 2023, arXiv 2303.06296.

    In training and evaluation. sigma is the largest singular value, by one power iteration per optimizer step; q, k and v
    blocks of a fused matrix have each their own sigma and gamma. `init="current"` starts at gamma = sigma(W), so that nothing
    changes at first (the authors' PyTorch code; it fits trained models); `init="one"` starts at gamma = 1 (the paper).
    Folds into plain weights, bit for bit. gamma takes no weight decay.
    """

    init: str = "current"

    neutral = {"init": "current"}
    strong = {"init": "one"}
    acts = "both"
    learns = True
    shapes = ()

    def check(self) -> None:
        self.choose("init", "current", "one")

    def refuse(self, site: Site) -> str | None:
        try:
            site.projections().need("qkv", "SigmaReparam")
        except ProjectionError as error:
            return str(error)
        return None

    def build(self, site: Site, store: Store) -> None:
        parts: list[tuple[nn.Module, str]] = []
        store.mark()
        store.set("parts", parts)
        blocks = site.projections().blocks
        for module, name in site.projections().parameters():
            inside = [b for b in blocks if b.module is module and b.name == name]
            # Layers that share their weights share the reparametrization too.
            if not _stands(module, name):
                reparametrize(module, name, Spectral(getattr(module, name), inside, self.init))
                parts.append((module, name))

    def unbuild(self, site: Site, store: Store) -> None:
        for module, name in store.parts:
            restore(module, name, folded=False)

    def fold(self, site: Site, store: Store) -> None:
        for module, name in store.parts:
            restore(module, name, folded=True)

    def after_step(self, site: Site, store: Store) -> None:
        for module, name in store.parts:
            chain = module.parametrizations[name]
            chain[0].iterate(chain.original)


def _stands(module: nn.Module, name: str) -> bool:
    chain = getattr(module, "parametrizations", {})
    return name in chain and isinstance(chain[name][0], Spectral)


class Spectral(nn.Module):
    """Computes gamma / sigma * W for each block of a weight; its forward changes no state, so that it may be run again."""

    owner: Tensor

    def __init__(self, weight: Tensor, blocks: list[Block], init: str) -> None:
        super().__init__()
        full = whole(weight.detach())
        self.transposed = [b.transposed != (b.kind == "o") for b in blocks]
        self.axis = 1 if self.transposed[0] else 0
        self.kinds = [b.kind for b in blocks]
        # Which block each row belongs to; rows of none keep the factor 1, which stands last.
        owner = torch.full((full.shape[self.axis],), len(blocks), device=full.device)
        for index, block in enumerate(blocks):
            owner[block.rows] = index
        self.register_buffer("owner", owner, persistent=False)
        self.places = [(owner == i).nonzero().flatten().tolist() for i in range(len(blocks))]
        for kind, matrix in zip(self.kinds, self._matrices(full), strict=True):
            u, v = leading(matrix)
            self.register_buffer(f"u_{kind}", u)
            self.register_buffer(f"v_{kind}", v)
        sigma = self.sigma(full)
        self.gamma = nn.Parameter(sigma.clone() if init == "current" else torch.ones_like(sigma))

    def _matrices(self, weight: Tensor) -> list[Tensor]:
        rows = weight.flatten(1) if weight.dim() > 2 else weight
        rows = (rows.t() if self.axis else rows).float()
        return [_take(rows, place) for place in self.places]

    def sigma(self, weight: Tensor) -> Tensor:
        """Give u W v of each block, (blocks,) in fp32, differentiable in W alone."""
        values = []
        for kind, matrix in zip(self.kinds, self._matrices(weight), strict=True):
            # Vectors are unit, up to the rounding of a model that was cast to fewer bits.
            u, v = _unit(getattr(self, f"u_{kind}").float()), _unit(getattr(self, f"v_{kind}").float())
            values.append(torch.dot(u, matrix @ v))
        return torch.stack(values)

    def forward(self, weight: Tensor) -> Tensor:
        """Give the reparametrized weight, in the shape and dtype of the plain one."""
        with torch.autocast(weight.device.type, enabled=False):
            ratio = self.gamma.float() / self.sigma(weight)
            factor = torch.cat([ratio, ratio.new_ones(1)])[self.owner]
            shape = [1] * weight.dim()
            shape[self.axis] = -1
            return (weight.float() * factor.view(shape)).to(weight.dtype)

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        """Take one power iteration on each block."""
        for kind, matrix in zip(self.kinds, self._matrices(whole(weight.detach())), strict=True):
            u, v = getattr(self, f"u_{kind}"), getattr(self, f"v_{kind}")
            v.copy_(_unit(matrix.t() @ u.float()))
            u.copy_(_unit(matrix @ v.float()))

    @torch.no_grad()
    def rescale_(self, weight: Tensor, factors: Tensor, axis: int) -> None:
        """Multiply rows of what is computed by factors: W takes them, gamma follows the change of sigma."""
        before = self.sigma(whole(weight.detach()))
        shape = [1] * weight.dim()
        shape[axis] = -1
        multiply_(weight, factors.view(shape))
        full = whole(weight.detach())
        for kind, matrix in zip(self.kinds, self._matrices(full), strict=True):
            u, v = leading(matrix)
            getattr(self, f"u_{kind}").copy_(u)
            getattr(self, f"v_{kind}").copy_(v)
        multiply_(self.gamma, (self.sigma(full) / before).to(self.gamma.dtype))


def _take(rows: Tensor, place: list[int]) -> Tensor:
    start, count = place[0], len(place)
    return rows[start : start + count] if place[-1] - start == count - 1 else rows[place]


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp(min=1e-12)


@torch.no_grad()
def leading(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Give the leading singular vectors (u, v) of a matrix in fp32, converged; torch's generators are not used."""
    matrix = matrix.detach().float()
    if min(matrix.shape) <= EXACT_UP_TO:
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[:, 0].clone(), right[0].clone()
    start = torch.randn(matrix.shape[1], VECTORS, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    basis, last = torch.linalg.qr(start)[0], 0.0
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.t() @ (matrix @ basis))[0]
        size = float(torch.linalg.matrix_norm(matrix @ basis, ord=2))
        if abs(size - last) <= 1e-7 * size:
            break
        last = size
    left, _, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[:, 0].clone(), _unit(basis @ right[0])
