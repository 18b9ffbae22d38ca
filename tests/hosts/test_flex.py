"""Flex attention as a host: masks and biases keep their meaning, what cannot be expressed is refused by name."""

from __future__ import annotations

import copy
import functools
from typing import ClassVar

import pytest
import torch
from grids import part_of_grid
from torch import nn
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, create_block_mask, flex_attention

import headwise
from headwise import DropHead, EntropyPenalty, QKClip, RelaxedAttention
from headwise.attend import hosts

# without torch.compile its own kernel is a slow one, and says so
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 8, 9
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def causal(b, h, q, k):
    return q >= k


def alibi(score, b, h, q, k):
    return score - SLOPES[h] * (q - k).abs()


def of_parameter(slopes):
    return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()


def soft_cap(score, b, h, q, k):
    return 5 * torch.tanh(score / 5)


class Layer(nn.Module):
    """An attention layer in torchtitan's manner: projections here, the call in a module without weights."""

    def __init__(self, inner):
        super().__init__()
        width = HEADS * SIZE
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, KV_HEADS, SIZE
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, KV_HEADS * SIZE, bias=False) for _ in range(2))
        self.inner_attention = inner

    def forward(self, x, score_mod=None, block_mask=None):
        xq, xk, xv = (w(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = self.inner_attention(xq, xk, xv, score_mod, block_mask)
        return self.wo(out.transpose(1, 2).flatten(2))


class Named(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class Attribute(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return library.flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True)


class Compiled(nn.Module):
    compiled: ClassVar = torch.compile(flex_attention, backend="eager")

    def forward(self, q, k, v, score_mod, block_mask):
        return Compiled.compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


compiled_here = torch.compile(flex_attention, backend="eager")
grouped = functools.partial(flex_attention, enable_gqa=True)


class Global(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return compiled_here(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class Partial(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return grouped(q, k, v, score_mod=score_mod, block_mask=block_mask)


class OfInstance(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = torch.compile(flex_attention, backend="eager")

    def forward(self, q, k, v, score_mod, block_mask):
        return self.kernel(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


@torch.compile(backend="eager")
def attend(q, k, v, score_mod, block_mask):
    return flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class Around(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return attend(q, k, v, score_mod, block_mask)


class ImportedHere(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        from torch.nn.attention.flex_attention import flex_attention as here

        return here(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


def closed_over():
    kernel = torch.compile(flex_attention, backend="eager")

    class Closure(nn.Module):
        def forward(self, q, k, v, score_mod, block_mask):
            return kernel(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)

    return Closure


class Table(nn.Module):
    kernels: ClassVar = {"flex": flex_attention}

    def forward(self, q, k, v, score_mod, block_mask):
        return self.kernels["flex"](q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)


class WithLse(nn.Module):
    def forward(self, q, k, v, score_mod, block_mask):
        return flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_lse=True)[0]


class WithAux(nn.Module):
    """Asks for a pair, as torchtitan does, of which the second part holds what was asked for."""

    lse = False

    def forward(self, q, k, v, score_mod, block_mask):
        asked = AuxRequest(lse=self.lse)
        out, beside = flex_attention(q, k, v, score_mod, block_mask, enable_gqa=True, return_aux=asked)
        assert self.lse or beside == AuxOutput()
        return out


class WithAuxLse(WithAux):
    lse = True


class Model(nn.Module):
    def __init__(self, inner=Named):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(inner()) for _ in range(2)])

    def forward(self, x, score_mod=None, block_mask=None):
        for layer in self.layers:
            x = x + layer(x, score_mod, block_mask)
        return x


def vectors():
    return torch.randn(2, TOKENS, HEADS * SIZE, generator=torch.Generator().manual_seed(1))


def masked():
    return create_block_mask(causal, None, None, TOKENS, TOKENS, device="cpu")


def naive(model, x, gamma=0.0, bias=True, allowed=True):
    """Compute the model by hand: ALiBi, causality, grouped queries, and the uniform distribution mixed into the
    weights."""
    place = torch.arange(TOKENS)
    away = (place[:, None] - place).abs()
    seen = place[:, None] >= place if allowed else torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    for layer in model.layers:
        q, k, v = (w(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for w in (layer.wq, layer.wk, layer.wv))
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / SIZE**0.5 - (SLOPES[:, None, None] * away if bias else 0.0)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        weights = (1 - gamma) * weights + gamma * seen / seen.sum(-1, keepdim=True)
        x = x + layer.wo((weights @ v).transpose(1, 2).flatten(2))
    return x


@pytest.mark.parametrize(
    "inner",
    part_of_grid(
        [Named, Attribute, Compiled, Global, Partial, OfInstance, Around, ImportedHere, closed_over()],
        [Named, Attribute, Global, Partial, ImportedHere],
    ),
)
def test_methods_act_on_flex_attention_wherever_it_is_named(inner):
    model, x = Model(inner), vectors()
    twin = copy.deepcopy(model)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.3))
    assert len(handle.fitted) == 2 and "inner_attention" not in handle.fitted[0].site.name
    out = model(x, alibi, masked())
    wanted = naive(twin, x, 0.3)
    assert torch.allclose(out, wanted, atol=1e-5)
    # on a processor the library's own kernel trains no weight
    out.square().sum().backward()
    wanted.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    handle.remove()
    assert not hosts.sdpa.flex._replaced
    with torch.no_grad():
        assert torch.allclose(model(x, None, masked()), naive(model, x, bias=False), atol=1e-5)


@pytest.mark.grid
def test_in_a_compiled_model_the_layer_leaves_the_graph_or_is_refused_where_it_may_not():
    torch._dynamo.reset()
    model, x = Model(), vectors()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.3))
    with pytest.raises(Exception, match=r"layers\.0 calls flex_attention in a compiled graph"):
        torch.compile(model, backend="eager", fullgraph=True)(x, alibi, masked())
    for learned in (alibi, of_parameter(nn.Parameter(SLOPES))):
        torch._dynamo.reset()
        out = torch.compile(model, backend="eager")(x, learned, masked())
        assert torch.allclose(out, naive(model, x, 0.3), atol=1e-5)
    handle.remove()


def test_what_is_read_from_elsewhere_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match=r"no attention layer that headwise can see.*called by that name"):
        headwise.regularize(Model(Table), RelaxedAttention(gamma=0.3))


def test_each_of_mask_and_bias_keeps_its_meaning_alone():
    model, x = Model(), vectors()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.3))
    assert torch.allclose(model(x, alibi), naive(model, x, 0.3, allowed=False), atol=1e-5)
    assert torch.allclose(model(x, None, masked()), naive(model, x, 0.3, bias=False), atol=1e-5)
    assert torch.allclose(model(x), naive(model, x, 0.3, bias=False, allowed=False), atol=1e-5)
    handle.remove()


def test_blocks_that_a_mask_function_does_not_know_of_are_hidden():
    from headwise.attend.hosts.sdpa.flex import dense_mask

    kinds = {"kv_num_blocks": [[[1, 2]]], "kv_indices": [[[[0, 1], [0, 1]]]]}
    blocks = library.BlockMask.from_kv_blocks(
        **{n: torch.tensor(v, dtype=torch.int32) for n, v in kinds.items()}, BLOCK_SIZE=4
    )
    x = torch.zeros(1, 1, 8, 2)
    place = torch.arange(8)
    assert torch.equal(dense_mask(blocks, x, x)[0, 0], (place[:, None] >= 4) | (place < 4))


def test_nothing_stays_behind_and_where_nothing_acts_the_librarys_own_kernel_runs():
    model, x = Model(), vectors()
    with torch.no_grad():
        before = model.eval()(x, soft_cap, masked())
    handle = headwise.regularize(model, DropHead(p=0.5))
    assert Named.forward.__globals__["flex_attention"] is not library.flex_attention
    with torch.no_grad():
        assert torch.equal(model(x, soft_cap, masked()), before)
        assert not torch.allclose(model.train()(x, None, masked()), model.eval()(x, None, masked()), atol=1e-3)
    handle.remove()
    assert Named.forward.__globals__["flex_attention"] is library.flex_attention


def test_what_flex_attention_alone_can_do_is_refused_by_name():
    model, x = Model(), vectors()
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.3))
    with pytest.raises(RuntimeError, match=r"score_mod of layers.0 does more than add a bias .*headwise.SoftCap"):
        model(x, soft_cap)
    handle.remove()
    model = Model(WithLse)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.3))
    with pytest.raises(RuntimeError, match=r"layers.0 calls flex_attention with return_lse"):
        model(x)
    handle.remove()


