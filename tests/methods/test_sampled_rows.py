import pytest
import torch
from naive import PADDING, penalty, qkv
from torch.utils.checkpoint import checkpoint

import headwise
from headwise.attend.attention import computation as attention
from headwise.attend.methods import AttentionNormPenalty, Disagreement, EntropyPenalty
from headwise.attend.methods.text import parse
from headwise.testing.calls import attend_with

UNBIASED = [
    "EntropyPenalty(strength=1.0, rows={rows})",
    "EntropyPenalty(strength=1.0, target=0.7, band=0.05, rows={rows})",
    "Disagreement(on='position', rows={rows})",
]
METHODS = [*UNBIASED, "AttentionNormPenalty(rows={rows})", "AttentionNormPenalty(per_map=True, rows={rows})"]
CALLS = [{}, {"causal": True}, {"mask": PADDING}, {"mask": PADDING, "causal": True}]
NAMES = ["plain", "causal", "padded", "padded causal"]


@pytest.fixture(autouse=True)
def _matrix_free_forms_run_on_small_calls_too(monkeypatch):
    monkeypatch.setattr(attention, "SMALL", dict.fromkeys(attention.SMALL, 0))


def build(text, rows):
    return parse(text.format(rows=rows))[0]


def near(found, wanted):
    """Say whether the mean of draws lies within 3 % of `wanted`, at 3.5 standard errors."""
    error = found.std() / len(found) ** 0.5
    return 0 < 3.5 * error < 0.03 * wanted.abs() and (found.mean() - wanted).abs() + 3.5 * error < 0.03 * wanted.abs()


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_over_draws_is_the_penalty_of_all_queries(text, call):
    q, k, v = qkv(d=8)
    q = q / 2
    draws = torch.stack([penalty(build(text, 5), q, k, v, seed=seed, **call) for seed in range(800)])
    assert near(draws, penalty(build(text, None), q, k, v, **call))


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_the_mean_over_draws_of_a_squared_norm_is_that_of_all_queries(call):
    q, k, v = qkv()
    draws = torch.stack([penalty(AttentionNormPenalty(rows=5), q, k, v, seed=seed, **call) for seed in range(800)])
    assert near(draws.square(), penalty(AttentionNormPenalty(), q, k, v, **call).square())


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("text", UNBIASED)
def test_the_mean_gradient_over_draws_is_that_of_all_queries(text, call):
    q, k, v = qkv()

    def gradient(method, seed=0):
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        penalty(method, *leaves, v, seed=seed, **call).backward()
        return torch.cat([x.grad.flatten() for x in leaves])

    wanted = gradient(build(text, None))
    draws = torch.stack([gradient(build(text, 4), seed) for seed in range(300)])
    error = draws.std(0) / len(draws) ** 0.5
    # Some 144 numbers are compared at once.
    assert ((draws.mean(0) - wanted).abs() <= 4.5 * error + 1e-6).all()
    assert error.norm() < 0.1 * wanted.norm()
    assert error.norm() > 0


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("text", METHODS)
def test_both_forms_draw_the_same_rows_whole_and_in_blocks(text, call, monkeypatch):
    q, k, v = qkv()

    def run(form):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, found = attend_with([build(text, 3)], *leaves, form=form, seed=5, **call)
        (found + out.square().mean()).backward()
        return [found, *(x.grad for x in leaves)]

    fast, whole = run("fast"), run("textbook")
    torch.testing.assert_close(fast, whole)
    monkeypatch.setattr(attention, "WHOLE", 64)
    torch.testing.assert_close(run("textbook"), whole)


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
@pytest.mark.parametrize("text", METHODS)
def test_as_many_rows_as_queries_are_the_penalty_of_all(text, call):
    q, k, v = qkv()
    torch.testing.assert_close(penalty(build(text, 100), q, k, v, **call), penalty(build(text, None), q, k, v, **call))


@pytest.mark.parametrize("text", METHODS)
def test_padding_may_hold_anything(text):
    q, k, v = (x.clone() for x in qkv())
    wanted = penalty(build(text, 3), q, k, v, mask=PADDING, seed=2)
    q[1, :, 4:] = float("nan")
    torch.testing.assert_close(penalty(build(text, 3), q, k, v, mask=PADDING, seed=2), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_second_gradients_are_those_of_the_matrix(causal):
    q, k, v = (x.double() for x in qkv())
    found = []
    for form in ("fast", "textbook"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        # torch's fused kernels have no second gradient: only that of the penalty is taken.
        total = penalty(EntropyPenalty(strength=1.0, rows=3), *leaves, form=form, causal=causal)
        first = torch.autograd.grad(total, leaves[:2], create_graph=True)
        found.append(torch.autograd.grad(sum(x.square().sum() for x in first), leaves[:2]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rows", [0, 2.5, True])
@pytest.mark.parametrize(
    "cls", [EntropyPenalty, AttentionNormPenalty, lambda rows: Disagreement(on="position", rows=rows)]
)
def test_rows_are_whole_numbers(cls, rows):
    with pytest.raises(ValueError, match=f"rows must be a whole number from 1, or None, got {rows!r}"):
        cls(rows=rows)


def test_rows_are_refused_where_rows_are_not_read():
    with pytest.raises(ValueError, match='rows needs on="position", which reads queries'):
        Disagreement(rows=4)
    with pytest.raises(ValueError, match="rows cannot be combined with head_mean=True"):
        EntropyPenalty(head_mean=True, rows=4)


@pytest.mark.parametrize("text", METHODS)
def test_recomputed_and_resumed_steps_draw_the_same_rows(text):
    torch.manual_seed(0)
    net = torch.nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 12)
    handle = headwise.regularize(net, build(text, 3), example=x)
    start = handle.state()

    def steps(run):
        handle.load_state(start)
        found = []
        for _ in range(2):
            net.zero_grad()
            out = run(x)
            total = handle.loss()
            (out.square().mean() + total).backward()
            handle.after_step()
            found += [total.detach(), *(p.grad.clone() for p in net.parameters())]
        return found

    plain = steps(net)
    assert plain[0] != plain[len(plain) // 2]
    torch.testing.assert_close(steps(net), plain, rtol=0, atol=0)
    torch.testing.assert_close(steps(lambda x: checkpoint(net, x, use_reentrant=False)), plain)
    torch._dynamo.reset()
    torch.testing.assert_close(steps(torch.compile(net, backend="aot_eager", fullgraph=True)), plain)
    torch._dynamo.reset()
