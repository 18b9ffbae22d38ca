"""Two methods on one model, in both orders: values, gradients, and removal."""

import pytest
import torch
from grids import part_of_grid
from small_models import HOSTS, fresh

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

HOST = HOSTS["own"]
NAMES = list(shelf.__all__)
# Both would compute the same weights, or one compute and the other write them; everything else composes.
COMPUTES = {"InterleavedHeads", "SigmaReparam", "SpectralNorm", "WeightNorm"}
WRITES = {"QKRates", "SpectralCap"}

# A sink is a column of the softmax, which the others have not, or has no value whose exponential is known.
REFUSED_IN_THE_CALL = [{"AttentionSink", other} for other in ("LASER", "LinearAttention", "Softpick")]
OUTSIDE = {"InputNoise", "BranchDrop"}


# What edits the logits before a method that makes them anew would be lost.
LOST = {
    (name, "LinearAttention") for name in ("ForgettingAttention", "StableSoftmax", "Temperature", "SoftCap", "Softpick")
}


def refused(first, second):
    pair = {first, second}
    return (bool(pair & COMPUTES) and pair <= COMPUTES | WRITES) or pair == {"QKClip", "SpectralNorm"}


def without_meaning(first, second):
    return {REGISTRY[first].negative, REGISTRY[second].negative} == {"makes", "refuses"}


def partners(name):
    """Name the methods that compose with this one."""
    return [
        other
        for other in NAMES
        if other != name
        and not refused(name, other)
        and not without_meaning(name, other)
        and {name, other} not in REFUSED_IN_THE_CALL
    ]


def strong(name):
    # A strength of 1000 would only scale the rounding with it.
    cls = REGISTRY[name]
    return cls() if cls.penalizes else cls(**cls.strong)


def step(*methods):
    """Fit methods onto a fresh model; give the output, the penalty and all gradients of one training step."""
    model = fresh(HOST)
    handle = headwise.regularize(model, *methods, example=HOST.example())
    out = HOST.run(model)
    penalty = handle.loss()
    (out.square().mean() + penalty).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None and ".headwise." not in n}
    return out.detach(), penalty.detach(), grads


def assert_same(found, wanted, what):
    for part, (got, expected) in zip(("output", "penalty"), zip(found[:2], wanted[:2], strict=True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=lambda m, p=part: f"{what}, {p}: {m}")
    # A reparametrized weight has another gradient and another name; all other weights keep theirs.
    common = found[2].keys() & wanted[2].keys()
    assert len(common) >= 16
    for key in common:
        torch.testing.assert_close(
            found[2][key], wanted[2][key], rtol=1e-3, atol=1e-5, msg=lambda m, k=key: f"{what}, gradient of {k}: {m}"
        )


# each beside all others that it composes with
@pytest.mark.parametrize("name", part_of_grid(NAMES, ("EntropyPenalty",)))
def test_beside_a_neutral_method_a_method_gives_what_it_gives_alone(name):
    alone = step(strong(name))
    for other in partners(name):
        # What is drawn for what enters or leaves the layer is drawn in a pass of its own, whose number others shift.
        if REGISTRY[other].neutral is None or (REGISTRY[name].random and {name, other} & OUTSIDE):
            continue
        neutral = REGISTRY[other](**REGISTRY[other].neutral)
        assert_same(step(strong(name), neutral), alone, f"{name} + {other}")
        if (other, name) not in LOST:
            assert_same(step(neutral, strong(name)), alone, f"{other} + {name}")


def looks(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()], hooks


@pytest.mark.parametrize("name", part_of_grid(NAMES, ("SigmaReparam",)))
def test_removing_two_methods_gives_back_the_same_bits_and_keys(name):
    model = fresh(HOST)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plain, bare = HOST.run(model), looks(model)
    for other in partners(name):
        if (name, other) in LOST:
            continue
        handle = headwise.regularize(model, strong(name), strong(other), example=HOST.example())
        HOST.run(model)
        handle.remove()
        after = model.state_dict()
        assert list(after) == list(before), other
        assert all(torch.equal(after[key], before[key]) for key in before), other
        assert torch.equal(HOST.run(model), plain), other
        assert looks(model) == bare, other


@pytest.mark.parametrize(
    ("first", "second"), [(a, b) for a in NAMES for b in NAMES if a != b and refused(a, b)], ids=lambda name: name
)
def test_methods_that_hold_the_same_weights_are_refused_before_anything_changes(first, second):
    model = fresh(HOST)
    before, bare = {key: value.clone() for key, value in model.state_dict().items()}, looks(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.attn.*use one of them") as told:
        headwise.regularize(model, strong(first), strong(second), example=HOST.example())
    assert first in str(told.value) and second in str(told.value)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert looks(model) == bare
