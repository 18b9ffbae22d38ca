"""Captured training steps: replayed on a CPU operator by operator, they give every bit of the plain loop."""

import copy
import re

import pytest
import torch
from accelerate import Accelerator
from tape import on_tape
from tiny_task import Tiny

import headwise
from headwise.attend import HeldKeys
from headwise.attend.core.method import REGISTRY
from headwise.lab.training.batches import make_batch
from headwise.lab.training.compiled_forward import CompiledForward
from headwise.lab.training.optimizer import LearningRate
from headwise.lab.training.step_graphs import WARM, Obstacles, StepGraphs, captures
from headwise.lab.training.train import Training, train_epoch
from headwise_verdict.files.errors import StudyError

EPOCHS = 6


def train(method, captured, *, before=lambda handle: None, watched=False, scheduled=False, compiled=False, **settings):
    """Train for a few epochs; return the losses, the parameters, and the training."""
    task = Tiny(epochs=EPOCHS, **settings)
    torch.manual_seed(0)
    model = task.model()
    examples = task.data("train")
    handle = None
    if method is not None:
        handle = headwise.regularize(model, copy.copy(method), example=examples[0][:2], seed=3)
        before(handle)
    # a rate that single precision holds, and one that is rounded to it in both loops
    rate = torch.tensor(2.0**-7) if scheduled else 2.0**-7
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    training = Training(task, model, optimizer, Accelerator(cpu=True), 0, handle)
    # memory is measured in a step that is not captured
    training.clock.memory.peak = 1
    if scheduled:
        training.rates = LearningRate(task, optimizer, 5 * EPOCHS)
    if compiled:
        training.compiled = CompiledForward("aot_eager")
    if watched:
        training.watch = headwise.watch(model, every=4, on_alert=None)
    if captured:
        training.graphs = StepGraphs(optimizer, torch.device("cpu"), handle.fitted if handle else [], on_tape)
    losses = [train_epoch(training, examples, epoch, lambda *_: None).loss for epoch in range(1, EPOCHS + 1)]
    return losses, [parameter.detach().clone() for parameter in model.parameters()], training


def strong(name):
    return None if name is None else REGISTRY[name](**REGISTRY[name].strong)


@pytest.mark.parametrize("name", [None, *headwise.attend.methods.__all__])
def test_captured_steps_give_every_bit_of_the_plain_loop(name):
    losses, state, plain = train(strong(name), captured=False)
    again, others, training = train(strong(name), captured=True)
    # 36 images in batches of 8: the last of an epoch has 4
    assert not training.graphs.reason and len(training.graphs.captured) == 2
    assert losses == again and all(map(torch.equal, state, others))
    assert training.graphs.told() == "captured as CUDA graphs"
    if name is not None:
        assert plain.regularized.state() == training.regularized.state()


@pytest.mark.parametrize(
    "settings", [{"accumulation": 2}, {"clip": 0.1}, {"schedule": "cosine", "warmup": 3}, {"batch_size": 12}], ids=str
)
def test_so_do_other_recipes(settings):
    runs = [train(strong("DropHead"), captured, scheduled=True, **settings) for captured in (False, True)]
    (losses, state, _), (again, others, training) = runs
    assert training.graphs.captured
    assert losses == again and all(map(torch.equal, state, others))


class Drawn(Tiny):
    """Draw the noise of its images apart, in parts of several shapes and kinds."""

    def draw(self, count, generator):
        noise = torch.randn(count, 1, 4, 4, generator=generator)
        return {"noise": (noise, torch.tensor(0.1)), "none": None}

    def transform(self, inputs, drawn):
        return inputs if drawn is None else inputs + drawn["noise"][1] * drawn["noise"][0]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_drawn_before_an_epoch_is_what_its_batches_would_draw(monkeypatch, accumulation):
    losses, state, _ = train(None, captured=False, accumulation=accumulation)
    monkeypatch.setitem(globals(), "Tiny", Drawn)
    for captured in (False, True):
        again, others, training = train(None, captured, accumulation=accumulation)
        assert losses == again and all(map(torch.equal, state, others))
    examples = training.task.data("train")
    assert not torch.equal(make_batch(training.task, examples, torch.Generator()).inputs, examples[0])
    assert torch.equal(make_batch(training.task, examples, None).inputs, examples[0])


