"""A watched run that is stopped and goes on leaves the readings and alerts of one that never was, in their order."""

import json

import pytest
from grids import part_of_grid
from small_studies import numbers, orders, tiny_study
from test_resume import stopped_after

from headwise.health.watching import watch
from headwise.health.watching.rules import Thresholds
from headwise.lab.training.execution import execute

EPOCHS = 3
ARM = "DropHead(p=0.3) + NeuTRENO(strength=0.4)"


def order_in(folder, task="Tiny", **settings):
    return orders(tiny_study(task, methods=(ARM,), epochs=EPOCHS, **settings), folder, watch=True)[1]


def content(order):
    return (order.folder / "health.jsonl").read_bytes()


def steps(order):
    return {json.loads(line)["step"] for line in content(order).splitlines()}


@pytest.fixture
def alarming():
    """Let figures of a tiny model pass their limits, some from the first reading on and some in the middle."""
    limits = Thresholds(max_logit=0.65, token_cosine=0.4, entropy_share=0.983)
    # one of its own: `stopped_after` undoes what the test's own one changed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "Thresholds", type("Limits", (Thresholds,), {"__new__": lambda cls: limits}))
        yield


@pytest.mark.parametrize("stop", part_of_grid(range(1, EPOCHS + 1), (2,)))
def test_alerts_and_readings_of_a_resumed_run_are_those_of_a_whole_one(tmp_path, monkeypatch, alarming, stop):
    whole, stopped = order_in(tmp_path / "whole"), order_in(tmp_path / "stopped")
    execute(whole, lambda event: None)
    told = {json.loads(line)["step"] for line in content(whole).splitlines() if b'"alert"' in line}
    assert told > {0} and max(told) > 10
    stopped_after(stopped, stop, monkeypatch)
    execute(stopped, lambda event: None)
    assert content(stopped) == content(whole)
    assert numbers(stopped.folder) == numbers(whole.folder)


def without_the_last_reading(lines):
    last = json.loads(lines[-1])["step"]
    return [line for line in lines if json.loads(line)["step"] < last]


@pytest.mark.parametrize(
    "harm",
    [
        without_the_last_reading,
        *(
            pytest.param(harm, marks=pytest.mark.grid)
            for harm in (lambda lines: lines[:-1], lambda lines: lines[::-1], lambda lines: [])
        ),
    ],
)
def test_readings_that_the_checkpoint_knows_are_not_lost_in_silence(tmp_path, monkeypatch, harm):
    whole, stopped = order_in(tmp_path / "whole"), order_in(tmp_path / "stopped")
    execute(whole, lambda event: None)
    stopped_after(stopped, 2, monkeypatch)
    path, said = stopped.folder / "health.jsonl", []
    path.write_text("".join(harm(path.read_text().splitlines(keepends=True))))
    execute(stopped, lambda event: said.append(event.get("text", "")))
    assert any("health.jsonl lacks readings that the checkpoint knows; the run starts again" in text for text in said)
    assert content(stopped) == content(whole)
    assert numbers(stopped.folder) == numbers(whole.folder)


def test_a_checkpoint_of_a_version_that_marked_no_readings_is_gone_on_from(tmp_path, monkeypatch):
    import headwise.lab.training.execution as run

    whole, stopped = order_in(tmp_path / "whole"), order_in(tmp_path / "stopped")
    execute(whole, lambda event: None)
    with pytest.MonkeyPatch.context() as older:
        older.setattr(run, "mark", lambda *arguments: None)
        stopped_after(stopped, 2, monkeypatch)
        assert run.load_state(stopped.folder, "", pytest.fail)[0].readings is None
    said = []
    execute(stopped, lambda event: said.append(event.get("text", "")))
    assert content(stopped) == content(whole) and not any("health" in text for text in said)


def test_a_diverged_run_holds_no_reading_beyond_its_divergence(tmp_path):
    order = orders(tiny_study("Exploding", watch_every=2), tmp_path, watch=True)[0]
    result = execute(order, lambda event: None)
    assert result.status == "diverged" and steps(order) == set(range(0, result.divergence.step, 2))
