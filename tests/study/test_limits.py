"""Limits of the local engine: how often a worker is replaced, and which printed lines are told."""

from collections import deque
from types import SimpleNamespace

import pytest

from headwise.lab.engines import local
from headwise.lab.engines.local import LocalEngine
from headwise_verdict.files.errors import StudyError


def ended(order):
    """Return a worker that was killed while it carried out an order."""
    process = SimpleNamespace(join=lambda: None, exitcode=-9)
    closed = SimpleNamespace(close=lambda: None)
    return SimpleNamespace(process=process, pipe=closed, output=SimpleNamespace(reader=closed), order=order)


def order_of(identity):
    return SimpleNamespace(identity=identity, configuration=SimpleNamespace(arm=identity, seed=0))


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(LocalEngine, "_start", lambda self, number: None)
    return LocalEngine(1)


def test_a_run_loses_as_many_workers_as_may_be_replaced(engine):
    one, other = order_of("one"), order_of("other")
    # another run's losses are its own
    for order in [other, *[one] * local.REPLACEMENTS, other]:
        engine._workers[0] = ended(order)
        (note,) = engine._replace(0)
        assert "its run resumes" in note["text"] and note["run"] == order.identity
        assert engine._waiting.popleft() is order
    engine._workers[0] = ended(one)
    with pytest.raises(StudyError, match=rf"one, seed 0, ended with exit code -9 {local.REPLACEMENTS + 1} times"):
        list(engine._replace(0))
    assert engine._waiting == deque()


def test_an_idle_worker_is_replaced_without_a_word(engine):
    for _ in range(local.REPLACEMENTS + 2):
        engine._workers[0] = ended(None)
        assert not list(engine._replace(0)) and not engine._waiting


def test_a_line_that_several_runs_print_is_told_for_the_first(engine):
    def told(order, *lines):
        output = SimpleNamespace(lines=lambda last: list(lines))
        worker = SimpleNamespace(order=order, output=output)
        return [(event["run"], event["text"]) for event in engine._output(worker, last=False)]

    one, other = order_of("one"), order_of("other")
    assert told(None, "early") == []
    assert told(one, "loading", "loss 1") == [("one", "loading"), ("one", "loss 1")]
    assert told(other, "loading", "loss 2") == [("other", "loss 2")]
    # a run may say the same again
    assert told(one, "loading") == [("one", "loading")]
