"""Heads on a Stiefel manifold: all singular values of each head's matrix stay 1."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attend.optimizers.attached import Attached, refuse_clipping, refuse_decay
from headwise.attend.optimizers.orthogonal import by_shape, chunks, polar
from headwise.attend.optimizers.parts import Per, parts_of, write_all_
from headwise.attend.projections.block import overwrite_, whole
from headwise.attend.regularizing.parameter_groups import ParameterGroups
from headwise.files.arguments import finite_number

KEEPS = "Stiefel keeps the singular values"


class Stiefel(Attached):
    """Sets all singular values of each head's W_q, W_k, W_v and W_o to one value, now and after every step.

    W ← r·UVᵀ of W = USVᵀ, the polar retraction onto the Stiefel manifold: Yoshihara 2026, arXiv 2606.13276, for the
    weights of attention, there for whole matrices. The retraction removes, to first order, the part of a step that
    leaves the manifold. The source's optimizer also searches the best step among those that do not leave it; here the
    step is the optimizer's own. The weights change when this is attached, so that it suits models trained from scratch.

    Args:
        optimizer: moves the weights, and should not decay them.
        groups: what `headwise.parameter_groups` returned, from which the optimizer was built.
        per: "head", "group" for `heads_per_group` heads, or "matrix" as in the source.
        heads_per_group: query heads of a group.
        layers: "attention" as in the source's best setting, or "all".
        radius: r, the singular values; 1 in the source.

    Raises:
        TypeError, ValueError: if the optimizer decays these matrices or holds none of them, QKClip shrinks them, or the
            heads of a layer cannot be told or divided.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> groups = headwise.parameter_groups(model, lr=1e-3, weight_decay=0.0)
        >>> stiefel = headwise.Stiefel(headwise.Muon(groups), groups)
    """

    fixes = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ParameterGroups,
        per: Per = "head",
        *,
        heads_per_group: int | None = None,
        layers: str = "attention",
        radius: float = 1.0,
    ) -> None:
        finite_number("radius", radius)
        if not radius:
            raise ValueError("radius must be above 0, got 0")
        super().__init__(optimizer)
        self.groups, self.radius = groups, radius
        self.parts = parts = parts_of(groups, per, heads_per_group, layers, "Stiefel")
        refuse_clipping(groups, "Stiefel")
        self._find(groups, parts.of, "Stiefel")
        refuse_decay(self._held(moved=False), parts, KEEPS)
        self._first = True
        self._attach()
        self._retract(moved=False)

    def _before(self, closure: bool) -> None:
        # A schedule or a loaded state may have set one since.
        refuse_decay(self._held(moved=False), self.parts, KEEPS)
        if self._first:
            refuse_clipping(self.groups, "Stiefel")
            self._first = False

    def _after(self) -> None:
        self._retract(moved=True)

    @torch.no_grad()
    def _retract(self, moved: bool) -> None:
        held = list(self._held(moved))
        for some in chunks([one.parameter.numel() for one in held]):
            weights = [whole(held[at].parameter.detach()) for at in some]
            parts = [held[at].parts for at in some]
            stacks = [part.of(w) for w, own in zip(weights, parts, strict=True) for part in own]
            write_all_(weights, parts, by_shape(self._polar, stacks))
            for at, weight in zip(some, weights, strict=True):
                if hasattr(held[at].parameter, "full_tensor"):
                    overwrite_(held[at].parameter, weight)

    def _polar(self, matrices: Tensor) -> Tensor:
        wide = matrices if matrices.dtype == torch.float64 else matrices.float()
        return polar(wide).mul_(self.radius).to(matrices.dtype)
