"""Whose call it is: calls go to the site whose forward runs, and to no other, whatever happens on the way."""

import contextlib
import copy
import gc
import threading

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
from torch.utils.checkpoint import checkpoint

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
from headwise.method import Method

STRONG = (DropHead(p=0.6), RelaxedAttention(gamma=0.9))


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert fused_call.current.top is None
    assert F.scaled_dot_product_attention is core.fused


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


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt(), SystemExit()], ids=lambda e: type(e).__name__)
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
    handle.load_state({"step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
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
        assert F.scaled_dot_product_attention is fused_call.routed
        handles[index].remove()
        assert torch.equal(models[index](x), plain)
        for left in order[done + 1 :]:
            assert torch.equal(models[left](x), regularized)
    assert F.scaled_dot_product_attention is core.fused


def test_a_model_thrown_away_without_remove_gives_the_function_back():
    model = stack()
    headwise.regularize(model, *STRONG)
    twin = copy.deepcopy(model)
    del model
    gc.collect()
    assert F.scaled_dot_product_attention is fused_call.routed
    del twin
    gc.collect()
    assert F.scaled_dot_product_attention is core.fused


def test_somebody_elses_wrapper_is_called_and_left_in_place(monkeypatch):
    calls = []

    def counting(*args, **kwargs):
        calls.append(kwargs)
        return core.fused(*args, **kwargs)

    model, x = stack(), tokens()
    monkeypatch.setattr(F, "scaled_dot_product_attention", counting)
    handle = headwise.regularize(model, DropHead(p=0.5))
    model.eval()(x)
    assert len(calls) == 2
    handle.remove()
    assert F.scaled_dot_product_attention is counting
    monkeypatch.undo()


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


def test_imported_by_name_is_never_reached_and_says_so_in_the_first_step():
    for call in ("loss", "after_step"):
        model = Stack(SelfAttention(), ImportedByName())
        handle = headwise.regularize(model, DropHead(p=0.5))
        model(tokens()).sum().backward()
        with pytest.raises(RuntimeError, match=r"never reached in the first training step: layers\.1\. The methods there did nothing"):
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
    q, k, v = layer.split(x)
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
    with pytest.raises(ValueError, match="changes nothing on the first self attention of a stack, and no layer above it was chosen"):
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


def test_threads_with_models_of_their_own_do_not_meet():
    x = tokens(length=32)
    models = [stack(depth=4) for _ in range(4)]
    handles = [headwise.regularize(m, DropHead(p=0.1 * (i + 1)), NeuTRENO()) for i, m in enumerate(models[:3])]

    def together(results, index):
        for _ in range(20):
            results[index] = models[index](x)

    def reset():
        for handle in handles:
            handle.load_state({"step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})

    serial, threaded = {}, {}
    for index in range(4):
        together(serial, index)
    reset()
    workers = [threading.Thread(target=together, args=(threaded, index)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(serial[i], threaded[i]) for i in range(4))
    for handle in handles:
        handle.remove()


def test_threads_may_evaluate_one_model_at_once():
    model = stack(depth=4).eval()
    batches = [tokens(batch=2 + i, length=8 + i, seed=i) for i in range(4)]
    handle = headwise.regularize(model, NeuTRENO(strength=0.9), example=batches[0])
    serial = [model(x) for x in batches]
    wrong = []

    def evaluate(index):
        try:
            for _ in range(30):
                if not torch.equal(model(batches[index]), serial[index]):
                    wrong.append(index)
        except RuntimeError as error:
            wrong.append(error)

    workers = [threading.Thread(target=evaluate, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    handle.remove()


class CheckpointsItsCall(SelfAttention):
    """Checkpoints inside of the forward: in the recompute no module is entered."""

    def forward(self, x):
        def attend(q, k, v):
            return torch.tanh(F.scaled_dot_product_attention(q, k, v))

        q, k, v = self.split(x)
        return self.join(checkpoint(attend, q, k, v, use_reentrant=False) if self.checkpoints else attend(q, k, v))

    checkpoints = True


@pytest.mark.parametrize("methods", ["DropHead(p=0.5)", "DropHead(p=0.5) + RelaxedAttention(gamma=0.8) + Decorrelation(strength=1.0)"])
def test_a_call_that_is_checkpointed_inside_of_the_forward_has_the_same_gradients(methods):
    gradients = []
    for checkpoints in (False, True):
        model, x = stack(CheckpointsItsCall), tokens()
        for layer in model.layers:
            layer.checkpoints = checkpoints
        handle = headwise.regularize(model, *headwise.parse(methods))
        (model(x).square().sum() + handle.loss()).backward()
        gradients.append([p.grad for p in model.parameters()])
        assert len(handle._ledger) == 0
        handle.remove()
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


class Checkpointed(nn.Module):
    """Checkpoints each layer, some of them fitted and some not."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.checkpoints = True

    def forward(self, x):
        def both(x):
            return x + self.layers[1](self.layers[0](x))

        return checkpoint(both, x, use_reentrant=False) if self.checkpoints else both(x)


def test_the_recompute_of_an_unfitted_layer_stays_unfitted():
    gradients = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model, x = Checkpointed(SelfAttention(), SelfAttention()), tokens()
        model.checkpoints = checkpoints
        handle = headwise.regularize(model, DropHead(p=0.5), RelaxedAttention(gamma=0.8), where=["layers.1"])
        model(x).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        handle.remove()
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain)


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
