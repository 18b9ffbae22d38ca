"""Compiled training steps: the numbers of the plain loop, the runs of a study, and what cannot be compiled."""

import functools
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from grids import part_of_grid
from small_studies import PLACE, carry, numbers, orders, study_of, tiny_study
from test_resume import stopped_after
from test_step_graphs import strong, train
from tiny_task import Tiny
from torch._dynamo.utils import counters

import headwise
from headwise.attend import methods as shelf
from headwise.lab.experiments.configuration import RunConfiguration
from headwise.lab.studies.vision_transformer import VisionTransformer
from headwise.lab.training import compiled_forward, rehearsal
from headwise.lab.training.compiled_forward import CompiledForward, compiled
from headwise.lab.training.train import Training, train_epoch
from headwise.study import Task
from headwise_verdict.files.durable import read_lines
from headwise_verdict.files.errors import StudyError

BAD = PLACE.replace("tiny_task.py", "tasks_that_do_not_compile.py")


@pytest.fixture(autouse=True)
def code_kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def nothing_fused(monkeypatch):
    """Compile to the operators of the plain loop, which takes no C++ compiler."""
    monkeypatch.setattr(compiled_forward, "CompiledForward", functools.partial(CompiledForward, "eager"))


def pair(name, **options):
    """Train by the plain loop and compiled; return both trainings, equal but for rounding."""
    losses, state, plain = train(strong(name), captured=False, **options)
    again, others, training = train(strong(name), captured=False, compiled=True, **options)
    # Not to the bit: the compiled loop may add up in another order.
    torch.testing.assert_close(again, losses, rtol=1e-5, atol=0)
    for (label, _), ours, theirs in zip(training.model.named_parameters(), others, state, strict=True):
        # Gradients of keys' biases are zero but for rounding, which Adam scales to whole steps.
        if not label.endswith("qkv.bias"):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    # one for each size of batches
    assert counters["stats"]["unique_graphs"] == 2
    return plain, training


@pytest.mark.parametrize("name", part_of_grid([None, *shelf.__all__], ["DropHead"]))
def test_compiled_steps_give_the_numbers_of_the_plain_loop(name):
    plain, training = pair(name)
    if name is not None:
        assert plain.regularized.state() == training.regularized.state()


@pytest.mark.grid
def test_a_schedule_is_not_compiled_anew_in_each_step():
    def ramp(handle):
        handle.set(headwise.DropHead, p=headwise.Ramp(start=0.0, end=0.5, steps=10))

    pair("DropHead", before=ramp)


@pytest.mark.grid
def test_a_step_that_is_read_is_not_compiled_and_shows_the_same_figures():
    plain, training = pair("DropKey", watched=True)
    first, second = ([{**row, "time": 0} for row in run.watch.records()] for run in (plain, training))
    assert len(first) > 100
    assert repr(first) == repr(second)
    for run in (plain, training):
        run.watch.remove()


def test_a_compiled_run_is_another_run_and_a_plain_one_keeps_its_identity():
    plain = {"study": "s", "task": "t", "settings": {"epochs": 1}, "arm": "baseline", "seed": 0}
    assert RunConfiguration(**plain).identity == "a03cfec01548"
    assert RunConfiguration(**plain, compile="off").identity == "a03cfec01548"
    assert RunConfiguration(**plain, compile="step").identity != "a03cfec01548"


