"""The log-sum-exp of fused attention: the textbook's numbers and gradients, whatever the gradient of the output is."""

import pytest
import torch
from grids import part_of_grid
from test_row_statistics import MASKS, made, textbook
from triton_process import lines

from headwise.attend.attention.flash_rows import (
    attend_with_lse,
    attend_with_lse_backward,
    carried,
    flash_takes,
    registered_lse,
)

SCRIPT = "triton_carry_cases.py"


def gradients(outputs, inputs, weights):
    pairs = [(x, w) for x, w in zip(outputs, weights, strict=True) if w is not None]
    found = torch.autograd.grad([x for x, _ in pairs], inputs, [w for _, w in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def weights_of(kind, dtype):
    g = torch.Generator().manual_seed(1)
    of_out, of_lse = torch.randn(2, 3, 7, 4, generator=g, dtype=dtype), torch.randn(2, 3, 7, generator=g, dtype=dtype)
    if kind == "rows of zeros":
        of_out[:, :, 2:5] = 0.0
    if kind == "tiny rows":
        of_out[:, :, 2:5] *= 1e-16
    if kind == "large rows":
        of_out[:, :, 2:5] *= 1e4
    return {"only the output": (of_out, None), "only the log-sum-exp": (None, of_lse)}.get(kind, (of_out, of_lse))


KINDS = ("both", "rows of zeros", "tiny rows", "large rows", "only the output", "only the log-sum-exp")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_the_textbooks(kind, causal, dtype):
    given = made("none", causal, dtype)
    assert flash_takes(*given[:4], causal)
    wide = [x.detach().double().requires_grad_() for x in given[:3]]
    weights = weights_of(kind, dtype)
    found, right = attend_with_lse(*given), textbook(*wide, *given[3:])[:2]
    exact = dtype == torch.float64
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-6)
    of_right = gradients(right, wide, [w if w is None else w.double() for w in weights])
    for a, b in zip(gradients(found, given[:3], weights), of_right, strict=True):
        # Without a gradient of the output, that of the values is 0.
        assert (a.double() - b).abs().max() <= (1e-12 if exact else 1e-5) * b.abs().max() + 1e-17


@pytest.mark.parametrize("kind", MASKS[1:])
def test_masks_are_left_to_the_row_statistics(kind):
    given = made(kind)
    assert not flash_takes(*given[:5])
    found, (*right, empty) = attend_with_lse(*given), textbook(*given)
    torch.testing.assert_close(found[0], right[0], rtol=1e-10, atol=1e-12)
    of_out, of_lse = weights_of("both", torch.float64)
    of_lse = of_lse.masked_fill(empty, 0.0)
    right = (right[0], right[1].masked_fill(empty, 0.0))
    for a, b in zip(
        gradients(found, given[:3], (of_out, of_lse)), gradients(right, given[:3], (of_out, of_lse)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_gradient_in_bf16_loses_no_more_than_its_rounding():
    q, k, v, *rest = made("none", True)
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in halves]
    for kind in KINDS:
        weights = [w if w is None else w.bfloat16() for w in weights_of(kind, torch.float64)]
        found = gradients(
            attend_with_lse(*halves, *rest), halves, [weights[0], None if weights[1] is None else weights[1].float()]
        )
        right = gradients(textbook(*wide, *rest)[:2], wide, [w if w is None else w.double() for w in weights])
        for a, b in zip(found, right, strict=True):
            assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max() + 1e-17


@pytest.mark.parametrize("kind", part_of_grid(("none", "bool", "additive"), ("none", "bool")))
def test_torchs_own_checks_of_operators_pass(kind):
    given = made(kind, True, torch.float32)
    torch.library.opcheck(registered_lse, given)
    with torch.no_grad():
        outputs = attend_with_lse(*given)
    saved = [x.detach() for x in (*given[:3], *outputs)]
    torch.library.opcheck(attend_with_lse_backward, ([outputs[0], outputs[1]], saved, *given[3:]))


@pytest.mark.parametrize("kind", ["none", "bool"])
def test_second_derivatives_are_those_of_the_matrix(kind):
    q, k, v, *rest = made(kind, True, rows=3, keys=3)
    torch.autograd.gradgradcheck(lambda q, k, v: attend_with_lse(q, k, v, *rest), (q, k, v), atol=1e-6)


def test_a_carried_output_has_the_product_that_is_asked_for():
    of_out, of_lse = weights_of("rows of zeros", torch.float64)
    out = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    new, moved = carried(of_out, out, of_lse)
    torch.testing.assert_close((new * moved).sum(-1), (of_out * out).sum(-1) - of_lse)
    assert (new - of_out).abs().max() < 1e-17


def test_the_kernel_carries_like_torchs_operations():
    found = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(found) == 6
    for line in found:
        assert line["error"] <= (1e-2 if "bfloat16" in line["case"] else 1e-6), line


@pytest.mark.grid
@pytest.mark.slow
def test_the_kernel_compiles_for_each_gpu_without_spilling():
    made = lines(SCRIPT, "compile")
    assert len(made) == 6
    for line in made:
        assert line["kernel"] == "carry_kernel" and line["spilled"] == 0, line
