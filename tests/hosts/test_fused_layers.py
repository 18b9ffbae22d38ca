"""How layers make their call: by a function, by a module, twice, or past us: found and served, or told."""

import pytest
import torch
import torch.nn.functional as F
from own_models import (
    ByAFunction,
    ByAModule,
    ByAModuleAttention,
    ImportedByName,
    SelfAttention,
    Shared,
    Stack,
    TwoCalls,
    stack,
    tokens,
)
from torch import nn

import headwise
from headwise import (
    AttnScale,
    Decorrelation,
    DropColumn,
    DropHead,
    InputNoise,
    NeuTRENO,
    RelaxedAttention,
    ValueResidual,
)
from headwise.attend.attention import softmax
from headwise.attend.hosts.sdpa import open_sites

STRONG = (DropHead(p=0.6), RelaxedAttention(gamma=0.9))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert open_sites.current.top is None
    assert F.scaled_dot_product_attention is softmax.fused


@pytest.mark.parametrize("training", [True, False])
def test_imported_by_name_is_never_reached_and_says_so_in_the_first_call(training):
    model = Stack(SelfAttention(), ImportedByName()).train(training)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.5, matched_inference=True))
    with pytest.raises(RuntimeError, match=r"layers\.1 computed.*RelaxedAttention.*would do nothing.*imported by name"):
        model(tokens())
    handle.remove()


@pytest.mark.parametrize("kind", [ByAFunction, ByAModule, ByAModuleAttention])
def test_a_helper_that_makes_the_call_belongs_to_the_layer_around(kind):
    model, x = stack(kind, depth=2), tokens()
    plain = model(x).detach()
    assert [s.name for s in headwise.sites(model)] == ["layers.0", "layers.1"]
    handle = headwise.regularize(model, DropColumn(p=0.9), InputNoise(scale=0.1, unit="std"))
    assert (model(x) - plain).abs().max() > 1e-3
    handle.loss()
    handle.remove()


def test_two_calls_in_one_forward_both_go_through_the_methods():
    model, x = stack(TwoCalls, depth=1), tokens()
    (layer,) = model.layers
    v = layer.split(x)[2]
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    mean = v.mean(2, keepdim=True).expand_as(v)
    torch.testing.assert_close(model(x), x + layer.join(mean - 0.5 * mean))
    handle.remove()
    handle = headwise.regularize(model, DropHead(p=0.5), Decorrelation(strength=1.0))
    model(x)
    assert handle.fitted[0].passes.count() == 2
    assert len(handle.shared.penalties) == 2
    handle.remove()


def test_a_layer_that_runs_several_times_draws_each_time_and_penalizes_each_time():
    model, x = Shared(times=3), tokens()
    handle = headwise.regularize(model, DropHead(p=0.5), Decorrelation(strength=1.0))
    model(x)
    assert handle.fitted[0].passes.count() == 3
    thrice = handle.loss()
    handle.remove()
    model.times = 1
    handle = headwise.regularize(model, Decorrelation(strength=1.0))
    model(x)
    assert thrice > 2 * handle.loss()
    handle.remove()


@pytest.mark.parametrize("method", [NeuTRENO(), ValueResidual()], ids=repr)
def test_the_only_layer_of_a_stack_has_no_earlier_values_to_carry(method):
    with pytest.raises(ValueError, match="this is the only self attention of its stack"):
        headwise.regularize(Shared(), method)
    with pytest.raises(
        ValueError, match="changes nothing on the first self attention of a stack, and no layer above it was chosen"
    ):
        headwise.regularize(stack(), method, where=["layers.0"])


def test_layers_that_share_weights_are_sites_of_their_own():
    model, x = stack(depth=3), tokens()
    for layer in model.layers[1:]:
        layer.qkv.weight, layer.proj.weight = model.layers[0].qkv.weight, model.layers[0].proj.weight
    handle = headwise.regularize(model, DropHead(p=0.5), AttnScale(), example=x)
    model(x).sum().backward()
    assert [f.passes.count() for f in handle.fitted] == [1, 1, 1]
    assert len([n for n, _ in model.named_parameters() if ".headwise." in n]) == 3
    handle.remove()


