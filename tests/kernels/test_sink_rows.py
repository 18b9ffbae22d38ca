"""Fused attention with sinks: the numbers and gradients of the matrix with one more column."""

import pytest
import torch
from test_row_statistics import MASKS, made
from triton_process import lines

from headwise.attend.attention import sink_rows
from headwise.attend.attention.sink_rows import attend_with_sinks, attend_with_sinks_backward, registered_sinks
from headwise.attend.methods import AttentionSink
from headwise.testing.calls import attend_with

SCRIPT = "triton_sink_cases.py"


def given(causal=False, dtype=torch.float64, sinks=(-1.0, 0.5, 3.0), kind="none", **shape):
    q, k, v, mask, *_ = made(kind, causal, dtype, **shape)
    return q, k, v, torch.tensor(sinks, dtype=dtype, requires_grad=True), mask, causal, 0.7


def textbook(q, k, v, sinks, mask, causal, scale):
    s = scale * q @ k.mT
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    column = sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
    return torch.cat([s, column], -1).softmax(-1)[..., :-1] @ v


def slopes(out, leaves):
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.autograd.grad((out.double() * weights).sum(), leaves)


@pytest.mark.parametrize("sinks", [(-1.0, 0.5, 3.0), (-300.0, 0.0, 300.0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_the_textbooks(dtype, kind, causal, sinks):
    ours = given(causal, dtype, sinks, kind)
    wide = [x.detach().double().requires_grad_() for x in ours[:4]]
    mask = ours[4].double() if kind == "additive" else ours[4]
    found, right = attend_with_sinks(*ours), textbook(*wide, mask, *ours[5:])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert (found.double() - right).abs().max() <= bound * right.abs().max()
    # the sinks' own gradients are sums in which outputs that were rounded cancel
    bounds = [bound, bound, bound, 3 * bound]
    for a, b, limit in zip(slopes(found, ours[:4]), slopes(right, wide), bounds, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= limit * b.abs().max() + 1e-30


def test_sinks_that_learn_nothing_get_no_gradient():
    q, k, v, sinks, *rest = given()
    out = attend_with_sinks(q, k, v, sinks.detach(), *rest)
    right = slopes(attend_with_sinks(q, k, v, sinks, *rest), (q, k, v))
    for a, b in zip(slopes(out, (q, k, v)), right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", ["none", "bool"])
def test_torchs_own_checks_of_operators_pass(kind):
    ours = given(True, torch.float32, kind=kind)
    torch.library.opcheck(registered_sinks, ours)
    with torch.no_grad():
        out, total = registered_sinks(*ours)
    saved = [x.detach() for x in (*ours[:3], out, total, ours[3])]
    for learned in (True, False):
        torch.library.opcheck(attend_with_sinks_backward, ([torch.randn_like(out), None], saved, *ours[4:], learned))


@pytest.mark.parametrize("kind", ["none", "bool"])
def test_second_derivatives_are_those_of_the_matrix(kind):
    q, k, v, sinks, *rest = given(True, kind=kind, rows=3, keys=3)
    torch.autograd.gradgradcheck(lambda *tensors: attend_with_sinks(*tensors, *rest), (q, k, v, sinks), atol=1e-6)


def test_the_method_attends_by_it(monkeypatch):
    called = []
    monkeypatch.setattr(
        sink_rows, "_operator", lambda *given, run=sink_rows._operator: called.append(len(given)) or run(*given)
    )
    q, k, v = (torch.randn(2, 3, 70, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.ones(70, dtype=torch.bool).expand(2, 1, 1, 70)
    plain = attend_with([AttentionSink(logit=1.0)], q, k, v)[0]
    torch.testing.assert_close(attend_with([AttentionSink(logit=1.0)], q, k, v, mask=mask)[0], plain)
    assert called == [7, 7]


def test_the_kernels_compute_like_torchs_operations():
    found = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(found) == 12
    for line in found:
        half = "16" in line["case"]
        assert line["output"] <= (8e-3 if half else 1e-6), line
        assert line["total"] <= 1e-6, line
        # that of the sinks, of outputs that were rounded
        assert line["sinks"] <= (8e-3 if half else 1e-4), line


@pytest.mark.grid
@pytest.mark.slow
def test_the_kernels_compile_for_each_gpu_without_spilling():
    built = lines(SCRIPT, "compile")
    assert {line["kernel"] for line in built} == {"lower_kernel", "slope_kernel"} and len(built) == 12
    for line in built:
        assert line["spilled"] == 0, line