@pytest.mark.usefixtures("nothing_fused")
def test_a_compiled_study_is_recorded_goes_on_where_it_stopped_and_mixes_with_no_other(tmp_path, monkeypatch):
    study = tiny_study(epochs=3)
    of_compiled = study.model_copy(update={"compile": "step"})
    (plain,) = carry(study, tmp_path / "plain")
    (order,) = orders(of_compiled, tmp_path / "compiled")
    with monkeypatch.context() as patch:
        # which it takes back itself, and no other
        stopped_after(order, 1, patch)
    (result,) = carry(of_compiled, tmp_path / "compiled")
    assert result["hash"] == order.identity != plain["hash"]
    assert result["config"]["compile"] == "step"
    assert result["hardware"]["steps"] == "compiled"
    assert "compile" not in plain["config"]
    assert "steps" not in plain["hardware"]
    lines, figures = numbers(order.folder)
    expected, others = numbers(tmp_path / "plain" / "runs" / plain["hash"])
    assert lines == expected
    apart = "cost/peak_memory_bytes"
    assert figures["metrics"] | {apart: 0} == others["metrics"] | {apart: 0}
    # of five steps, two compile, in the second epoch again as another process does, and one measures memory
    assert [line["apart"]["steps"] for line in read_lines(order.files.metrics)] == [3, 2, 0]
    with pytest.raises(StudyError, match=r"holds the study tiny with other settings \(compile off\)"):
        carry(of_compiled, tmp_path / "plain")
    with pytest.raises(StudyError, match=r"holds the study tiny with other settings \(compile step\)"):
        carry(study, tmp_path / "compiled")


@pytest.mark.usefixtures("nothing_fused")
def test_what_cannot_be_compiled_is_named_before_anything_trains(tmp_path):
    study = study_of(f"{BAD}:Asking", methods=("DropHead(p=0.2)",)).model_copy(update={"compile": "step"})
    rehearsal._passed.clear()
    told = r"--compile step: torch.compile fails: .* \(line \d+ of tasks_that_do_not_compile\.py, in loss\)"
    with pytest.raises(StudyError, match=told):
        carry(study, tmp_path)
    assert not list(tmp_path.glob("runs/*/metrics.jsonl"))


def test_what_is_not_compiled_is_refused_by_name():
    assert compiled("off", Tiny(), torch.ones(2), 2) is None
    with pytest.raises(StudyError, match="--compile step: several processes train one model"):
        compiled("step", Tiny(), None, 2)
    with pytest.raises(StudyError, match="--compile step: the batches of Tiny differ in length"):
        compiled("step", Tiny(), torch.ones(2), 1)


def test_a_missing_compiler_is_named():
    from torch._inductor import config

    # monkeypatch would delete the setting in place of restoring it
    absent = config.patch({"cpp.cxx": (None, "/nowhere/g++")})
    with absent, pytest.raises(StudyError, match=r"--compile step: .*No working C\+\+ compiler found"):
        CompiledForward()(Tiny(), torch.nn.Linear(2, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.long))


def test_compiled_code_is_kept_in_the_users_cache_unless_a_folder_is_set(tmp_path, monkeypatch):
    import os

    CompiledForward("eager")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CompiledForward("eager")
    here = Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert here.parent == tmp_path / "headwise" / "compiled"
    # code for one instruction set gives wrong numbers with another
    monkeypatch.setattr(compiled_forward, "hardware", lambda: {"processor": "another (AVX2)"})
    CompiledForward("eager")
    other = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert other != here
    assert other.parent == here.parent


class Blog(Task):
    """The blog's model, of one layer, on noise."""

    epochs: int = 1
    batch_size: int = 4

    def model(self):
        return VisionTransformer(classes=10, image_size=32, patch=4, dim=64, depth=1, heads=4, head_dim=16, mlp_dim=128)

    def data(self, split):
        images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        return images, torch.arange(8)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_numbers_of_the_plain_loop_and_reads_its_cache_in_the_next_run():
    found = []
    for which in (False, True, True):
        counters.clear()
        task = Blog()
        torch.manual_seed(0)
        model, examples = task.model(), task.data("train")
        handle = headwise.regularize(model, headwise.DropHead(p=0.3), example=examples[0][:2], seed=3)
        # not Adam: gradients that are zero but for rounding, as those of keys' biases, would move by the whole rate
        training = Training(task, model, torch.optim.SGD(model.parameters(), lr=0.05), Accelerator(cpu=True), 0, handle)
        training.clock.memory.peak = 1
        training.compiled = CompiledForward() if which else None
        losses = torch.tensor([train_epoch(training, examples, epoch, lambda *_: None).loss for epoch in (1, 2)])
        found.append((losses, [parameter.detach() for parameter in model.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-5)
    # the second compiled run has each bit of the first
    assert torch.equal(found[1][0], found[2][0])
    assert all(map(torch.equal, found[1][1], found[2][1]))
    assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
