"""Whose call it is: calls go to the site whose forward runs, and to no other, whatever happens on the way."""

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from own_models import SelfAttention, Stack, stack, tokens
from torch import nn

import headwise
from headwise import DropHead, RelaxedAttention
from headwise.attend.attention import softmax
from headwise.attend.core.method import Method
from headwise.attend.hosts.sdpa import call, open_sites

STRONG = (DropHead(p=0.6), RelaxedAttention(gamma=0.9))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert open_sites.current.top is None
    assert F.scaled_dot_product_attention is softmax.fused


def alone(seed=7):
    """Call the function outside of any model."""
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(seed)).unbind(0)
    return F.scaled_dot_product_attention(q, k, v)


class Failing(SelfAttention):
    """Raises in its forward, before or after its call."""

    error: BaseException | None = None

    def forward(self, x):
        out = super().forward(x)
        if self.error is not None:
            raise self.error
        return out


@pytest.mark.bits
@pytest.mark.parametrize(
    "error", [ValueError("broken"), KeyboardInterrupt(), SystemExit()], ids=lambda e: type(e).__name__
)
def test_an_exception_inside_a_forward_misroutes_no_later_call(error):
    plain, x = alone(), tokens()
    model, other = stack(Failing), stack()
    others = other(x)
    handle = headwise.regularize(model, *STRONG)
    good = model(x)
    model.layers[1].error = error
    with pytest.raises(type(error)):
        model(x)
    assert torch.equal(alone(), plain)
    assert torch.equal(other(x), others)
    model.layers[1].error = None
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
    assert torch.equal(model(x), good)
    assert torch.equal(alone(), plain)
    handle.remove()


class Around(nn.Module):
    """Calls the function itself, before and after the attention layer it holds."""

    def __init__(self):
        super().__init__()
        self.mix, self.inner = nn.Linear(16, 48), Failing()

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        first = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        with contextlib.suppress(ValueError):
            first = self.inner(first)
        return first + F.scaled_dot_product_attention(q, k, v).squeeze(1)


CALLS = []


class CallsSeen(Method):
    """Writes down the names of the sites in the order of their calls."""

    no_neutral = "it changes nothing at all"

    def inputs(self, q, k, v, call):
        CALLS.append(call.site.name)
        return q, k, v


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_nested_layer_the_calls_are_those_of_the_one_around_again(fails):
    model = Stack(Around())
    model.layers[0].inner.error = ValueError("broken") if fails else None
    handle = headwise.regularize(model, CallsSeen())
    CALLS.clear()
    model(tokens())
    assert CALLS == ["layers.0", "layers.0.inner", "layers.0"]
    handle.remove()
    handle = headwise.regularize(model, CallsSeen(), where=["layers.0.inner"])
    CALLS.clear()
    model(tokens())
    assert CALLS == ["layers.0.inner"]
    handle.remove()


@pytest.mark.bits
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_models_are_removed_in_any_order_and_the_last_gives_the_function_back(order):
    x = tokens()
    models = [stack(), stack()]
    plain = models[0](x)
    handles = [headwise.regularize(model, RelaxedAttention(gamma=1.0)) for model in models]
    models.append(copy.deepcopy(models[0]))
    handles.append(headwise.handle(models[2]))
    regularized = models[0](x)
    for done, index in enumerate(order):
        assert F.scaled_dot_product_attention is call.routed
        handles[index].remove()
        assert torch.equal(models[index](x), plain)
        for left in order[done + 1 :]:
            assert torch.equal(models[left](x), regularized)
    assert F.scaled_dot_product_attention is softmax.fused


def test_a_model_thrown_away_without_remove_gives_the_function_back():
    model = stack()
    headwise.regularize(model, *STRONG)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is call.routed
    del twin
    gc.collect()
    assert F.scaled_dot_product_attention is softmax.fused


@pytest.mark.bits
def test_a_call_that_was_on_its_way_when_the_function_was_given_back_is_made():
    plain = alone()
    handle = headwise.regularize(stack(), *STRONG)
    routed = F.scaled_dot_product_attention
    handle.remove()
    q, k, v = torch.randn(3, 2, 4, 5, 8, generator=torch.Generator().manual_seed(7)).unbind(0)
    assert torch.equal(routed(q, k, v), plain)


def test_somebody_elses_wrapper_is_called_and_left_in_place(monkeypatch):
    calls = []

    def counting(*args, **kwargs):
        calls.append(kwargs)
        return softmax.fused(*args, **kwargs)

    model, x = stack(), tokens()
    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    handle = headwise.regularize(model, DropHead(p=0.5))
    model.eval()(x)
    assert len(calls) == 2
    handle.remove()
    assert F.scaled_dot_product_attention is counting
    monkeypatch.undo()


@pytest.mark.bits
def test_a_wrapper_put_over_ours_keeps_working_after_remove(monkeypatch):
    model, x = stack(), tokens()
    plain = model(x)
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    below = F.scaled_dot_product_attention
    over = lambda *args, **kwargs: below(*args, **kwargs)
    F.scaled_dot_product_attention = over
    relaxed = model(x)
    assert not torch.equal(relaxed, plain)
    handle.remove()
    assert F.scaled_dot_product_attention is over
    assert torch.equal(model(x), plain)
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    assert torch.equal(model(x), relaxed)
    handle.remove()
    F.scaled_dot_product_attention = below
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    handle.remove()
