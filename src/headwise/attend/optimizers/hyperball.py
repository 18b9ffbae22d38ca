"""Hyperball: matrices of constant norm, moved by updates of constant norm."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from headwise.attend.optimizers.attached import Attached, Held, copies, refuse_clipping, refuse_decay
from headwise.attend.optimizers.orthogonal import by_shape, chunks
from headwise.attend.optimizers.parts import Part, Per, parts_of, write_all_
from headwise.attend.projections.block import overwrite_, whole
from headwise.attend.regularizing.parameter_groups import ParameterGroups

RADIUS = "hyperball_radius"

KEEPS = "Hyperball keeps the norm"


class Hyperball(Attached):
    """Keeps the norm of each matrix, and moves it by a share of that norm, along the update of any optimizer.

    W ← R·(W - ηR·u/‖u‖) / ‖W - ηR·u/‖u‖‖ with Frobenius norms, u the optimizer's own update of W, η its learning rate,
    and R the norm of W before the first step (Wen et al. 2026, arXiv 2606.16899). It replaces weight decay, and the
    learning rate becomes the relative size of a step: 0.01 moves a matrix by about one per cent. The radii are part of
    the optimizer's state. A copy of the weights is held during a step.

    Args:
        optimizer: moves the weights; its weight decay must be 0 for the matrices.
        groups: what `headwise.parameter_groups` returned, from which the optimizer was built.
        per: "matrix" as in the source, "head", or "group" for `heads_per_group` heads.
        heads_per_group: query heads of a group.
        layers: "all", or "attention" to leave the matrices of MLPs out.

    Raises:
        TypeError, ValueError: if the optimizer decays these matrices or holds none of them, a matrix is zero, QKClip
            shrinks them, or the heads of a layer cannot be told or divided.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.0)
        >>> optimizer = torch.optim.AdamW(groups)
        >>> hyperball = headwise.Hyperball(optimizer, groups)
    """

    fixes = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: ParameterGroups,
        per: Per = "matrix",
        *,
        heads_per_group: int | None = None,
        layers: str = "all",
    ) -> None:
        super().__init__(optimizer)
        self.groups = groups
        self.parts = parts = parts_of(groups, per, heads_per_group, layers, "Hyperball")
        refuse_clipping(groups, "Hyperball")
        self._find(groups, parts.of, "Hyperball")
        refuse_decay(self._held(moved=False), parts, KEEPS)
        for parameter, _, own in self._held(moved=False):
            if RADIUS not in optimizer.state[parameter] and (radii(whole(parameter.detach()), own) == 0).any():
                raise ValueError(
                    f"a matrix of {parts.name(parameter)} is zero, and Hyperball would keep it so: initialise it"
                )
        self._copies: list[Tensor] = []
        self._attach()

    @torch.no_grad()
    def _before(self, closure: bool) -> None:
        # A schedule or a loaded state may have set one since.
        refuse_decay(self._held(moved=False), self.parts, KEEPS)
        self._refuse_other_radii()
        if not self._copies:
            refuse_clipping(self.groups, "Hyperball")
        # All of them: a closure computes the gradients within the step.
        self._copies = copies(list(self._held(moved=False)))

    @torch.no_grad()
    def _after(self) -> None:
        pairs = zip(self._held(moved=False), self._copies, strict=True)
        moved = [(held, before) for held, before in pairs if held.parameter.grad is not None]
        for _, group in itertools.groupby(moved, key=lambda pair: id(pair[0].group)):
            alike = list(group)
            for some in chunks([before.numel() for _, before in alike]):
                self._move([alike[at][0] for at in some], [alike[at][1] for at in some])

    def _move(self, held: list[Held], before: list[Tensor]) -> None:
        """Move parameters of one group, given their whole weights before the step."""
        rate = held[0].group["lr"]
        after = [whole(one.parameter.detach()) for one in held]
        parts = [one.parts for one in held]
        old, new = ([part.of(w) for w, own in zip(x, parts, strict=True) for part in own] for x in (before, after))
        sizes = [size for one, weight in zip(held, before, strict=True) for size in self._radii(one, weight)]

        def moved(old: Tensor, new: Tensor, size: Tensor) -> Tensor:
            return _unit(old - _unit(old - new).mul_(size * rate)).mul_(size)

        write_all_(after, parts, by_shape(moved, old, new, sizes))
        for one, weight in zip(held, after, strict=True):
            if hasattr(one.parameter, "full_tensor"):
                overwrite_(one.parameter, weight)

    def _refuse_other_radii(self) -> None:
        for held in self._held(moved=False):
            known, count = self.optimizer.state.get(held.parameter, {}).get(RADIUS), sum(p.count for p in held.parts)
            if known is not None and len(known) != count:
                raise ValueError(
                    f"the loaded state has {len(known)} norms for {self.parts.name(held.parameter)}, and Hyperball "
                    f"keeps {count} here: build it with the settings that it had when the state was saved"
                )

    def _radii(self, held: Held, before: Tensor) -> list[Tensor]:
        """Return the norms (count, 1, 1) of the matrices of each part before the first step."""
        state = self.optimizer.state[held.parameter]
        if RADIUS not in state:
            state[RADIUS] = radii(before, held.parts)
        sizes = state[RADIUS].split([part.count for part in held.parts])
        return [size[:, None, None] for size in sizes]


def radii(weight: Tensor, parts: list[Part]) -> Tensor:
    """Return the Frobenius norms of all matrices of a whole weight."""
    return torch.cat([torch.linalg.vector_norm(part.of(weight), dim=(1, 2)) for part in parts])


def _unit(matrices: Tensor) -> Tensor:
    """Return matrices (n, r, C) with norm 1; zeros stay zero."""
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    return matrices / norms.clamp(min=torch.finfo(matrices.dtype).tiny)
