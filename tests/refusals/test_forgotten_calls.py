"""Calls that a training loop forgot are told within its first steps, and no loop that forgot nothing is stopped."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from small_models import Own
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.checkpoint import checkpoint

import headwise
from headwise import AttnScale, DropHead, EntropyPenalty, NeuTRENO, ProductDecay, QKClip, Ramp, SigmaReparam
from headwise.attend.regularizing import loop_checks
from headwise.attend.regularizing.loop_checks import KEPT
from headwise.health.watching.alerts import HealthWarning

EXAMPLE = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _nobody_listens_yet():
    # What failed as it should is kept alive by its traceback.
    for one in list(loop_checks._listening):
        one.stop()


def fitted(*methods):
    torch.manual_seed(0)
    model = Own(depth=3).train()
    return model, headwise.regularize(model, *methods, example=EXAMPLE)


def train(model, handle=None, steps=3, *, loss=True, after=True, optimizer=None, micro=1, views=1):
    """Train some steps, with the calls that are asked for."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(micro):
            outs = [model(EXAMPLE) for _ in range(views)]
            total = sum(out.square().mean() for out in outs)
            if loss and handle is not None:
                total = total + handle.loss()
            total.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after and handle is not None:
            handle.after_step()


@pytest.mark.parametrize("method", [EntropyPenalty(), ProductDecay()], ids=repr)
def test_a_loss_that_is_never_read_is_told_by_the_third_step(method):
    model, handle = fitted(method)
    train(model, handle, steps=2, loss=False)
    with pytest.raises(
        RuntimeError, match=rf"loss\(\) was never read .*{type(method).__name__}.*loss = loss \+ regularized\.loss\(\)"
    ):
        train(model, handle, steps=3, loss=False)


@pytest.mark.parametrize("method", [QKClip(), SigmaReparam(), NeuTRENO(warmup_steps=50)], ids=repr)
def test_an_after_step_that_is_never_called_is_told_by_the_third_step(method):
    model, handle = fitted(method)
    with pytest.raises(
        RuntimeError, match=rf"after_step\(\) was not called .*{type(method).__name__}.*after each optimizer\.step"
    ):
        train(model, handle, after=False)


def test_a_schedule_that_is_set_later_needs_after_step_too():
    model, handle = fitted(DropHead(p=0.1))
    train(model, handle, steps=4, after=False)
    handle.set(DropHead, p=Ramp(0.0, 0.3, 10))
    with pytest.raises(
        RuntimeError, match=r"after_step\(\) was not called in the first 2 optimizer steps, so that DropHead"
    ):
        train(model, handle, after=False)


def test_a_schedule_that_a_resumed_run_brings_needs_after_step_too():
    _, handle = fitted(DropHead(p=0.1))
    handle.set(DropHead, p=Ramp(0.0, 0.3, 10))
    model, resumed = fitted(DropHead(p=0.1))
    resumed.load_state(handle.state())
    with pytest.raises(RuntimeError, match=r"after_step\(\) was not called .* DropHead"):
        train(model, after=False)


def test_a_method_that_needs_no_call_may_be_trained_without_one():
    model, _ = fitted(DropHead(p=0.1), NeuTRENO())
    train(model, loss=False, after=False, steps=5)


@pytest.mark.parametrize("method", [AttnScale(), SigmaReparam()], ids=repr)
def test_an_optimizer_made_before_the_learned_parameters_is_told(method):
    torch.manual_seed(0)
    model = Own(depth=3).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = headwise.regularize(model, method, example=EXAMPLE)
    name = type(method).__name__
    with pytest.raises(
        RuntimeError, match=rf"{name}.* in no optimizer .*(gain|gamma).*make the optimizer after regularize"
    ):
        train(model, handle, optimizer=optimizer)
    # The remedy of the text is one.
    optimizer.add_param_group({"params": handle.parameters(), "weight_decay": 0.0})
    before = [p.detach().clone() for p in handle.parameters()]
    train(model, handle, optimizer=optimizer)
    assert before
    assert any(not torch.equal(a, b) for a, b in zip(before, handle.parameters(), strict=True))


def test_all_that_was_forgotten_is_told_at_once_and_before_the_step():
    torch.manual_seed(0)
    model = Own(depth=3).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = headwise.regularize(model, AttnScale(), EntropyPenalty(), QKClip(), example=EXAMPLE)
    train(model, optimizer=optimizer, steps=2)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError) as told:
        train(model, optimizer=optimizer, steps=1)
    assert [word in str(told.value) for word in ("EntropyPenalty", "QKClip", "AttnScale")] == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    handle.remove(discard=True)
    train(model, optimizer=optimizer)


