"""Minimisation of the entropy of attention, over logits of bounded norm or over the inputs and weights of logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.health.statistics.entropy import entropy_floor

TOKENS = (4, 16, 64)
# The norms are log T plus these: from a floor that depends on the number of keys to one that falls exponentially.
BEYOND = (-2.0, 0.0, 2.0, 4.0, 6.0, 8.0)
# From this excess over log T on, the largest key has almost all of the weight.
TAIL = 4.0
STARTS, ITERATIONS, DIM = 3, 300, 8


@dataclass(frozen=True)
class Least:
    """For T keys and a norm σ of the logits: the floor and the least entropies reached, in nats."""

    tokens: int
    size: float
    floor: float
    logits: float
    weights: float


def least_entropies(seed: int, tokens: int, size: float) -> Least:
    """Return the least entropies of a row, by L-BFGS from random starts: over logits, and over inputs and weights."""
    generator = torch.Generator().manual_seed(seed)
    floor = float(
        entropy_floor(torch.tensor(size, dtype=torch.float64), torch.tensor(float(tokens), dtype=torch.float64))
    )
    logits = [_minimum([_draw(generator, tokens)], lambda z: size * z / z.norm()) for _ in range(STARTS)]
    weights = [
        _minimum([_draw(generator, tokens, DIM), _draw(generator, DIM, DIM)], lambda x, w: size * row_of(x, w))
        for _ in range(STARTS)
    ]
    return Least(tokens, size, floor, min(logits), min(weights))


def row_of(x: Tensor, w: Tensor) -> Tensor:
    """Return the first row of X W Xᵀ (T,) with ‖W‖₂·‖X Xᵀ‖₂ = 1."""
    x, w = x / torch.linalg.matrix_norm(x, 2), w / torch.linalg.matrix_norm(w, 2)
    return x[0] @ w @ x.T


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) of one row in nats, precise even for tiny values."""
    d = logits - logits.max()
    others = d.exp().masked_fill(torch.arange(len(d)) == d.argmax(), 0.0).sum()
    return torch.log1p(others) - (d.exp() * d).sum() / (1 + others)


def falls_as(minima: list[Least], entropy_of: Callable[[Least], float]) -> float:
    """Return the rate κ of the fall H ≈ c·(1 + κσ)·e^(−κσ); the floor has κ = √(T/(T−1)).

    It is minus the slope of log(H / (1 + κσ)) in σ between the ends of the tail, with the theorem's κ in the bracket.
    """
    tail = [one for one in minima if one.size - math.log(one.tokens) >= TAIL]
    first, last = tail[0], tail[-1]
    kappa = rate(first.tokens)
    ends = [math.log(entropy_of(one)) - math.log1p(kappa * one.size) for one in (first, last)]
    return (ends[0] - ends[1]) / (last.size - first.size)


def rate(tokens: int) -> float:
    """Return the rate of the theorem's exponential, √(T/(T−1))."""
    return math.sqrt(tokens / (tokens - 1))


def _draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def _minimum(parameters: list[Tensor], logits: Callable[..., Tensor]) -> float:
    """Return the least entropy, by minimising its logarithm, whose slope does not vanish with the entropy."""
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=ITERATIONS, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = entropy(logits(*parameters)).log()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        return float(entropy(logits(*parameters)))
