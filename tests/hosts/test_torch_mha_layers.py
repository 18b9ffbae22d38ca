"""nn.TransformerEncoder and nn.TransformerDecoder: native paths, nested tensors, masks, torch.compile."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from grids import part_of_grid
from mha_cases import same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import headwise
from headwise import AttnScale, DropHead, DropKey, EntropyPenalty, InputNoise, NeuTRENO

C, H, B, T = 16, 4, 3, 6
PADDING = torch.arange(T) >= torch.tensor([6, 4, 5])[:, None]
ORDER = torch.ones(T, T, dtype=torch.bool).triu(1)


def randomized(module: nn.Module) -> nn.Module:
    """Return matrices of a module values far from 0."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return module


def encoder(
    batch_first: bool = True, norm_first: bool = False, nested: bool = True, dropout: float = 0.1
) -> nn.TransformerEncoder:
    """Make an encoder of two layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(C, H, 32, dropout=dropout, batch_first=batch_first, norm_first=norm_first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return randomized(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested))


def tokens(batch_first: bool = True, count: int = T) -> Tensor:
    """Make a batch of tokens."""
    x = torch.randn(B, count, C, generator=torch.Generator().manual_seed(1))
    return x if batch_first else x.transpose(0, 1)


def run(model: nn.Module, *args: Tensor, **settings) -> Tensor:
    """Run a model from the same random state; nested tensors warn that they are a prototype."""
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*nested tensors is in prototype")
        return model(*args, **settings)


def kinds():
    """Walk the kinds of encoder and of calls."""
    for batch_first, norm_first, nested, padded, causal in itertools.product((True, False), repeat=5):
        if not (padded and causal):
            settings = {"src_key_padding_mask": PADDING} if padded else {"mask": ORDER} if causal else {}
            yield batch_first, norm_first, nested, settings


@pytest.mark.bits
@pytest.mark.parametrize("mode", ["train", "eval", "no grad"])
def test_at_neutral_settings_encoders_give_the_hosts_bits(mode):
    for *kind, settings in kinds():
        model, x = encoder(*kind).train(mode == "train"), tokens(kind[0])
        with torch.set_grad_enabled(mode != "no grad"):
            plain = run(model, x, **settings)
            handle = headwise.regularize(model, DropHead(p=0.0))
            assert same(run(model, x, **settings), plain), (kind, settings)
            handle.remove()
            handle = headwise.regularize(model, NeuTRENO(strength=0.0))
            carried = run(model, x, **settings)
            # The native path is another kernel, twice over and behind layer norms.
            assert same(carried, plain) if mode != "no grad" else (carried - plain).abs().max() < 5e-6, (kind, settings)


def test_the_native_path_is_another_kernel_whose_bits_the_tests_can_tell():
    model, x = encoder(dropout=0.0).eval(), tokens()
    with torch.no_grad():
        native = run(model, x)
    assert not torch.equal(native, run(model, x))


def test_in_evaluation_without_gradients_a_method_acts_as_with_gradients():
    for *kind, settings in kinds():
        model, x = encoder(*kind).eval(), tokens(kind[0])
        plain = run(model, x, **settings)
        headwise.regularize(model, NeuTRENO(strength=0.9))
        acted = run(model, x, **settings)
        with torch.no_grad():
            native = run(model, x, **settings)
        real = ~PADDING if "src_key_padding_mask" in settings else torch.ones_like(PADDING)
        real = real if kind[0] else real.t()
        assert (acted - plain).abs().max() > 1e-2, (kind, settings)
        assert (native - acted)[real].abs().max() < 5e-6, (kind, settings)


def test_rows_of_padding_are_zero_where_the_encoder_makes_them_zero():
    model, x = encoder(), tokens()
    model.eval()
    headwise.regularize(model, NeuTRENO())
    with torch.no_grad():
        assert run(model, x, src_key_padding_mask=PADDING)[PADDING].abs().max() == 0
    assert run(model, x, src_key_padding_mask=PADDING)[PADDING].abs().max() > 0


def test_layers_that_are_left_out_keep_their_native_path():
    model, x = encoder(dropout=0.0).eval(), tokens()
    handle = headwise.regularize(model, AttnScale(), where=["layers.1.self_attn"])
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 0]
    with torch.no_grad():
        assert (run(model, x) - run(encoder(dropout=0.0).eval(), x)).abs().max() < 5e-6
        run(model, x, src_key_padding_mask=PADDING)
    handle.remove()
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1]


@pytest.mark.bits
def test_removal_gives_evaluation_its_native_bits_back():
    model, x = encoder().eval(), tokens()
    with torch.no_grad():
        plain = run(model, x, src_key_padding_mask=PADDING)
        twin_of = headwise.regularize(model, NeuTRENO())
        twin = copy.deepcopy(model)
        twin_of.remove()
        headwise.handle(twin).remove()
        assert same(run(model, x, src_key_padding_mask=PADDING), plain)
        assert same(run(twin, x, src_key_padding_mask=PADDING), plain)


def decoder() -> nn.TransformerDecoder:
    """Make a decoder of two layers."""
    torch.manual_seed(0)
    return randomized(nn.TransformerDecoder(nn.TransformerDecoderLayer(C, H, 32, dropout=0.1, batch_first=True), 2))


def test_decoders_are_reached_in_self_and_cross_attention():
    model, x, memory = decoder(), tokens(), tokens(count=9)
    settings = {
        "tgt_mask": ORDER,
        "tgt_is_causal": True,
        "tgt_key_padding_mask": PADDING,
        "memory_key_padding_mask": torch.zeros(B, 9).bool(),
    }
    settings["memory_key_padding_mask"][:, -2:] = True
    known = [(s.name, s.is_cross, s.depth, s.stack, s.layers) for s in headwise.sites(model)]
    assert known == [
        (f"layers.{depth}.{name}", name == "multihead_attn", depth, "layers", 2)
        for depth in (0, 1)
        for name in ("self_attn", "multihead_attn")
    ]
    for drop in ({}, {"tgt_key_padding_mask": None}):
        plain = run(model, x, memory, **settings | drop)
        handle = headwise.regularize(model, DropHead(p=0.0), DropKey(p=0.0))
        assert (run(model, x, memory, **settings | drop) - plain).abs().max() < 2e-6
        handle.remove()
        for where in (lambda s: s.is_cross, lambda s: not s.is_cross):
            handle = headwise.regularize(model, DropHead(p=0.7), where=where)
            assert (run(model, x, memory, **settings | drop) - plain).abs().max() > 1e-2
            handle.remove()


def test_a_whole_transformer_is_reached():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = randomized(nn.Transformer(C, H, 2, 2, 32, dropout=0.0, batch_first=True))
    handle = headwise.regularize(model, EntropyPenalty(strength=1.0))
    plain = run(model, tokens(), tokens(count=4), src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)
    assert plain.shape == (B, 4, C)
    assert float(handle.loss().detach()) < 0
    assert [row.status for row in handle.report().rows] == ["regularized"] * 6


COMPILED = [DropHead(p=0.3), EntropyPenalty(), DropKey(p=0.3), NeuTRENO(), InputNoise(scale=0.5, unit="std")]


@pytest.mark.parametrize("method", part_of_grid(COMPILED, COMPILED[:1]), ids=repr)
@pytest.mark.parametrize("mode", part_of_grid(["train", "no grad"], ["train"]))
def test_compiled_models_have_one_graph_and_the_same_numbers(method, mode):
    torch._dynamo.reset()
    model, x = encoder(dropout=0.0).train(mode == "train"), tokens()
    handle = headwise.regularize(model, method)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.set_grad_enabled(mode == "train"):
        for step in range(4):
            settings = {"src_key_padding_mask": PADDING}
            progress = handle.state()
            eager = run(model, x, **settings)
            penalty = handle.loss()
            handle.load_state(progress)
            graph = run(compiled, x, **settings)
            real = slice(None) if mode == "train" else ~PADDING
            assert (graph - eager)[real].abs().max() < 5e-6
            assert torch.allclose(handle.loss(), penalty, atol=1e-6)
            if method.live:
                handle.set(type(method), **{method.live[0]: 0.1 * step})
    assert counter.frame_count == 1
