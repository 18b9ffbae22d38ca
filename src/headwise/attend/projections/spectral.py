"""A weight divided by its largest singular value, block by block, tracked by one power iteration per step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from headwise.attend.projections.block import Block, along, multiply_, whole
from headwise.attend.projections.leading import leading, unit
from headwise.attend.projections.sharded import sharded
from headwise.attend.projections.spectral_group import SpectralGroup, Tiling, dot_of, groups_of, stacked
from headwise.attend.projections.together import is_plain, plain_original, taken
from headwise.borders import in_transform
from headwise.files.errors import LEAVE_OUT
from headwise.numerics.operators import without_autocast
from headwise.numerics.precision import at_least_fp32

# Vectors are stale if so many power iterations find a sigma that is larger by more than this share.
LOOKED_AHEAD, STALE = 8, 0.01
NOT_COPIED = ("_chain", "_copies", "_followed", "_tracked")


class Spectral(nn.Module):
    """The parametrization gamma / sigma * W of each block of a weight; its forward changes no state.

    The singular vectors follow the weight by one power iteration after each step. Two cases have a weight that no step
    of its own has made. A deep copy, such as a teacher that averages the parameters, takes an iteration with each step
    of the model it was copied from, until it takes steps itself. And other parameters may be written into a model, such
    as their average for an evaluation: switching it to evaluation looks for a larger sigma and then computes new
    vectors, which training gives back.

    Args:
        weight: the parameter: a matrix, or that of a convolution, read as (outputs, inputs x kernel).
        blocks: its parts, each with its own sigma; rows outside all blocks are unchanged.
        init: the initial gamma: sigma ("current") or 1 ("one"); None for no gamma, so that the factor is 1 / sigma.

    Raises:
        ValueError: if a block is all zero.
    """

    owner: Tensor
    gamma: nn.Parameter | None
    _chain: Callable[[], nn.Module | None] | None
    _copies: WeakSet[Spectral]
    # of a copy that takes no steps: sigma of the weight that its vectors followed last
    _followed: Tensor | None
    # of a model in evaluation: the vectors with which training continues
    _tracked: list[list[Tensor]] | None

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
        self.tiling = self._tiling(weight)
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
        self._stand_alone()

    def _tiling(self, weight: Tensor) -> Tiling | None:
        """Return how the blocks tile the weight, or None if they do not: sizes differ, or rows belong to none."""
        size = len(self.places[0])
        in_order = [row for place in self.places for row in place] == list(range(weight.shape[self.axis]))
        if not in_order or any(len(place) != size for place in self.places) or (self.axis and weight.dim() > 2):
            return None
        return Tiling(self.axis, size, len(self.places), flipped=(self.axis == 1) != self.columns)

    def _stand_alone(self) -> None:
        """Forget the parametrized weight and the copies, which `place` and copying set."""
        self.__dict__.update(_chain=None, _copies=WeakSet(), _followed=None, _tracked=None)

    def place(self, chain: nn.Module) -> None:
        """Set the list of parametrizations that holds this one and, as `original`, its weight."""
        self.__dict__["_chain"] = weakref.ref(chain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Spectral:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin._stand_alone()
        chain = None if self._chain is None else self._chain()
        if chain is not None and id(chain) in memo:
            twin.place(memo[id(chain)])
            if (weight := self._own_weight()) is not None:
                twin.__dict__["_followed"] = self.sigma(weight)
                self._copies.add(twin)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stand_alone()

    def _own_weight(self) -> Tensor | None:
        """Return the parametrized weight; None if it is not known, has no numbers or lies on several devices."""
        chain = None if self._chain is None else self._chain()
        if chain is None or sharded(chain, "original"):
            return None
        weight = chain.get_parameter("original").detach()
        # Gathering shards takes all processes, and one may evaluate alone.
        return None if weight.is_meta or type(weight) is not Tensor else weight

    def plain_weight(self) -> nn.Parameter | None:
        """Return the parametrized weight if it is a plain parameter with all of its numbers on one device."""
        chain = None if self._chain is None else self._chain()
        return plain_original(chain)

    def _matrices(self, weight: Tensor) -> list[Tensor]:
        """Return each block as (outputs, inputs)."""
        rows = at_least_fp32(weight.transpose(0, self.axis).flatten(1))
        parts = [_take(rows, place) for place in self.places]
        return [part.t() for part in parts] if self.columns else parts

    def sigma(self, weight: Tensor) -> Tensor:
        """Return u W v of each block, (blocks,) in fp32 or wider, differentiable in W alone."""
        if self.tiling is not None:
            group = SpectralGroup([self], [self.tiling])
            dot, norm = dot_of(stacked([weight], group.tilings), *group.vectors())
            return dot / norm
        values = []
        for kind, matrix in zip(self.kinds, self._matrices(weight), strict=True):
            # Normalized again: a model that was cast to fewer bits has rounded vectors.
            u, v = (unit(getattr(self, f"{name}_{kind}").to(matrix.dtype)) for name in "uv")
            values.append(torch.dot(u, matrix @ v))
        return torch.stack(values)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the reparametrized weight, in the shape and dtype of the plain one.

        On CUDA the first layer of a forward of the whole model computes the weights of all.
        """
        if torch.compiler.is_compiling() or self.tiling is None or not is_plain(weight) or in_transform():
            return self.traced(weight, self.gamma)
        computed = taken(self, weight)
        return SpectralGroup([self], [self.tiling]).compute([weight])[0] if computed is None else computed

    def traced(self, weight: Tensor, gamma: Tensor | None) -> Tensor:
        """Compute `forward` by operators that compilers, transforms and second derivatives follow."""
        with without_autocast(weight.device):
            sigma = self.sigma(weight)
            ratio = 1 / sigma if gamma is None else gamma.to(sigma.dtype) / sigma
            factor = torch.cat([ratio, ratio.new_ones(1)])[self.owner]
            return (at_least_fp32(weight) * along(factor, self.axis, weight)).to(weight.dtype)

    @torch.no_grad()
    def iterate(self, weight: Tensor) -> None:
        """Run one power iteration on each block, right vector to left and back, as the authors' code does; and one on
        each copy whose weight has changed and that takes no steps itself."""
        self._iterate(weight)
        self.stepped()

    def stepped(self) -> None:
        """Note that a step was made and its weight followed, and let the vectors of copies follow theirs."""
        self.__dict__.update(_followed=None, _tracked=None)
        self._follow_copies()

    def _iterate(self, weight: Tensor) -> None:
        full = whole(weight.detach())
        if self.tiling is not None:
            SpectralGroup([self], [self.tiling]).iterate([full])
            return
        for kind, matrix in zip(self.kinds, self._matrices(full), strict=True):
            u, v = self._vectors(kind)
            u.copy_(unit(matrix @ v.to(matrix.dtype)))
            v.copy_(unit(matrix.t() @ u.to(matrix.dtype)))

    def vectors(self, name: str) -> list[Tensor]:
        """Return the left ("u") or right ("v") singular vectors, block by block."""
        return [getattr(self, f"{name}_{kind}") for kind in self.kinds]

    def _vectors(self, kind: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"u_{kind}"), getattr(self, f"v_{kind}")

    def _follow_copies(self) -> None:
        for twin in list(self._copies):
            if twin._followed is None:
                self._copies.discard(twin)
            elif (weight := twin._own_weight()) is not None:
                twin._follow(weight)
                twin._follow_copies()

    def _follow(self, weight: Tensor) -> None:
        # Where sigma has kept its bits the weight is that of the last time, and the vectors keep theirs; asking in
        # Python would wait for the device.
        last, now = self._followed, self.sigma(weight)
        assert last is not None
        comparable = last.device == now.device and last.dtype == now.dtype
        moved = torch.ne(now, last) if comparable else torch.ones_like(now, dtype=torch.bool)
        before = [[x.clone() for x in self._vectors(kind)] for kind in self.kinds]
        self._iterate(weight)
        for kind, block_moved, old in zip(self.kinds, moved, before, strict=True):
            for vector, kept in zip(self._vectors(kind), old, strict=True):
                vector.copy_(torch.where(block_moved, vector, kept))
        self.__dict__["_followed"] = self.sigma(weight)

    def train(self, mode: bool = True) -> Spectral:
        """Switch the mode; before an evaluation, compute the vectors of a weight that they have not followed."""
        if mode != self.training:
            self.give_back() if mode else self.settle()
        return super().train(mode)

    @torch.no_grad()
    def settle(self) -> None:
        """Compute the vectors again if a few power iterations find a sigma that is more than a hundredth larger."""
        weight = self._own_weight()
        if weight is None or self._tracked is not None:
            return
        before = [[x.clone() for x in self._vectors(kind)] for kind in self.kinds]
        sigma = self.sigma(weight)
        for _ in range(LOOKED_AHEAD):
            self._iterate(weight)
        stale = self.sigma(weight) > (1 + STALE) * sigma.abs()
        new = [leading(matrix) for matrix in self._matrices(weight)] if stale.any() else before
        for kind, vectors in zip(self.kinds, new, strict=True):
            for vector, value in zip(self._vectors(kind), vectors, strict=True):
                vector.copy_(value)
        if stale.any():
            self.__dict__["_tracked"] = before

    @torch.no_grad()
    def give_back(self) -> None:
        """Undo `settle`: training continues with the vectors that it had."""
        for kind, vectors in zip(self.kinds, self._tracked or [], strict=False):
            for vector, value in zip(self._vectors(kind), vectors, strict=True):
                vector.copy_(value)
        self.__dict__["_tracked"] = None

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
        multiply_(weight, along(factors, axis, weight))
        # The result is correct with any vectors; one iteration tracks the change, as after a training step.
        self.iterate(weight)
        multiply_(self.gamma, (self.sigma(whole(weight.detach())) / before).to(self.gamma.dtype))


@torch.no_grad()
def iterate_all(spectrals: Iterable[Spectral]) -> None:
    """Run `iterate` with their own weights, of those that can be stacked in a few kernels."""
    every = list(spectrals)
    together = groups_of(every)
    for group, weights in together:
        group.iterate([weight.detach() for weight in weights])
    grouped = {id(spectral) for group, _ in together for spectral in group.spectrals}
    for spectral in every:
        if id(spectral) in grouped:
            spectral.stepped()
        else:
            chain = None if spectral._chain is None else spectral._chain()
            assert isinstance(chain, ParametrizationList)
            spectral.iterate(chain.original)


def _covers(block: Block, size: int) -> bool:
    return len(torch.arange(size)[block.rows.cpu() if isinstance(block.rows, Tensor) else block.rows]) == size


def _take(rows: Tensor, indices: list[int]) -> Tensor:
    start, count = indices[0], len(indices)
    return rows[start : start + count] if indices[-1] - start == count - 1 else rows[indices]
