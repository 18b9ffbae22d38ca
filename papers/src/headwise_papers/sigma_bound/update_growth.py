"""The change of a transformer's matrices in a few steps of Adam, by width, with and without SigmaReparam."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.hosts.finding import sites
from headwise.methods import SigmaReparam
from headwise.regularizing.regularize import regularize
from headwise.study import VisionTransformer
from headwise.watching.weights import OUTSIDE, Matrices

WIDTHS = (32, 64, 128, 256, 512)
DEPTH, HEAD, BATCH, RATE, STEPS = 1, 16, 8, 1e-3, 10
ARMS = {"plain": None, "SigmaReparam": SigmaReparam(layers="all")}


def moves(seed: int, width: int, arm: str) -> tuple[float, float]:
    """Return two means over the blocks' matrices after ten steps of Adam on one batch of random images and classes.

    They are the spectral norm of a matrix's first update, and the change of its spectral norm after all steps; the
    matrices are the ones that the layers compute with.
    """
    torch.manual_seed(seed)
    model = VisionTransformer(
        classes=10,
        image_size=8,
        channels=1,
        patch=2,
        dim=width,
        depth=DEPTH,
        heads=width // HEAD,
        head_dim=HEAD,
        mlp_dim=2 * width,
    )
    images, classes = torch.randn(BATCH, 1, 8, 8), torch.randint(10, (BATCH,))
    method = ARMS[arm]
    regularized = None if method is None else regularize(model, method, example=images)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    before = _matrices(model)
    first_step: list[Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        if regularized is not None:
            regularized.after_step()
        first_step = first_step or _matrices(model)
    updates = [_norm(b - a) for a, b in zip(before, first_step, strict=True)]
    changes = [abs(_norm(b) - _norm(a)) for a, b in zip(before, _matrices(model), strict=True)]
    return sum(updates) / len(updates), sum(changes) / len(changes)


def exponent(values: dict[int, float]) -> float:
    """Return the exponent of a power law in the width, by least squares on logarithms."""
    x = torch.tensor([float(width) for width in values], dtype=torch.float64).log()
    y = torch.tensor(list(values.values()), dtype=torch.float64).log()
    x = x - x.mean()
    return float((x @ (y - y.mean())) / (x @ x))


@torch.no_grad()
def _matrices(model: nn.Module) -> list[Tensor]:
    """Return the matrices that the layers inside the blocks compute with, in double precision."""
    matrices = Matrices(model, sites(model)).found
    return [one.weight().double() for one in matrices if one.depth != OUTSIDE]


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
