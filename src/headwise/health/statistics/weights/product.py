"""The product of two projections of each head, computed from its factors, and the base class of its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from headwise.numerics.precision import magnitude


@dataclass(frozen=True, eq=False)
class Product:
    """The products A_h^T B_h of one site: W_K^T W_Q ("qk") or W_O W_V ("vo").

    Under grouped queries one factor is shared by the heads of a group, the other is each head's own.

    Attributes:
        kind: "qk" or "vo".
        own: (H, d, C), the factor of each head: queries or output.
        shared: (G, d, C'), the factor of each group: keys or values; G divides H.
        pairs: (pairs, 2) rows that a rotary position rotates into each other, with rows that it does not rotate as
            (row, row), on the CPU; None without rotary positions.
        normed: whether the host normalises queries and keys between the factors.
        common: whether rows of `shared` are common to all heads, like the rotary key of latent attention.
    """

    kind: str
    own: Tensor
    shared: Tensor
    pairs: Tensor | None = None
    normed: bool = False
    common: bool = False

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.own.shape[0]

    @property
    def groups(self) -> int:
        """Return the number of key/value heads."""
        return self.shared.shape[0]

    @property
    def size(self) -> int:
        """Return the head size d."""
        return self.own.shape[1]

    @property
    def width(self) -> int:
        """Return the smaller dimension of the product."""
        return min(self.own.shape[2], self.shared.shape[2])

    @cached_property
    def units(self) -> tuple[Tensor, Tensor]:
        """Return the units of the own and of the shared factor, (G,) each: powers of two near their largest number."""
        own = self.own.unflatten(0, (self.groups, -1))
        return magnitude(own, (1, 2, 3)).flatten(), magnitude(self.shared, (1, 2)).flatten()

    @cached_property
    def in_units(self) -> Product:
        """Return the product of the factors in their units, which has the same ranks, and in which none underflows."""
        return self._divided_by(*self.units)

    @property
    def one_unit(self) -> Tensor:
        """Return the larger of both units, (G,)."""
        return torch.maximum(*self.units)

    @cached_property
    def in_one_unit(self) -> Product:
        """Return the product of both factors in one unit, in which they have the same balance."""
        return self._divided_by(self.one_unit, self.one_unit)

    def _divided_by(self, own: Tensor, shared: Tensor) -> Product:
        own = own.repeat_interleave(self.heads // self.groups)
        return replace(self, own=self.own / own[:, None, None], shared=self.shared / shared[:, None, None])

    @cached_property
    def own_root(self) -> Tensor:
        """Return R (H, d', d) of the QR of the own factor in its unit: R^T R = A A^T."""
        return _root(self.in_units.own)

    @cached_property
    def shared_root(self) -> Tensor:
        """Return R (G, d', d) of the QR of the shared factor in its unit."""
        return _root(self.in_units.shared)

    @cached_property
    def spectrum(self) -> Tensor:
        """Return the singular values of each head's product, (H, d), largest first."""
        own, shared = (unit.repeat_interleave(self.heads // self.groups)[:, None] for unit in self.units)
        return self.relative_spectrum * own * shared

    @cached_property
    def relative_spectrum(self) -> Tensor:
        """Return the singular values (H, d) of each head's product in the factors' units: those of R_own R_shared^T."""
        shared = self.shared_root.repeat_interleave(self.heads // self.groups, 0)
        return singular_values(self.own_root @ shared.mT)

    @cached_property
    def relative_group_spectrum(self) -> Tensor:
        """Return the singular values (G, d) of each group's product [A_1^T B, A_2^T B, ...] in the factors' units."""
        if self.heads == self.groups:
            return self.relative_spectrum
        joined = torch.linalg.qr(self.own_root.unflatten(0, (self.groups, -1)).flatten(1, 2), mode="r")[1]
        return singular_values(joined @ self.shared_root.mT)

    @cached_property
    def own_gram(self) -> Tensor:
        """Return the sum over a group of A A^T, (G, d, d)."""
        return (self.own @ self.own.mT).unflatten(0, (self.groups, -1)).sum(1)

    @cached_property
    def shared_gram(self) -> Tensor:
        """Return B B^T, (G, d, d)."""
        return self.shared @ self.shared.mT


def _root(factor: Tensor) -> Tensor:
    """Return R (n, d', d) with R^T R = A A^T of factors A (n, d, C)."""
    return factor.mT if factor.shape[2] <= factor.shape[1] else torch.linalg.qr(factor.mT, mode="r")[1]


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values (n, d) of matrices, NaN instead of an error for a matrix that is not finite."""
    finite = matrices.isfinite().all(-1).all(-1)
    known = torch.where(finite[:, None, None], matrices, 0.0)
    values = by_eigenvalues(known) if known.device.type == "cuda" else torch.linalg.svdvals(known)
    return torch.where(finite[:, None], values, torch.nan)


def by_eigenvalues(matrices: Tensor) -> Tensor:
    """Return the singular values of matrices (n, r, d), largest first, as the roots of eigenvalues in fp64.

    A GPU has a solver of many symmetric matrices at a time, and none of singular values of matrices above 32 x 32. The
    values are accurate to 1e-8 of the largest.
    """
    wide = matrices.double()
    gram = wide @ wide.mT if wide.shape[1] <= wide.shape[2] else wide.mT @ wide
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flip(-1).to(matrices.dtype)


NORMED = "queries and keys are normalised after the projection, so that the law of weight decay does not apply to them"

COMMON = "all heads share rows of the keys, so weight decay does not balance the factors of a single head"


def unbalanced(product: Product) -> str | None:
    """Return the reason why weight decay does not balance the factors of a head or group, or None if it does."""
    return NORMED if product.normed else COMMON if product.common else None


class WeightStatistic(ABC):
    """Turns a product into one number per head, or per group of heads that share keys and values.

    A subclass is one file: its docstring says what is computed, in which unit, and its source.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    # "head", or "group" for one figure of all heads that share keys and values.
    per: ClassVar[str] = "head"
    # Whether a "high" or a "low" value is a warning sign, or neither.
    worse: ClassVar[str | None] = None

    def applies(self, product: Product) -> str | None:
        """Return the reason why the statistic does not apply to a product, or None if it does."""
        return None

    @abstractmethod
    def of(self, product: Product) -> Tensor:
        """Return the figure, (H,) per head or (G,) per group."""
