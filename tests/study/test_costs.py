"""What a run costs, and what a clock may change: memory that repeats, time without readings, an epoch that diverges."""

import sys
import time
import types

import pytest
import torch
from small_studies import all_numbers, carry, orders, tiny_study

import headwise
from headwise.lab.training import train
from headwise.lab.training.execution import execute
from headwise.lab.training.measuring import FIRST_MEASURED, MemoryOfAStep, counter, peak_of
from headwise.lab.training.outcome import seconds_per_step
from headwise_verdict.files.durable import read_lines
from headwise_verdict.results.records import EpochLine

# seconds that a reading is made to take
SLEEP = 0.1


def test_memory_is_the_same_whatever_the_process_held_before(tmp_path, monkeypatch):
    study = tiny_study(epochs=1)
    (first,), (second,) = orders(study, tmp_path / "a"), orders(study, tmp_path / "b")
    alone = execute(first, lambda event: None).metrics["cost/peak_memory_bytes"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
        left = [torch.empty(50_000)]
    step, taken = train._step, [0]

    def second_step_frees(*arguments):
        taken[0] += 1
        if taken[0] == 2:
            # as the garbage of an earlier run goes in the middle of a step
            left.clear()
        return step(*arguments)

    monkeypatch.setattr(train, "_step", second_step_frees)
    assert execute(second, lambda event: None).metrics["cost/peak_memory_bytes"] == alone
    assert not left


@pytest.mark.parametrize("method", [None, "SigmaReparam()", "DropKey(p=0.1)", "EntropyPenalty(strength=0.1)"])
def test_memory_is_read_from_the_allocations_alone_and_is_the_same_as_with_operators(method):
    import headwise

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    tokens = torch.randn(4, 9, 16)
    handle = headwise.regularize(layer, *headwise.parse(method)) if method else None

    def step():
        loss = layer(tokens).square().mean()
        (loss + handle.loss() if handle else loss).backward()
        layer.zero_grad()
        if handle:
            handle.after_step()

    step()
    memory = MemoryOfAStep()
    with memory.measured(FIRST_MEASURED, torch.device("cpu")):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    roots = profile.profiler.kineto_results.experimental_event_tree()
    assert memory.peak == peak_of(roots) > 4 * 9 * 16 * 4
    # operators are recorded again afterwards
    assert any(event.name.startswith("aten::") for event in roots)


@pytest.mark.grid
def test_measuring_memory_keeps_none_of_it():
    import psutil

    def measure():
        memory = MemoryOfAStep()
        with memory.measured(FIRST_MEASURED, torch.device("cpu")):
            for _ in range(20):
                torch.nn.functional.gelu(torch.randn(64, 64)).sum()
        return memory.peak

    assert len({measure() for _ in range(300)}) == 1
    before = psutil.Process().memory_info().rss
    for _ in range(1000):
        measure()
    # torch's own class around the profiler keeps 3 MiB of these
    assert psutil.Process().memory_info().rss - before < 2**20


def test_readings_enter_neither_time_nor_memory(tmp_path, monkeypatch):
    from headwise.health.watching.watch import Watch

    study, take, taken = tiny_study(epochs=2), Watch._take, []
    (plain,) = carry(study, tmp_path / "plain")

    def take_slowly(self):
        time.sleep(SLEEP)
        taken.append(self)
        return take(self)

    monkeypatch.setattr(Watch, "_take", take_slowly)
    (watched,) = carry(study, tmp_path / "watched", watch=True)
    assert (plain["watched"], watched["watched"]) == (False, True)
    (folder,) = (tmp_path / "watched" / "runs").iterdir()
    lines = [EpochLine.model_validate(line) for line in read_lines(folder / "metrics.jsonl")]
    # every reading's sleep was counted apart, and what was counted apart is in no step's time
    assert taken and sum(line.apart.seconds for line in lines) >= len(taken) * SLEEP
    assert watched["metrics"]["cost/seconds_per_step"] == pytest.approx(seconds_per_step(lines))
    assert watched["metrics"]["cost/peak_memory_bytes"] == plain["metrics"]["cost/peak_memory_bytes"]


@pytest.mark.parametrize(
    ("history", "seconds"),
    [
        ([{"seconds": 5.0, "steps": 5}, {"seconds": 20.0, "steps": 5}, {"seconds": 10.0, "steps": 5}], 2.0),
        ([{"seconds": 9.0, "steps": 5, "apart": {"steps": 2, "seconds": 6.0}}], 1.0),
        # an epoch of nothing but readings says nothing, unless there is no other
        ([{"seconds": 9.0, "steps": 1, "apart": {"steps": 1, "seconds": 9.0}}, {"seconds": 1.0, "steps": 1}], 1.0),
        ([{"seconds": 9.0, "steps": 1, "apart": {"steps": 1, "seconds": 9.0}}], 9.0),
    ],
)
def test_the_time_of_a_step_leaves_out_what_was_counted_apart(history, seconds):
    lines = [EpochLine(epoch=n, **line) for n, line in enumerate(history, 1)]
    assert seconds_per_step(lines) == pytest.approx(seconds)


def test_what_is_written_of_a_diverged_epoch_does_not_depend_on_the_clock(tmp_path, monkeypatch):
    study = tiny_study("Exploding")
    count = sys.modules[type(study.task).__module__].count

    def written(out):
        count[0] = 0
        torch.manual_seed(0)
        carry(study, out)
        ((lines, _),) = all_numbers(out).values()
        return lines

    once = written(tmp_path / "looked at never")
    clock = iter(range(10**6))
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: float(next(clock))))
    assert written(tmp_path / "looked at after every step") == once
    assert (once[-1]["step"], once[-1]["steps"]) == (6, 2)


def test_fused_attention_of_the_cpu_counts_as_the_matrices_it_stands_for():
    from torch.nn import functional as F

    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    with counter() as fused:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    with counter() as explicit:
        (torch.softmax(q @ k.mT / 2, -1) @ v).sum().backward()
    # the fused backward makes the logits again
    again = 2 * 2 * 3 * 5 * 5 * 4
    assert fused.get_total_flops() == explicit.get_total_flops() + again == 7 * again


@pytest.mark.parametrize(
    "method",
    [
        headwise.AttentionNormPenalty(),
        headwise.EntropyPenalty(),
        headwise.AttentionSink(),
        headwise.AttentionDropout(),
        headwise.DropKey(),
        headwise.QKClip(),
    ],
    ids=lambda method: type(method).__name__,
)
def test_no_method_has_fewer_operations_than_the_attention_it_takes_the_place_of(method):
    def operations(*methods):
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        net = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        x = torch.randn(2, 24, 32)
        handle = headwise.regularize(net, *methods, example=x, allow_none=not methods)
        with counter() as counted:
            (net(x).square().mean() + handle.loss()).backward()
        return counted.get_total_flops()

    logits = 2 * 2 * 4 * 24 * 24 * 8
    assert operations(method) == operations() + (logits if isinstance(method, headwise.QKClip) else 0)
