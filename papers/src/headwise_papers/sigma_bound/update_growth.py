"""The change of a transformer's matrices in a few steps of Adam, by width, with and without SigmaReparam."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from headwise.attend.hosts.finding import sites
from headwise.attend.methods import SigmaReparam
from headwise.attend.regularizing.regularize import regularize
from headwise.health.watching.weights import OUTSIDE, Matrices
from headwise.study import VisionTransformer

WIDTHS = (128, 256, 512, 1024, 2048)
DEPTH, HEAD, BATCH, RATE, STEPS = 1, 16, 8, 1e-3, 10


def moves(seed: int, width: int, iterations: int) -> tuple[float, float]:
    """Return two means over the blocks' matrices after ten steps of Adam on one batch of random images and classes.

    The model is plain, or has SigmaReparam with `iterations` power iterations after each step. The means are of the
    spectral norm of a matrix's first update, and of the change of its spectral norm after all steps, of the matrices
    that the layers compute with.
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
    regularized = regularize(model, SigmaReparam(layers="all"), example=images) if iterations else None
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    before = _matrices(model)
    first_step: list[Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        for _ in range(iterations):
            assert regularized is not None
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
    """Return the largest singular value: a decomposition of a wide matrix would take ten times as long."""
    narrow = matrix.numpy() if matrix.shape[0] <= matrix.shape[1] else matrix.t().numpy()
    size = narrow.shape[0]
    gram = LinearOperator((size, size), matvec=lambda vector: narrow @ (narrow.T @ vector), dtype=np.float64)
    # a fixed start, so that the same matrix gives the same bits
    (largest,) = eigsh(gram, k=1, tol=1e-10, v0=np.ones(size), return_eigenvectors=False)
    return float(largest) ** 0.5