def test_an_output_projection_that_never_runs_as_a_module_is_told():
    class ByItsWeight(SelfAttention):
        def join(self, o):
            return F.linear(o.transpose(-2, -3).flatten(-2), self.proj.weight, self.proj.bias)

    model, x = stack(ByItsWeight), tokens()
    handle = headwise.regularize(model, headwise.FeatScale(), example=x)
    with pytest.raises(RuntimeError, match=r"layers\.0 never called its output projection as a module"):
        model(x)
    handle.remove()


@pytest.mark.bits
def test_a_forward_set_on_the_module_itself_is_found():
    model, x = stack(depth=1), tokens()
    layer = model.layers[0]

    def forward(self, x):
        q, k, v = self.split(x)
        return self.join(F.scaled_dot_product_attention(q, k, v, scale=0.1))

    layer.forward = forward.__get__(layer)
    plain = model(x).detach()
    handle = headwise.regularize(model, DropColumn(p=0.9))
    assert not torch.allclose(model(x), plain)
    handle.remove()
    assert torch.equal(model(x), plain)


class OnMaps(nn.Module):
    """Attends over the pixels of a map, channels first with convolutions or last with linear layers."""

    def __init__(self, channels_first):
        super().__init__()
        self.num_heads, self.channels_first = 4, channels_first
        make = (lambda a, b: nn.Conv2d(a, b, 1)) if channels_first else nn.Linear
        self.qkv, self.proj = make(16, 48), make(16, 16)

    def forward(self, x):
        qkv = self.qkv(x).flatten(2).mT if self.channels_first else self.qkv(x).flatten(1, 2)
        q, k, v = qkv.unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(o.mT.unflatten(2, x.shape[2:]) if self.channels_first else o.unflatten(1, x.shape[1:3]))


@pytest.mark.parametrize("channels_first", [True, False])
def test_stages_before_and_after_a_layer_see_the_tokens_of_a_map(channels_first):
    layer = OnMaps(channels_first)
    x = torch.randn(2, 16, 3, 5) if channels_first else torch.randn(2, 3, 5, 16)
    axes, place = ((2, 3), (-1, 1, 1)) if channels_first else ((1, 2), (-1,))
    plain = layer(x)
    handle = headwise.regularize(layer, headwise.FeatScale(), example=x)
    gains = {key.rpartition(".")[2]: p for key, p in layer.named_parameters() if ".headwise." in f".{key}"}
    for gain in gains.values():
        nn.init.normal_(gain)
    mean = plain.mean(axes, keepdim=True)
    wanted = plain + gains["mean_gain"].view(place) * mean + gains["rest_gain"].view(place) * (plain - mean)
    torch.testing.assert_close(layer(x), wanted)
    handle.remove(discard=True)
    handle = headwise.regularize(layer, headwise.GatedOutput(), InputNoise(scale=0.0, unit="std"), example=x)
    for key, p in layer.named_parameters():
        if key.endswith("GatedOutput.bias"):
            nn.init.constant_(p, 100.0)
    torch.testing.assert_close(layer(x), plain)
    handle.remove(discard=True)


def test_a_mean_over_tokens_leaves_those_out_that_no_query_may_see():
    class Masked(SelfAttention):
        def forward(self, x):
            return super().forward(x, mask=(torch.arange(x.shape[1]) < 5)[None])

    model, x = stack(Masked), tokens()
    handle = headwise.regularize(model, headwise.FeatScale(), example=x)
    for key, p in model.named_parameters():
        if ".headwise." in key:
            nn.init.normal_(p)
    padded = x.clone()
    padded[:, 5:] += 1.0
    torch.testing.assert_close(model(padded)[:, :5], model(x)[:, :5])
    handle.remove(discard=True)
