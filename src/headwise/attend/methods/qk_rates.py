"""QKRates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.attend import projections
from headwise.attend.core import Call, Method, MethodState, Site
from headwise.attend.methods.reparametrization import hold, release, without_numbers
from headwise.attend.projections import ProjectionError, together
from headwise.attend.projections.adapted import MERGE, is_adapted
from headwise.attend.projections.block import along, as_rows, overwrite_, whole
from headwise.attend.projections.latent import Piece, piece_of
from headwise.attend.projections.latent import pieces as latent_pieces
from headwise.attend.projections.together import is_plain
from headwise.borders import copy_all_
from headwise.numerics.precision import at_least_fp32

# The largest number of elements of stacked weights.
STACKED = 1 << 26


class QKRates(Method):
    """Lets queries and keys learn at rates that fall as the weights they are multiplied with grow.

    Anson and Aitchison 2025, arXiv 2511.21377 (QuacK).

    η_Q = rate·η·‖W_K‖₀ / ‖W_K‖ and η_K = rate·η·‖W_Q‖₀ / ‖W_Q‖ for each head, with Frobenius norms, ‖·‖₀ the initial
    ones, so that the change of the logits in a step is bounded however large the weights become. Latent attention
    (DeepSeek) uses the paper's rates of its factors; if heads share keys, the largest norm of their query weights
    counts, as in the paper for shared factors. An optimizer's parameter groups cannot express rates per head, because a
    parameter holds all heads. Instead the change of each head is scaled after the step, which is equivalent for every
    optimizer whose steps are proportional to its rate, including weight decay. Biases are scaled like their rows. It
    stores a copy of the layer's query and key weights from before the step, and must come before other methods that
    write weights after the step. Hosts that normalise queries and keys are refused.
    """

    rate: float = 1.0

    no_neutral = "the rates follow the size of the weights, whatever it is at the start"
    strong = {"rate": 10.0}

    def check(self) -> None:
        self.require(self.rate > 0, f"rate must be above 0, got {self.rate}")

    def refuse(self, site: Site) -> str | None:
        if site.qk_norm:
            return "would change no logit: the host normalises queries and keys itself"
        if reason := without_numbers(site):
            return reason
        try:
            pieces = _pieces(site)
        except ProjectionError as error:
            return str(error)
        adapted = next((piece.where for piece in pieces.values() if is_adapted(piece.weight[0])), "")
        return f"sets the rates of whole weights, and {adapted} is adapted: {MERGE}" if adapted else None

    def build(self, site: Site, state: MethodState) -> None:
        pieces = _pieces(site)
        weights = {(id(piece.weight[0]), piece.weight[1]): (*piece.weight, piece.where) for piece in pieces.values()}
        biases = {(id(piece.bias[0]), piece.bias[1]): piece.bias for piece in pieces.values() if piece.bias is not None}
        first = hold(state, "QKRates", list(weights.values()))
        if 0 < len(first) < len(weights):
            release(state)
            raise ValueError(
                f"QKRates: {site.name} shares some of its query and key weights with another layer; leave one of them "
                "out with where="
            )
        # If layers share all their weights, only the first scales the change.
        state.keep("pieces", pieces if first else {})
        state.keep(
            "parameters", [*((module, name) for module, name, _ in weights.values()), *biases.values()] if first else []
        )
        for index, (module, name) in enumerate(state.kept("parameters")):
            state.buffer(f"before_{index}", whole(getattr(module, name).detach()).clone())
        for kind, factor in _factors(state.kept("pieces"), _current).items():
            state.buffer(f"start_{kind}", factor, saved=True)
        layout = _layout(state)
        state.keep("layout", layout)
        if layout is not None:
            # A table that is made in the step would be copied to the device there.
            state.buffer("owners", layout.table().to(state.tensor("before_0").device))
        # whether a forward of the whole model has copied the weights
        state.keep("noted", False)

    def unbuild(self, site: Site, state: MethodState) -> None:
        release(state)

    def forward_begins(self, fits: Sequence[tuple[Site, MethodState]]) -> Callable[[], None]:
        noted = [state for site, state in fits if site.module.training and _stackable(state)]
        if noted:
            targets = [getattr(*of).detach() for state in noted for of in state.kept("parameters")]
            copy_all_([old for state in noted for old in _before(state, written=True)], targets)
        for state in noted:
            state.keep("noted", True)

        def end() -> None:
            for state in noted:
                state.keep("noted", False)

        return end

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        # The weights before a step are those of the last forward, even if others were loaded since the last step.
        state = call.state(self)
        if not state.kept("noted"):
            for (module, name), old in zip(state.kept("parameters"), _before(state, written=True), strict=True):
                old.copy_(getattr(module, name).detach())
        return q, k, v

    def after_step(self, site: Site, state: MethodState) -> None:
        self.after_steps([(site, state)])

    @torch.no_grad()
    def after_steps(self, fits: Sequence[tuple[Site, MethodState]]) -> None:
        groups: dict[Any, list[MethodState]] = {}
        for _, state in fits:
            if _stackable(state):
                old = _before(state)
                groups.setdefault((state.kept("layout"), old[0].dtype, old[0].device), []).append(state)
            else:
                self._scale_alone(state)
        for states in groups.values():
            # Stacking all layers of a large model at once would take as much memory again.
            many = max(1, STACKED // sum(old.numel() for old in _before(states[0])))
            for first in range(0, len(states), many):
                self._scale_together(states[first : first + many])

    def _scale_alone(self, state: MethodState) -> None:
        parameters, pieces = state.kept("parameters"), state.kept("pieces")
        before = {(id(module), name): old for (module, name), old in zip(parameters, _before(state), strict=True)}
        factors = _factors(pieces, lambda module, name: before[id(module), name])
        rates = {kind: self.rate * factor / state.tensor(f"start_{kind}") for kind, factor in factors.items()}
        for (module, name), old in zip(parameters, _before(state), strict=True):
            parameter = getattr(module, name).detach()
            now = whole(parameter)
            by_row = _by_row(pieces, rates, module, name, now)
            after = torch.where(by_row == 1, now, old + by_row * (now - old)).to(now.dtype)
            overwrite_(parameter, after)
            # Needed if the layer does not run before the next step.
            old.copy_(after)

    def _scale_together(self, states: list[MethodState]) -> None:
        """Do the same for layers of one layout, stacked, so that a model takes no more kernels than a layer."""
        layout: Layout = states[0].kept("layout")
        targets = [getattr(*of).detach() for state in states for of in state.kept("parameters")]
        olds = [old for state in states for old in _before(state)]
        now, old = layout.stacked(targets, olds)
        norm = {}
        for kind, (index, heads, first, stop) in layout.heads.items():
            rows = old[index].transpose(1, 1 + layout.axes[index])[:, first:stop]
            norm[kind] = torch.linalg.vector_norm(rows.unflatten(1, (heads, -1)), dim=(2, 3))
        groups = norm["q"].unflatten(1, (norm["k"].shape[1], -1))
        against = torch.cat([norm["k"].unsqueeze(2).expand_as(groups).flatten(1), groups.amax(2)], 1)
        start = torch.cat([state.tensor(f"start_{kind}") for state in states for kind in "qk"]).view_as(against)
        factors = against.reciprocal()
        rates = (factors if self.rate == 1 else self.rate * factors) / start
        # The share of the old numbers in the new ones: exactly 0 at a rate of 1, and of rows in no head.
        shares = F.pad(1 - rates, (0, 1))[:, states[0].tensor("owners")]
        for new, before, axis, share in zip(now, old, layout.axes, shares.split(layout.rows(), 1), strict=True):
            new.lerp_(before, share.view(len(states), *[-1 if i == axis else 1 for i in range(new.dim() - 1)]))
        after = [new[index] for index in range(len(states)) for new in now]
        copy_all_([*targets, *olds], [*after, *after])


@dataclass(frozen=True)
class Layout:
    """Where the heads of queries and keys lie in the parameters of a layer.

    Attributes:
        shapes, axes: of each parameter, and the axis of its rows.
        heads: for "q" and "k" the index of the weight, the number of heads, the first row and the one after the last.
        owners: for the rows of all parameters the index of their head, queries first; -1 for none.
    """

    shapes: tuple[torch.Size, ...]
    axes: tuple[int, ...]
    heads: dict[str, tuple[int, int, int, int]] = field(compare=False)
    owners: tuple[int, ...]

    def stacked(self, *each: list[Tensor]) -> Iterator[list[Tensor]]:
        """Yield each parameter (layers, *shape) of those of several layers, in fp32 or wider; all from one copy."""
        sizes = [shape.numel() for shape in self.shapes]
        full = at_least_fp32(torch.cat([x.flatten() for tensors in each for x in tensors]))
        for rows in full.view(len(each), -1, sum(sizes)).unbind():
            yield [part.unflatten(1, shape) for part, shape in zip(rows.split(sizes, 1), self.shapes, strict=True)]

    def rows(self) -> list[int]:
        """Return the number of rows of each parameter."""
        return [shape[axis] for shape, axis in zip(self.shapes, self.axes, strict=True)]

    def table(self) -> Tensor:
        """Return the owners, with as many as there are heads for none."""
        none = sum(heads for _, heads, *_ in self.heads.values())
        return torch.tensor([none if owner < 0 else owner for owner in self.owners])


def _layout(state: MethodState) -> Layout | None:
    """Return the layout of a layer, or None for latent attention and for heads whose rows are not in order."""
    pieces, parameters = state.kept("pieces"), state.kept("parameters")
    if set(pieces) != {"q", "k"}:
        return None
    index = {(id(module), name): i for i, (module, name) in enumerate(parameters)}
    shapes = tuple(getattr(*of).shape for of in parameters)
    axes, heads, first = [0] * len(parameters), {}, 0
    for kind, piece in pieces.items():
        at, rows = index[id(piece.weight[0]), piece.weight[1]], as_rows(piece.rows.cpu())
        if not isinstance(rows, slice):
            return None
        axes[at], heads[kind] = piece.axis, (at, len(piece.rows), rows.start, rows.stop)
    owners = [torch.full((shape[axis],), -1) for shape, axis in zip(shapes, axes, strict=True)]
    for kind in "qk":
        piece = pieces[kind]
        for owner, rows in ((piece.weight, piece.rows), (piece.bias, piece.bias_rows)):
            if owner is not None and rows is not None:
                owners[index[id(owner[0]), owner[1]]][rows.cpu()] = torch.arange(first, first + len(rows))[:, None]
        first += len(piece.rows)
    return Layout(shapes, tuple(axes), heads, tuple(torch.cat(owners).tolist()))


def _stackable(state: MethodState) -> bool:
    """Return whether the layer's parameters can be stacked with others' now: plain, of one dtype, on CUDA."""
    if state.kept("layout") is None:
        return False
    parameters = [getattr(*of) for of in state.kept("parameters")]
    return (
        all(is_plain(x) for x in parameters)
        and len({(x.dtype, x.device) for x in parameters}) == 1
        and parameters[0].device.type in together.TOGETHER_ON
    )


def _before(state: MethodState, *, written: bool = False) -> list[Tensor]:
    """Return the parameters of a layer before the step; `written` if a forward writes them."""
    find = state.writable if written else state.tensor
    return [find(f"before_{index}") for index in range(len(state.kept("parameters")))]


def _pieces(site: Site) -> dict[str, Piece]:
    latent = latent_pieces(site.module, site.name)
    if latent is not None:
        return latent
    return {block.kind: piece_of(block) for block in projections.of(site).need("qk", "QKRates", of="rows")}


def _current(module: nn.Module, name: str) -> Tensor:
    return whole(getattr(module, name))


def _factors(pieces: dict[str, Piece], weight_of: Callable[[nn.Module, str], Tensor]) -> dict[str, Tensor]:
    """Return the factors to which the rates of each piece's groups are proportional, from the norms of the others."""
    norm = {kind: piece.norms(weight_of(*piece.weight)) for kind, piece in pieces.items()}
    if not norm:
        return {}
    if "q" in norm:
        groups = norm["q"].view(len(norm["k"]), -1)
        return {"q": 1 / norm["k"].repeat_interleave(groups.shape[1]), "k": 1 / groups.amax(1)}
    one = torch.ones_like(norm["down_kv"])
    down_q = norm.get("down_q", one)
    both = (norm["up_q"] * norm["up_k"]).amax(0, keepdim=True)
    factors = {
        "up_q": 1 / (down_q * norm["up_k"] * norm["down_kv"]),
        "up_k": 1 / (norm["up_q"] * down_q * norm["down_kv"]),
        "down_kv": 1 / (both * down_q),
    }
    shared = 1 / (both * norm["down_kv"])
    if "rotary_q" in norm:
        rotary_q = norm["rotary_q"].amax(0, keepdim=True)
        factors["rotary_q"] = 1 / (down_q * norm["rotary_k"]).expand_as(norm["rotary_q"])
        factors["rotary_k"] = 1 / (rotary_q * down_q)
        shared = torch.minimum(shared, 1 / (rotary_q * norm["rotary_k"]))
    if "down_q" in norm:
        factors["down_q"] = shared
    return factors


def _by_row(pieces: dict[str, Piece], rates: dict[str, Tensor], module: nn.Module, name: str, like: Tensor) -> Tensor:
    """Return the factors of a parameter's rows, in a shape that broadcasts to it; 1 for rows that are in no piece."""
    axis = next((piece.axis for piece in pieces.values() if piece.weight[0] is module and piece.weight[1] == name), 0)
    by_row = torch.ones(like.shape[axis], device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    for kind, piece in pieces.items():
        for owner, rows in ((piece.weight, piece.rows), (piece.bias, piece.bias_rows)):
            if owner is not None and rows is not None and owner[0] is module and owner[1] == name:
                by_row[rows.to(like.device, non_blocking=True)] = rates[kind][:, None].to(by_row.dtype)
    return along(by_row, axis, like)
