"""QKRates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise import projections
from headwise.core.call import Call
from headwise.core.method import Method
from headwise.core.method_state import MethodState
from headwise.core.site import Site
from headwise.methods.reparametrization import hold, release
from headwise.projections import ProjectionError
from headwise.projections.adapted import MERGE, is_adapted
from headwise.projections.block import overwrite_, whole
from headwise.projections.latent import Piece, piece_of
from headwise.projections.latent import pieces as latent_pieces


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

    def unbuild(self, site: Site, state: MethodState) -> None:
        release(state)

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        # The weights before a step are those of the last forward, even if others were loaded since the last step.
        state = call.state(self)
        for index, (module, name) in enumerate(state.kept("parameters")):
            state.tensor(f"before_{index}").copy_(getattr(module, name).detach())
        return q, k, v

    @torch.no_grad()
    def after_step(self, site: Site, state: MethodState) -> None:
        parameters, pieces = state.kept("parameters"), state.kept("pieces")
        before = {
            (id(module), name): state.tensor(f"before_{index}") for index, (module, name) in enumerate(parameters)
        }
        factors = _factors(pieces, lambda module, name: before[id(module), name])
        rates = {kind: self.rate * factor / state.tensor(f"start_{kind}") for kind, factor in factors.items()}
        for index, (module, name) in enumerate(parameters):
            parameter = getattr(module, name).detach()
            now, old = whole(parameter), state.tensor(f"before_{index}")
            by_row = _by_row(pieces, rates, module, name, now)
            after = torch.where(by_row == 1, now, old + by_row * (now - old)).to(now.dtype)
            overwrite_(parameter, after)
            # Needed if the layer does not run before the next step.
            old.copy_(after)


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
    by_row = torch.ones(like.shape[axis], device=like.device)
    for kind, piece in pieces.items():
        for owner, rows in ((piece.weight, piece.rows), (piece.bias, piece.bias_rows)):
            if owner is not None and rows is not None and owner[0] is module and owner[1] == name:
                by_row[rows.to(like.device, non_blocking=True)] = rates[kind][:, None]
    shape = [1] * like.dim()
    shape[axis] = -1
    return by_row.view(shape)