def test_steps_with_readings_are_not_captured_and_read_the_same():
    (losses, _, plain), (again, _, training) = (train(strong("DropKey"), c, watched=True) for c in (False, True))
    assert losses == again and training.graphs.captured
    first, second = ([{**row, "time": 0} for row in run.watch.records()] for run in (plain, training))
    assert len(first) > 100 and repr(first) == repr(second)
    for run in (plain, training):
        run.watch.remove()


def test_while_a_schedule_changes_a_strength_no_step_is_captured():
    def ramp(handle):
        handle.set(headwise.DropHead, p=headwise.Ramp(start=0.0, end=0.5, steps=10))

    (losses, state, _), (again, others, training) = (train(strong("DropHead"), c, before=ramp) for c in (False, True))
    assert losses == again and all(map(torch.equal, state, others))
    assert training.graphs.captured and training.graphs.taken.total() >= 10 + WARM


def test_a_key_that_is_not_written_again_is_seen_here(monkeypatch):
    write = HeldKeys.write
    monkeypatch.setattr(HeldKeys, "write", lambda keys, device: write(keys, device) if keys.table is None else None)
    (losses, _, _), (again, _, _) = (train(strong("DropHead"), captured) for captured in (False, True))
    assert losses != again


class Turning(Tiny):
    """Pass through one layer more in every other step."""

    def model(self):
        model = super().model()
        plain, turns = model.forward, []

        def forward(x):
            turns.append(None)
            return plain(x) + (plain(x) if len(turns) % 2 else 0)

        model.forward = forward
        return model


def test_a_step_with_other_passes_than_the_one_before_is_told(monkeypatch):
    monkeypatch.setitem(globals(), "Tiny", Turning)
    with pytest.raises(RuntimeError, match=r"other layers than the step before.*--graphs off"):
        train(strong("DropHead"), captured=True)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: torch.rand(2), "aten.rand.default runs on the cpu"),
        (lambda x: torch.zeros(()).add_(1), "aten.add_.Tensor runs on the cpu"),
        (lambda x: x.copy_(torch.ones(2)), "a tensor is copied from the CPU"),
    ],
)
def test_what_a_graph_would_not_repeat_is_found(run, reason):
    with Obstacles(torch.device("meta")) as found:
        run(torch.ones(2, device="meta"))
    assert found.reason == reason


def test_a_number_that_steers_a_step_is_found():
    known, other = torch.ones(()), torch.ones(())
    with Obstacles(torch.device("cpu"), [known]) as found:
        assert float(known) == 1
        assert not found.reason
        assert float(other) == 1
    assert found.reason == "a number of the device is read in Python"


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda x: torch.equal(x, x), "a number of the device is read in Python"),
        (lambda x: x[x > 0], r"the size of what aten.index.Tensor gives depends on the device's numbers"),
        (lambda x: x.nonzero(), r"the size of what aten.nonzero.default gives"),
        (lambda x: x[torch.tensor([1, 0])], "$"),
        (lambda x: x.repeat_interleave(torch.tensor([1, 1]), output_size=2), "$"),
        (lambda x: x.to("meta"), "a tensor is copied to the meta"),
    ],
)
def test_what_waits_for_numbers_of_the_device_is_found(run, said):
    with Obstacles(torch.device("cpu")) as found:
        run(torch.ones(2))
    assert re.match(said, found.reason)


def test_graphs_that_are_to_be_on_and_cannot_be_are_refused():
    cpu, cuda, recipe = torch.device("cpu"), torch.device("cuda"), Tiny()
    assert captures("auto", recipe, cuda, 1) and captures("on", recipe, cuda, 1)
    assert not captures("auto", recipe, cpu, 1) and not captures("off", recipe, cuda, 1)
    for given, reason in (
        ((recipe, cpu, 1), "CUDA graphs need a CUDA device, and this runs on cpu"),
        ((recipe, cuda, 2), "several processes"),
        ((Tiny(optimizer="lars"), cuda, 1), "the optimizer lars reads its learning rate in Python"),
    ):
        assert not captures("auto", *given)
        with pytest.raises(StudyError, match=f"--graphs on: {reason}"):
            captures("on", *given)