EVERYTHING = (AttnScale(), EntropyPenalty(), QKClip(), NeuTRENO(warmup_steps=9))


@pytest.mark.parametrize("loop", [{}, {"micro": 4}, {"views": 2}, {"micro": 3, "views": 2}], ids=str)
def test_loops_that_forget_nothing_run_on_and_no_hook_stays(loop):
    model, handle = fitted(*EVERYTHING)
    train(model, handle, steps=5, **loop)
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_two_optimizers_and_one_that_steps_rarely_are_understood():
    model, handle = fitted(*EVERYTHING)
    learned = {id(p) for p in handle.parameters()}
    often = torch.optim.SGD([p for p in model.parameters() if id(p) not in learned], lr=1e-3)
    rarely = torch.optim.SGD(handle.parameters(), lr=1e-3)
    train(model, handle, steps=5, optimizer=often)
    assert rarely.param_groups


def test_frozen_layers_and_gains_are_left_as_they_are():
    model, handle = fitted(AttnScale())
    train(model, handle, steps=5, optimizer=torch.optim.SGD(model.head.parameters(), lr=1e-3))
    model, handle = fitted(AttnScale())
    own = [p for n, p in model.named_parameters() if "headwise" not in n]
    for parameter in handle.parameters():
        parameter.requires_grad_(False)
    train(model, handle, steps=5, optimizer=torch.optim.SGD(own, lr=1e-3))


def test_evaluation_probing_and_other_models_steps_are_no_training():
    model, handle = fitted(EntropyPenalty(), QKClip())
    other = nn.Linear(32, 32)
    optimizer = torch.optim.SGD([*other.parameters()], lr=1e-3)
    for _ in range(5):
        model.train()(other(EXAMPLE)).sum().backward()
        with torch.no_grad():
            model(EXAMPLE)
        model.eval()(EXAMPLE)
        optimizer.step()
    # A model that is trained in evaluation mode, as batch norms are at times, gives its methods nothing to do.
    model, handle = fitted(EntropyPenalty(), QKClip())
    train(model.eval(), steps=5)
    assert float(handle.loss()) == 0.0


def test_recomputed_layers_are_not_counted_apart():
    model, handle = fitted(*EVERYTHING)
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
    train(model, handle, steps=5)


def forwards(model, count, handle=None):
    for _ in range(count):
        model(EXAMPLE)
        if handle is not None:
            handle.loss()


def test_penalties_that_nobody_reads_do_not_pile_up():
    model, handle = fitted(EntropyPenalty())
    with pytest.warns(
        UserWarning, match=rf"penalties of {KEPT} training forwards were never read and are dropped.*EntropyPenalty"
    ):
        forwards(model, KEPT + 1)
    assert len(handle.shared.penalties) == len(handle.fitted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forwards(model, 2 * KEPT, handle)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_look_out_for_their_own_loops(copied):
    model, handle = fitted(EntropyPenalty())
    twin = copied(model)
    train(model, handle, steps=4)
    with pytest.raises(RuntimeError, match=r"loss\(\) was never read"):
        train(twin, headwise.handle(twin), loss=False)


def test_a_watch_whose_step_is_never_called_is_told_once_and_trains_on():
    model = Own(depth=2).train()
    watch = headwise.watch(model, every=2, on_alert=None)
    with pytest.warns(
        HealthWarning, match=r"watch\.step\(\) was not called in the first 2 optimizer steps.*after each"
    ) as told:
        train(model, steps=6)
    assert len(told) == 1
    watch.remove()
    watch = headwise.watch(model, every=2, on_alert=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            train(model, steps=1, optimizer=optimizer)
            watch.step()
    watch.remove()
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_a_running_average_of_the_model_is_not_looked_after_for_ever():
    model, handle = fitted(*EVERYTHING)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        train(model, handle, steps=1, optimizer=optimizer)
        average.update_parameters(model)
    assert torch_optimizer._global_optimizer_pre_hooks
    for _ in range(loop_checks.FOREIGN):
        optimizer.step()
    assert not torch_optimizer._global_optimizer_pre_hooks


@pytest.mark.grid
def test_compiled_models_are_looked_after_without_a_recompilation():
    torch._dynamo.reset()
    model, handle = fitted(EntropyPenalty(), QKClip())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, handle, steps=5, optimizer=optimizer)
    model, handle = fitted(EntropyPenalty())
    with pytest.raises(RuntimeError, match=r"loss\(\) was never read"):
        train(torch.compile(model, backend="aot_eager"), handle, loss=False)
    torch._dynamo.reset()
