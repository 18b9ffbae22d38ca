"""NuclearDecay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.attend import projections
from headwise.attend.core import Method, MethodState, Site
from headwise.attend.projections.gram_penalty import gram_penalty, in_transforms
from headwise.attend.projections.newton_schulz import cubics
from headwise.attend.projections.products import factors, refusal, weighted_products
from headwise.borders import in_transform
from headwise.numerics.operators import without_autocast

# Singular values below this fraction of the largest count as 0, where the subgradient is 0.
ZERO = 1e-6
ROUNDING = 1e-12
CUBICS = cubics(ZERO, error=1e-14)


class NuclearDecay(Method):
    """Penalises the nuclear norms of the products W_Q·W_Kᵀ and W_O·W_V of each head.

    Weight decay on the factors amounts to this: Kobayashi et al. 2024, arXiv 2410.23819.

    Adds strength · sum of singular values, summed over heads and both products, to the loss, once per loss; the
    subgradient is U·Vᵀ. Computed from QR factors without the products, as the singular values of Aᵀ·B are those of
    R_A·R_Bᵀ; on CUDA from Gram matrices in fp64, without a decomposition. With rotary positions the product is that of
    tokens at the same position. Set the optimizer's weight decay of the attention weights to 0 when using it.
    """

    strength: float = 0.01

    neutral = {"strength": 0.0}
    strong = {"strength": 1.0}
    live = ("strength",)
    penalizes = True

    def check(self) -> None:
        self.require(self.strength >= 0, f"strength must be at least 0, got {self.strength}")

    def refuse(self, site: Site) -> str | None:
        return refusal(site, "NuclearDecay")

    def penalty(self, site: Site, state: MethodState) -> Tensor:
        norms = [nuclear_norm(a, b).sum() for a, b in factors(projections.of(site))]
        return state.value("strength") * torch.stack(norms).sum()

    def penalties(self, fits: Sequence[tuple[Site, MethodState]]) -> list[Tensor]:
        # There a decomposition runs matrix by matrix, and waits for the device.
        on_cuda = [fit for fit in fits if next(fit[0].module.parameters()).device.type == "cuda"]
        by_products = gram_penalty(weighted_products(on_cuda), norms_by_products, torch.float64)
        return by_products + [self.penalty(*fit) for fit in fits if fit not in on_cuda]


def nuclear_norm(a: Tensor, b: Tensor) -> Tensor:
    """Return the nuclear norms (H,) of Aᵀ·B for factors (H, d, C), (H, d, C'), with subgradient U·Vᵀ."""
    # QR and SVD do not support half precision.
    with without_autocast(a.device):
        if torch.compiler.is_compiling():
            return _by_vectors(a, b, *singular_vectors(a, b))
        if in_transform():
            # What a transform differentiates may be differentiated again, for which U and V are no constants.
            return in_transforms(norms_by_products, *(x @ x.mT for x in (a.double(), b.double()))).to(a.dtype)
        norms: Tensor = _NuclearNorm.apply(a, b)
        return norms


def _by_vectors(a: Tensor, b: Tensor, u: Tensor, v: Tensor) -> Tensor:
    # ⟨U·Vᵀ, Aᵀ·B⟩ is the norm, and for constant U and V its gradient is the norm's subgradient.
    return ((a @ u) * (b @ v)).sum((-1, -2))


class _NuclearNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        u, v = singular_vectors(a, b)
        ctx.save_for_backward(a, b, u, v)
        return _by_vectors(a, b, u, v)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, Tensor]:
        a, b, u, v = ctx.saved_tensors
        above = above[:, None, None]
        with without_autocast(above.device):
            if not torch.is_grad_enabled():
                return above * ((b @ v) @ u.mT), above * ((a @ u) @ v.mT)
            # A second derivative is asked for, in which U and V are no constants.
            wide = a.double(), b.double()
            _, *slopes = norms_by_products(*(x @ x.mT for x in wide))
            of_a, of_b = ((slope @ x).to(x0.dtype) for slope, x, x0 in zip(slopes, wide, (a, b), strict=True))
            return above * of_a, above * of_b


@torch.no_grad()
def singular_vectors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular vectors of Aᵀ·B, U (H, C, d) and V (H, C', d), with U set to 0 for singular values of 0."""
    qa, ra = torch.linalg.qr(a.mT)
    qb, rb = torch.linalg.qr(b.mT)
    left, values, right = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
    nonzero = (values > ZERO * values[..., :1]).to(left.dtype).unsqueeze(-2)
    return qa @ (left * nonzero), qb @ right.mT


def norms_by_products(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nuclear norms (N,) of Aᵀ·B from the Gram matrices (N, d, d) of A and B, by matrix products alone.

    The gradients are Z·A and W·B with Z·AAᵀ·Z = BBᵀ and W = Z⁻¹ (Z is the geometric mean of (AAᵀ)⁻¹ and BBᵀ), which the
    coupled Newton-Schulz iteration of a square root finds: with W = AAᵀ and Z = BBᵀ at the start, ZW has the squared
    singular values. In fp64 the norms are right to 1e-14 and the gradients to 1e-10 of their largest entry, where all
    singular values are above 1e-3 of the largest or 0; below 1e-6 of the Frobenius norm a singular value counts as 0
    by and by, with a subgradient between 0 and that of the norm.
    """
    square = (a * b).sum((-1, -2), keepdim=True)
    with torch.no_grad():
        sizes = [torch.linalg.vector_norm(x, dim=(-1, -2), keepdim=True) for x in (a, b)]
        # Below, the product is what rounding of the Gram matrices has left.
        nonzero = square > ROUNDING * sizes[0] * sizes[1]
    # A root that is selected away would still have a gradient that is not a number; this one's is 0.
    scale = torch.where(nonzero, square, float("inf")).rsqrt()
    w, z = a * scale, b * scale
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    for factor in CUBICS:
        inner = torch.baddbmm(one, z, w, beta=1.5 * factor, alpha=-0.5 * factor**3)
        w, z = w @ inner, inner @ z
    return (z * a).sum((-1, -2)), z, w