def test_a_request_for_nothing_beside_the_output_is_answered():
    model, same, x = Model(WithAux), Model(), vectors()
    with torch.no_grad():
        plain = model(x)
    handles = [headwise.regularize(one.train(), RelaxedAttention(gamma=0.3)) for one in (model, same)]
    torch.testing.assert_close(model(x), same(x))
    assert not torch.allclose(model(x), plain)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), plain)
    for handle in handles:
        handle.remove()
    asking = Model(WithAuxLse)
    handle = headwise.regularize(asking, RelaxedAttention(gamma=0.3))
    with pytest.raises(RuntimeError, match=r"layers.0 calls flex_attention with return_aux"):
        asking(x)
    handle.remove()


def test_a_hook_of_the_optimizer_steps_for_a_loop_that_is_not_ones_own():
    model, x = Model(), vectors()
    handle = headwise.regularize(model, QKClip(threshold=0.05), EntropyPenalty(strength=0.1))
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["entropy_share"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.register_step_post_hook(lambda *_: (handle.after_step(), watch.step()))
    weight = model.layers[0].wq.weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        (model(x, alibi, masked()).square().mean() + handle.loss()).backward()
        optimizer.step()
    assert handle.step == 3 == watch.steps and {r["step"] for r in watch.records()} == {0, 1, 2}
    assert model.layers[0].wq.weight.norm() < 0.9 * weight.norm(), "the logits were clipped"
    watch.remove()
    handle.remove()
