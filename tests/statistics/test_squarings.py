"""The largest singular values by squaring, which a GPU reads without a solver, beside those of torch in fp64."""

import pytest
import torch

from headwise.health.statistics.squarings import largest_product, largest_square


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("tokens", "width"), [(100, 30), (30, 100), (64, 64), (1, 5)])
@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_the_largest_eigenvalue_of_the_tokens_gram_matrix(tokens, width, mean):
    x = drawn(3, tokens, width) + mean
    wanted = torch.linalg.matrix_norm(x.double(), 2).square()
    torch.testing.assert_close(largest_square(x).double(), wanted, rtol=3e-3, atol=0)
    if mean:
        torch.testing.assert_close(largest_square(x).double(), wanted, rtol=1e-4, atol=0)


def test_tokens_without_one_that_stands_out():
    torch.testing.assert_close(largest_square(torch.eye(50)[None] * 2), torch.tensor([4.0]))


def test_zeros_have_none_and_what_is_not_finite_has_nan():
    x = torch.zeros(3, 4, 5)
    x[1, 0, 0], x[2, 0, 0] = float("nan"), float("inf")
    assert largest_square(x).tolist() == pytest.approx([0, float("nan"), float("nan")], nan_ok=True)
    grams = x[:, :, :4] @ x[:, :, :4].mT
    assert largest_product(grams, torch.eye(4).expand(3, 4, 4))[0] == 0
    assert largest_product(grams, torch.eye(4).expand(3, 4, 4))[1:].isnan().all()


@pytest.mark.parametrize("fall", [0.0, -2.0])
def test_the_largest_singular_value_of_a_product(fall):
    own, shared = drawn(4, 16, 40), drawn(4, 16, 40).flip(0) * torch.logspace(0, fall, 16)[:, None]
    found = largest_product(own @ own.mT, shared @ shared.mT)
    wanted = torch.linalg.svdvals(own.double().mT @ shared.double())[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=0)
