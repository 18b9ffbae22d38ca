"""LinearAttention against its paper's formula on the whole matrix, and what it costs by the number of tokens."""

import pytest
import torch
from naive import qkv
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise
from headwise.attend.methods import DropKey, LinearAttention, NeuTRENO, Temperature
from headwise.lab.training.measuring import MemoryOfAStep, counter
from headwise.testing.calls import attend_with

B, H, T, D = 2, 3, 6, 8


def kernel(q, k, allowed=None, bias=None):
    """The T×N weights as the paper writes them: elu + 1, then divided by their sum over keys."""
    q, k = nn.functional.elu(q.double()) + 1, nn.functional.elu(k.double()) + 1
    weights = torch.einsum("bhtd,bhnd->bhtn", q, k)
    if bias is not None:
        weights = weights * bias.double().exp()
    if allowed is not None:
        weights = weights * allowed
    return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)


def padded(lengths=(6, 2)):
    return (torch.arange(T) < torch.tensor(lengths)[:, None])[:, None, None]


CALLS = {
    "plain": ({}, None),
    "causal": ({"causal": True}, torch.ones(T, T).tril().bool()),
    "padded": ({"mask": padded()}, padded()),
    "padded and causal": ({"mask": padded(), "causal": True}, padded() & torch.ones(T, T).tril().bool()),
    "padded by numbers": (
        {"mask": torch.zeros(2, 1, 1, T).masked_fill(~padded(), torch.finfo(torch.float32).min)},
        padded(),
    ),
    "padded by infinity": ({"mask": torch.zeros(2, 1, 1, T).masked_fill(~padded(), -torch.inf)}, padded()),
    "a row without a key": ({"mask": padded((6, 0))}, padded((6, 0))),
    "sliding": ({"mask": torch.ones(T, T).tril().triu(-2).bool()}, torch.ones(T, T).tril().triu(-2).bool()),
}


@pytest.mark.parametrize("form", ["fast", "textbook"])
@pytest.mark.parametrize("name", CALLS)
def test_both_forms_are_the_papers_in_values_and_gradients(name, form):
    settings, allowed = CALLS[name]
    found, wanted = qkv(), [x.double().requires_grad_() for x in qkv()]
    for x in found:
        x.requires_grad_()
    out = attend_with([LinearAttention()], *found, form=form, **settings)[0]
    naive = kernel(*wanted[:2], allowed) @ wanted[2]
    torch.testing.assert_close(out.double(), naive, rtol=1e-5, atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out * weight).sum().backward()
    (naive * weight).sum().backward()
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("earlier", ["_earlier", "_earlier_at_once"])
def test_causal_blocks_are_exact_across_their_borders(monkeypatch, earlier):
    from headwise.attend.attention import linear

    monkeypatch.setattr(linear, "BLOCK", 4)
    monkeypatch.setattr(linear, "_earlier", getattr(linear, earlier))
    q, k, v = qkv()
    out = attend_with([LinearAttention()], q, k, v, causal=True)[0]
    wanted = kernel(q, k, torch.ones(T, T).tril()) @ v.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1, T), (1, 3, T, T)])
def test_an_additive_bias_multiplies_the_kernel(shape):
    q, k, v = qkv()
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    out = attend_with([LinearAttention()], q, k, v, mask=bias)[0]
    torch.testing.assert_close(out.double(), kernel(q, k, bias=bias) @ v.double(), rtol=1e-5, atol=1e-6)


def test_features_of_large_negative_numbers_keep_their_size():
    q, k, v = (20 * x for x in qkv())
    out = attend_with([LinearAttention()], q - 30, k - 30, v)[0]
    features = [torch.where(x > 0, x + 1, x.exp()) for x in ((q - 30).double(), (k - 30).double())]
    weights = features[0] @ features[1].mT
    torch.testing.assert_close(out.double(), weights / weights.sum(-1, keepdim=True) @ v.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["fast", "textbook"])
def test_neutreno_adds_its_term_to_it(form):
    q, k, v = qkv()
    first = torch.randn(v.shape, generator=torch.Generator().manual_seed(5))
    methods = [LinearAttention(), NeuTRENO(strength=0.2)]
    out = attend_with(methods, q, k, v, form=form, first_values=first)[0]
    torch.testing.assert_close(
        out.double(), kernel(q, k) @ v.double() + 0.2 * (first - v).double(), rtol=1e-5, atol=1e-6
    )


