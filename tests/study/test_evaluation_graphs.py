"""Captured evaluations: replayed on a CPU operator by operator, they give every figure of the plain loop."""

import copy

import pytest
import torch
from accelerate import Accelerator
from grids import part_of_grid
from tape import on_tape
from tiny_task import Tiny
from torch import nn

import headwise
from headwise.attend.core.method import REGISTRY
from headwise.lab.training.evaluate import evaluate
from headwise.lab.training.evaluation_graphs import EvaluationGraphs
from headwise.lab.training.step_graphs import WARM, StepGraphs
from headwise.lab.training.train import Training, train_epoch
from headwise.study import Evaluation, Rows

EPOCHS = 3
CPU = torch.device("cpu")


def acting(model, inputs):
    """Answer in training mode, in which methods act and dropout draws."""
    model.train()
    try:
        return model(inputs)
    finally:
        model.eval()


def ranked(output, targets):
    return {"rows": Rows(output.softmax(-1).amax(-1, keepdim=True)), "weight": torch.as_tensor(float(len(targets)))}


# methods that look at their vectors when a model leaves the training mode
SETTLING = ("SigmaReparam", "SpectralNorm")
# of each kind of act one, as test_step_graphs captures steps of all methods
KINDS = (None, *SETTLING, "AttentionDropout", "DropHead", "EntropyPenalty", "InputNoise", "LinearAttention", "NeuTRENO")
PLAIN = Evaluation("test")
EVALUATIONS = (
    PLAIN,
    Evaluation("with methods", split="test", output=acting),
    Evaluation("rows", split="test", count=ranked, finish=lambda sums: {"accuracy": sums["rows"].median()}),
)


def train(method, captured, evaluations=EVALUATIONS, batch=3, task=Tiny, watched=False):
    """Train and evaluate after each epoch; return all figures, and the training."""
    task = task(evaluation_batch_size=batch)
    torch.manual_seed(0)
    model = task.model()
    examples, held_out = task.data("train"), task.data("test")
    handle = None
    if method is not None:
        handle = headwise.regularize(model, copy.copy(method), example=examples[0][:2], seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)
    training = Training(task, model, optimizer, Accelerator(cpu=True), 0, handle)
    # memory is measured in a step that takes seconds
    training.clock.memory.peak = 1
    if watched:
        training.watch = headwise.watch(model, every=7, on_alert=None)
    if captured:
        fitted = handle.fitted if handle else []
        training.graphs = StepGraphs(optimizer, CPU, fitted, on_tape)
        training.evaluation_graphs = EvaluationGraphs(CPU, fitted, on_tape)
    figures = []
    for epoch in range(1, EPOCHS + 1):
        train_epoch(training, examples, epoch, lambda *_: None)
        figures += [evaluate(training, evaluation, held_out) for evaluation in evaluations]
    if watched:
        training.watch.remove()
    return figures, training


@pytest.mark.parametrize("name", part_of_grid([None, *headwise.attend.methods.__all__], KINDS))
def test_captured_evaluations_give_every_figure_of_the_plain_loop(name):
    method = None if name is None else REGISTRY[name](**REGISTRY[name].strong)
    figures, plain = train(method, captured=False)
    again, training = train(method, captured=True)
    graphs = training.evaluation_graphs
    assert figures == again
    seen = [(len(each.captured), sorted(each.taken.values())) for each in graphs.graphs.values()]
    if name in SETTLING:
        assert "with methods: not captured: a number of the device is read" in graphs.told() and seen[0][0] == 1
    else:
        # 16 images in batches of 3: five of one shape an epoch, and a last one that comes three times in all
        assert seen == 3 * [(1, [3, 4])]
        assert graphs.told() == "test, with methods, rows: captured as CUDA graphs"
    assert training.graphs.captured
    if name is not None:
        assert plain.regularized.state() == training.regularized.state()


def test_a_last_batch_of_another_shape_is_captured_when_it_has_come_often_enough():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "EPOCHS", WARM + 2)
        (figures, _), (again, training) = (train(None, captured, (PLAIN,)) for captured in (False, True))
    assert figures == again and len(training.evaluation_graphs.graphs["test"].captured) == 2


class Deciding(Tiny):
    """Read a number of the device in the count."""

    def count(self, output, targets):
        if float(output.max()) > 0:
            return super().count(output, targets)
        return super().count(-output, targets)


def test_an_evaluation_that_reads_a_number_is_not_captured_and_the_others_are():
    other = Evaluation("other", split="test", count=Tiny().count)
    (figures, _), (again, training) = (
        train(None, captured, (PLAIN, other), task=Deciding) for captured in (False, True)
    )
    assert figures == again
    assert training.evaluation_graphs.told() == (
        "test: not captured: a number of the device is read in Python; other: captured as CUDA graphs"
    )


def test_figures_are_not_written_over_by_the_next_replay():
    # one batch of each kind: sums of the last replay are those that are kept
    figures = [train(None, captured, (EVALUATIONS[2],), batch=4)[0] for captured in (False, True)]
    assert figures[0] == figures[1] and len({repr(one) for one in figures[0]}) == EPOCHS


def test_where_a_reading_is_due_nothing_is_replayed():
    (figures, _), (again, training) = (train(None, captured, watched=True) for captured in (False, True))
    assert figures == again
    # five steps an epoch and a reading every seven: none falls due at an epoch's end
    assert training.evaluation_graphs.told().endswith("captured as CUDA graphs")
    _, training = train(None, True, watched=True)
    training.watch.steps = 7
    before = {name: sum(one.taken.values()) for name, one in training.evaluation_graphs.graphs.items()}
    evaluate(training, PLAIN, training.task.data("test"))
    assert before == {name: sum(one.taken.values()) for name, one in training.evaluation_graphs.graphs.items()}


def test_weights_that_have_moved_since_the_capture_are_read():
    _, training = train(None, True, (PLAIN,))
    before = evaluate(training, PLAIN, training.task.data("test"))
    with torch.no_grad():
        for parameter in training.model.parameters():
            nn.init.zeros_(parameter)
    after = evaluate(training, PLAIN, training.task.data("test"))
    # all classes are equally likely
    assert after["loss"] == pytest.approx(torch.tensor(4.0).log().item()) and before != after
