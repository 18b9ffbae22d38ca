"""What a handle refuses, and what it says of layers that are not as they were taken to be."""

import copy

import pytest
from small_models import HOSTS
from torch import nn
from untouched import fresh, same, untouched

import headwise
from headwise import AttnScale, DropHead, DropKey, RelaxedAttention, VShape


@pytest.mark.parametrize("leave", ["remove", "fold"])
def test_a_handle_that_left_answers_every_call_with_why(leave):
    model = fresh()
    handle = headwise.regularize(model, DropHead(p=0.2))
    getattr(handle, leave)()
    before = untouched(model)
    calls = [handle.remove, handle.fold, handle.loss, handle.after_step, lambda: handle.set(DropHead, p=0.1)]
    for call in calls:
        with pytest.raises(
            RuntimeError, match=r"no longer regularized, since remove\(\) or fold\(\) was called: call regularize"
        ):
            call()
    same(before, untouched(model))


def test_learned_parameters_are_not_thrown_away_unasked():
    model = fresh()
    handle = headwise.regularize(model, AttnScale(), example=HOSTS["own"].example())
    HOSTS["own"].run(model).sum().backward()
    handle.after_step()
    before = untouched(model)
    with pytest.raises(
        RuntimeError, match=r"AttnScale\(\) learned something in 1 steps .*remove\(discard=True\) drops it"
    ):
        handle.remove()
    keys = untouched(model)
    assert list(before[0]) == list(keys[0])
    handle.remove(discard=True)


@pytest.mark.parametrize(
    ("chosen", "changes", "kind", "message"),
    [
        (DropKey, {"p": 0.1}, ValueError, r"DropKey is not fitted on this model; fitted: DropHead\(p=0\.2\)"),
        (DropHead(p=0.3), {"p": 0.1}, ValueError, r"DropHead\(p=0\.3\) is not fitted"),
        (DropHead, {"q": 0.1}, ValueError, r"DropHead\.q cannot change while training; these can: p"),
        (DropHead, {"p": 1.5}, ValueError, r"DropHead: p must lie in \[0, 1\), got 1\.5"),
        (DropHead, {"p": "half"}, TypeError, r"DropHead\.p must be a number or a schedule, got 'half'"),
        (
            DropHead,
            {"p": VShape(start=0.2, end=1.5, warmup=2, total=4)},
            ValueError,
            r"p must lie in \[0, 1\), got 1\.5",
        ),
        (
            DropHead,
            {},
            ValueError,
            r"set\(\) needs a new value for a setting of DropHead\(p=0\.2\); these can change: p",
        ),
    ],
)
def test_a_strength_that_cannot_be_set_changes_none(chosen, changes, kind, message):
    model = fresh()
    handle = headwise.regularize(model, DropHead(p=0.2), RelaxedAttention(gamma=0.3))
    with pytest.raises(kind, match=message):
        handle.set(chosen, **changes)
    strengths = [float(*state.strengths.values()) for fitted in handle.fitted for state in fitted.states]
    assert strengths == pytest.approx([0.2, 0.3] * 3)
    HOSTS["own"].run(model).sum().backward()
    handle.after_step()
    handle.remove()


def test_a_layer_that_never_ran_is_named_in_the_first_step():
    model = fresh()
    handle = headwise.regularize(model, DropHead(p=0.2))
    blocks = model.blocks
    model.blocks = nn.ModuleList(blocks[:2])
    HOSTS["own"].run(model).sum().backward()
    for call in (handle.loss, handle.after_step):
        with pytest.raises(RuntimeError, match=r"never reached in the first training step: blocks\.2\.attn"):
            call()
    model.blocks = blocks
    HOSTS["own"].run(model).sum().backward()
    handle.loss()
    handle.after_step()
    handle.remove()


def test_heads_that_are_not_as_declared_are_named():
    model = fresh()
    model.blocks[1].attn.num_heads = 2
    handle = headwise.regularize(model, DropHead(p=0.2))
    model.blocks[1].attn.num_heads = 4
    with pytest.raises(
        RuntimeError, match=r"blocks\.1\.attn was taken to have 2 heads, but .* shape \(3, 4, 9, 8\); pass example="
    ):
        HOSTS["own"].run(model)
    handle.remove()


@pytest.mark.parametrize("call", ["loss", "after_step"])
def test_a_layer_that_is_replaced_while_training_is_named(call):
    model = fresh()
    handle = headwise.regularize(model, DropHead(p=0.2))

    def step():
        HOSTS["own"].run(model).sum().backward()
        handle.loss()
        handle.after_step()

    step()
    known = model.blocks[1].attn
    # A wrapper around a layer is no replacement.
    model.blocks[1].attn = nn.Sequential(known)
    step()
    model.blocks[1].attn = copy.deepcopy(known)
    HOSTS["own"].run(model).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"blocks\.1\.attn is no longer in the model, so that the methods there do nothing.*Put the layers back",
    ):
        getattr(handle, call)()
    model.blocks[1].attn = known
    step()
    # A layer that rests for a step, such as under stochastic depth, is no fault.
    blocks = model.blocks
    model.blocks[1].forward = lambda x: x
    step()
    assert model.blocks is blocks
    handle.remove()
