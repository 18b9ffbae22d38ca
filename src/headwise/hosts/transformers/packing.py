"""Determine which sequences the rows of a layer's call pack, as the host's own attention separates them.

Flash kernels, and functions that get no mask, separate sequences by `cu_seq_lens_q`, or by positions that restart in a
single row without padding. Masks separate sequences whose positions are not consecutive; tokens that see each other by
the mask are one sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.forward import Running, paddings
from headwise.core.packed import Packed
from headwise.core.recompute import in_backward
from headwise.core.remedies import LEAVE_OUT
from headwise.hosts.transformers.masks import is_block_mask, seeing_themselves, visible_at
from headwise.hosts.transformers.routed import FLEX, PLAIN

COMPILED = (
    "{name} is called on rows that hold several sequences inside a compiled graph, whose shapes cannot depend on "
    "their bounds: compile only the parts beside attention, for example `layer.mlp.compile()` of each layer, or train "
    "on one sequence per row"
)


def packing_of(
    name: str, implementation: str, kwargs: dict[str, Any], shape: tuple[int, int], now: Running
) -> Packed | None:
    """Return how the rows (B, T) of a call pack several sequences, or None if each row is one sequence.

    Args:
        name: name of the layer.
        implementation: its attention implementation. Without a mask, sdpa and flex attention see one sequence; all
            others separate sequences as flash kernels do.
        kwargs: keyword arguments of the layer or of its attention call.
        shape: B and T.
        now: the running forward, which caches the result for the layers that follow.

    Raises:
        RuntimeError: if queries and keys are in different sequences, if the last sequence does not end with the row, or
            in a compiled graph.
    """
    bounds, mask = kwargs.get("cu_seq_lens_q"), kwargs.get("attention_mask")
    without_mask = mask is None and implementation not in (*PLAIN, FLEX)
    if without_mask and bounds is not None:
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED.format(name=name))
        return _cached(
            now, (id(bounds), shape), bounds, lambda: _of_bounds(name, bounds, kwargs.get("cu_seq_lens_k"), shape, now)
        )
    # Some models do not pass the positions, by which they make the mask, to their layers (CTRL).
    positions = kwargs.get("position_ids") if without_mask else kwargs.get("position_ids", now.positions)
    # A layer that runs again in backward belongs to an earlier forward.
    may_pack = now.may_pack or (not torch.compiler.is_compiling() and in_backward())
    if not may_pack or not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] != shape[1]:
        return None
    # Flash kernels use positions if there is one row and no padding; for the others the mask includes them.
    if shape[1] < 2 or not (shape[0] == 1 if without_mask else _may_separate(mask, shape[1])):
        return None
    if torch.compiler.is_compiling():
        one_sequence_a_row(_ran, positions, name)
        return None
    # Fake tensors, on which code for another device is tried, have no numbers.
    if type(positions).__name__ == "FakeTensor":
        return None
    if without_mask:
        return _cached(now, (id(positions), shape), positions, lambda: _of_flash(positions, now))
    key = id(positions), id(mask), shape
    return _cached(now, key, (positions, mask), lambda: _of_mask(positions, mask, shape, now))


# The operator counts its runs here: one without a side effect would be removed from a compiled graph.
_ran = torch.zeros((), dtype=torch.int64)


@torch.library.custom_op("headwise::one_sequence_a_row", mutates_args={"ran"})
def one_sequence_a_row(ran: Tensor, positions: Tensor, name: str) -> None:
    """Raise RuntimeError if a compiled graph runs on rows whose positions (B, T) restart."""
    ran.add_(1)
    if bool((positions.diff(dim=1) != 1).any()):
        raise RuntimeError(COMPILED.format(name=name))


@one_sequence_a_row.register_fake
def _(*arguments: object) -> None:
    return None


def _cached(now: Running, key: Any, tensors: Any, compute: Any) -> Packed | None:
    # The tensors are stored too, so that no other tensor gets the same id.
    if key not in now.packings:
        now.packings[key] = tensors, compute()
    packing: Packed | None = now.packings[key][1]
    return packing


def _may_separate(mask: Any, tokens: int) -> bool:
    """Return whether a mask may separate the sequences of a row."""
    if is_block_mask(mask):
        return tuple(mask.seq_lengths) == (tokens, tokens)
    return isinstance(mask, Tensor) and mask.dim() == 4 and tuple(mask.shape[-2:]) == (tokens, tokens)


def _of_bounds(name: str, bounds: Tensor, of_keys: Any, shape: tuple[int, int], now: Running) -> Packed | None:
    different = of_keys is not None and of_keys is not bounds and not torch.equal(of_keys, bounds)
    if different or int(bounds[0]) != 0 or int(bounds[-1]) != shape[0] * shape[1]:
        reason = (
            "its keys are in other sequences than its queries"
            if different
            else f"it has {shape[0]} x {shape[1]} tokens"
        )
        raise RuntimeError(
            f"{name} is called with cu_seq_lens_q = {bounds.tolist()}, and {reason}: pass bounds that begin at 0, end "
            f"with the last token and are those of the keys too, or {LEAVE_OUT}"
        )
    if len(bounds) == 2 and shape[0] == 1:
        return None
    first = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=bounds.device)
    first[bounds[bounds < len(first)].long()] = True
    first = first.view(shape)
    if bool(first[:, 0].all()) and bool((first.sum(1) == 1).all()):
        return None
    return Packed.of_starts(first, _padding(first, bounds, now))


def _of_flash(positions: Tensor, now: Running) -> Packed | None:
    least = positions.min()
    consecutive = least + torch.arange(positions.shape[1], device=positions.device)
    if bool((positions == consecutive).all()):
        return None
    first = positions == least
    first[:, 0] = True
    if int(first.sum()) == 1:
        return None
    return Packed.of_starts(first, _padding(first, positions, now))


def _of_mask(positions: Tensor, mask: Any, shape: tuple[int, int], now: Running) -> Packed | None:
    first = torch.ones(shape, dtype=torch.bool, device=positions.device)
    first[:, 1:] = positions.diff(dim=1) != 1
    if int(first.sum()) == len(first):
        return None
    # Tokens that a mask hides from themselves are padding; a sequence begins behind it.
    seen = seeing_themselves(mask, shape[1])
    hidden = torch.zeros_like(first) if seen is None else ~seen.expand(shape)
    first[:, 1:] |= hidden[:, :-1]
    first &= ~hidden
    if bool((first.sum(1) <= 1).all()):
        return None
    packing = Packed.of_starts(first, hidden | _padding(first, positions, now))
    if packing is None or packing.allows_across(lambda rows, at: visible_at(mask, rows, at, shape[1])):
        return None
    return packing


def _padding(first: Tensor, told_by: Tensor, now: Running) -> Tensor:
    """Return which tokens belong to padding sequences, (B, T): the last ones of a row that hold the model's padding
    token alone, as collators append them to a row without a mask."""
    padding = paddings.get(told_by, now.padding)
    if padding is None or padding.shape != first.shape:
        return torch.zeros_like(first)
    last = padding.flip(1).cumprod(1).flip(1).bool()
    return (first & last).cumsum(1) > 0