def taken(methods, tokens, causal=False):
    """Count operations and bytes of a forward and backward."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, tokens, 16, generator=draw, requires_grad=True) for _ in range(3))
    memory = MemoryOfAStep()
    with counter() as operations:
        attend_with(methods, q, k, v, causal=causal)[0].sum().backward()
    with memory.measured(2, torch.device("cpu")):
        attend_with(methods, q, k, v, causal=causal)[0].sum().backward()
    return operations.get_total_flops(), memory.peak


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("methods", [[LinearAttention()], [LinearAttention(), headwise.DropHead(p=0.0)]])
def test_time_and_memory_grow_with_the_tokens_and_not_with_their_square(methods, causal):
    few, many = taken(methods, 512, causal), taken(methods, 2048, causal)
    # the first block alone has no earlier keys to sum
    assert many[0] == pytest.approx(4 * few[0], rel=0.02)
    assert many[1] < 4.2 * few[1]
    # the same ratios of a method that needs the matrix are sixteen
    few, many = (taken([headwise.SoftCap(cap=5.0)], tokens, causal) for tokens in (128, 512))
    assert many[0] > 15 * few[0] and many[1] > 12 * few[1]


class Written(TorchDispatchMode):
    """Counts the numbers that operations write, which a count of products leaves out."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.numbers += sum(x.numel() for x in tree_leaves(found) if isinstance(x, torch.Tensor) and not func.is_view)
        return found


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_written_grows_with_the_tokens_backward_too(causal):
    written = []
    for tokens in (1024, 4096):
        q, k, v = (torch.randn(1, 2, tokens, 16, requires_grad=True) for _ in range(3))
        with Written() as counted:
            attend_with([LinearAttention()], q, k, v, causal=causal)[0].sum().backward()
        written.append(counted.numbers)
    assert written[1] < 4.2 * written[0]


@pytest.mark.parametrize("settings", [{"softcap": 5.0}, {"sinks": torch.zeros(3)}])
def test_what_is_made_for_a_softmax_is_refused_by_name(settings):
    with pytest.raises(ValueError, match=r"LinearAttention has no softmax, and .* (caps its logits|has sinks)"):
        attend_with([LinearAttention()], *qkv(), **settings)


def test_an_edit_of_the_logits_before_it_is_refused_and_after_it_acts():
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    with pytest.raises(
        ValueError, match=r"changes of Temperature\(value=0.5\) before it would be lost: put Temp.* after it"
    ):
        headwise.regularize(model, Temperature(value=0.5), LinearAttention())
    q, k, v = qkv()
    out = attend_with([LinearAttention(), Temperature(value=0.5)], q, k, v)[0]
    squared = kernel(q, k).square()
    wanted = squared / squared.sum(-1, keepdim=True) @ v.double()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [True, False])
def test_keys_that_are_dropped_stay_dropped_in_either_order(first):
    q, k, v = qkv()
    methods = [DropKey(p=0.5), LinearAttention()]
    fast, textbook = (
        attend_with(methods if first else methods[::-1], q, k, v, form=form, training=True)[0]
        for form in ("fast", "textbook")
    )
    torch.testing.assert_close(fast, textbook)
    assert not torch.allclose(fast, attend_with([LinearAttention()], q, k, v)[0])


def test_watch_reads_the_map_that_acts():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 8)
    headwise.regularize(model, LinearAttention())
    watch = headwise.watch(model, every=1, statistics=["attention_entropy", "gradient_cosine"])
    model(x).sum().backward()
    watch.step()
    q, k, v = (model.self_attn.in_proj_weight @ x.mT + model.self_attn.in_proj_bias[:, None]).mT.chunk(3, -1)
    q, k, v = (y.detach().view(2, 5, 2, 4).transpose(1, 2) for y in (q, k, v))
    a, symmetric = kernel(q, k), kernel(k, k)
    entropy = -(a * a.log()).sum(-1).mean((0, 2))
    cosine = torch.cosine_similarity(v - a @ v.double(), v - symmetric @ v.double(), dim=-1).mean((0, 2))
    read = {(r["statistic"], r["head"]): r["value"] for r in watch.records()}
    for head in (0, 1):
        assert read["attention_entropy", head] == pytest.approx(float(entropy[head]), rel=1e-4)
        assert read["gradient_cosine", head] == pytest.approx(float(cosine[head]), rel=1e-4)
