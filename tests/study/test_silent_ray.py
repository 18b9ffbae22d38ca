"""The Ray engine where Ray says nothing: lost runs are sent again, then told by name, and nothing is waited for without
end."""

import sys

import pytest
from small_studies import orders, tiny_study
from stand_in_for_ray import RayError, StandIn

from headwise.lab.engines import ray_cluster, remote_runs
from headwise.lab.engines.local import REPLACEMENTS
from headwise.lab.engines.ray_cluster import RayEngine, _heartbeat_path
from headwise.lab.engines.remote_runs import Heartbeat, beating


@pytest.fixture
def engine_on(monkeypatch):
    """Return a function that starts an engine on a stand-in, with short waits."""
    for name, seconds in {"GLANCE": 0.005, "SILENCE": 0.05, "LONGEST_FAREWELL": 0.05}.items():
        monkeypatch.setattr(ray_cluster, name, seconds, raising=False)

    def start(ray):
        monkeypatch.setitem(sys.modules, "ray", ray)
        return RayEngine(None)

    return start


def carried_out(engine, out):
    (order,) = orders(tiny_study(), out)
    out.mkdir()
    engine.submit(order)
    return [event for event in engine.events() if event["run"] == order.identity]


@pytest.mark.parametrize(
    ("begins", "why"), [(True, "no sign of life from its worker"), (False, "although the cluster has room")]
)
def test_a_run_that_is_silent_is_sent_again_and_then_told(tmp_path, engine_on, begins, why):
    ray = StandIn(lambda order: begins and _heartbeat_path(order).touch())
    told = carried_out(engine_on(ray), tmp_path / "out")
    assert [event["event"] for event in told] == ["note"] * REPLACEMENTS + ["failed"]
    assert all("baseline, seed 0" in event["text"] and why in event["text"] for event in told[:-1])
    assert why in told[-1]["reason"] and "lost it 3 times" in told[-1]["reason"]
    assert len(ray.orders) == REPLACEMENTS + 1 and ray.cancelled == list(ray.orders)


def test_a_run_that_waits_for_its_turn_on_a_busy_cluster_is_left_in_peace(tmp_path, engine_on):
    ray = StandIn(free=0)
    engine = engine_on(ray)
    (order,) = orders(tiny_study(), tmp_path)
    engine.submit(order)
    (reference,) = ray.orders
    looked = ray.wait

    def wait(references, timeout):
        if ray.looks == 50:
            ray.answers[reference] = [{"event": "done", "result": 7}]
        return looked(references, timeout)

    ray.wait = wait
    assert list(engine.events()) == [{"event": "done", "result": 7, "run": order.identity}]
    assert not ray.cancelled


def test_what_ray_tells_of_a_death_sends_the_run_again(tmp_path, engine_on):
    ray = StandIn()
    engine = engine_on(ray)
    (order,) = orders(tiny_study(), tmp_path)
    engine.submit(order)
    ray.answers[next(iter(ray.orders))] = RayError("the worker died unexpectedly\nask the dashboard")
    ray.begin = lambda order: ray.answers.update({list(ray.orders)[-1]: [{"event": "done", "result": 7}]})
    note, done = engine.events()
    assert note["text"].endswith("the worker died unexpectedly; it resumes from its last checkpoint")
    assert done["event"] == "done" and not ray.cancelled


def test_a_cluster_that_cannot_be_left_does_not_hold_the_command(tmp_path, engine_on):
    ray = StandIn()
    engine = engine_on(ray)
    (order,) = orders(tiny_study(), tmp_path)
    engine.submit(order)
    engine.close()
    assert ray.cancelled == list(ray.orders) and not (tmp_path / ".ray").exists()


def test_heartbeat_path_are_heard_as_long_as_a_worker_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_runs, "BEAT", 0.001)
    path = tmp_path / "signs" / "run"
    heartbeat = Heartbeat(path)
    assert not heartbeat.began
    with beating(path):
        while not path.exists():
            pass
        before = heartbeat.silence()
        assert heartbeat.began and before >= 0
        first = heartbeat._last
        while heartbeat.silence() and heartbeat._last == first:
            pass
    assert not path.exists() and heartbeat.began
    assert not Heartbeat(path).began
