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
from headwise import attention as core
from headwise.hosts import fused_call

STRONG = (DropHead(p=0.6), RelaxedAttention(gamma=0.9))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert fused_call.current.top is None
    assert F.scaled_dot_product_attention is core.fused


def test_imported_by_name_is_never_reached_and_says_so_in_the_first_step():
    for call in ("loss", "after_step"):
        model = Stack(SelfAttention(), ImportedByName())
        handle = headwise.regularize(model, DropHead(p=0.5))
        model(tokens()).sum().backward()
        with pytest.raises(
            RuntimeError, match=r"never reached in the first training step: layers\.1\. The methods there did nothing"
        ):
            getattr(handle, call)()
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
    assert int(handle.fitted[0].counter) == 2
    assert len(handle._ledger) == 2
    handle.remove()


def test_a_layer_that_runs_several_times_draws_each_time_and_penalizes_each_time():
    model, x = Shared(times=3), tokens()
    handle = headwise.regularize(model, DropHead(p=0.5), Decorrelation(strength=1.0))
    model(x)
    assert int(handle.fitted[0].counter) == 3
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
    assert [int(f.counter) for f in handle.fitted] == [1, 1, 1]
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
