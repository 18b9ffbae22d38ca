"""The Ray engine: the same numbers as without Ray, also when a node or a worker dies in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_studies import all_numbers, carry, tiny_study
from test_script import carry_script, figures, source  # noqa: F401

pytest.importorskip("ray")


@pytest.mark.parametrize("victim", ["node", "worker"])
@pytest.mark.grid
def test_a_study_on_two_nodes_survives_a_death_with_the_numbers_of_a_local_study(tmp_path, victim):
    script = Path(__file__).with_name("ray_with_a_death.py")
    command = [sys.executable, str(script), str(tmp_path / "ray"), victim]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parent, timeout=300)
    assert "killed 1, ended 4" in done.stdout, done.stdout + done.stderr
    assert "resumes from its last checkpoint" in done.stdout
    carry(tiny_study("Slow", methods=("DropHead(p=0.3)",), seeds=2, pause=0.1), tmp_path / "local")
    assert all_numbers(tmp_path / "ray") == all_numbers(tmp_path / "local")


@pytest.mark.grid
def test_a_cluster_carries_out_a_script(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    script = Path(__file__).with_name("ray_with_a_script.py")
    command = [sys.executable, str(script), str(tmp_path / "ray")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(path.read_text()) for path in tmp_path.glob("ray/runs/*/result.json")]
    assert figures(found) == figures(carry_script(tmp_path / "local"))


def test_a_folder_that_a_node_cannot_see_is_an_error_with_the_remedy(tmp_path):
    from small_studies import orders

    from headwise.lab.engines.ray_cluster import carry_out_remotely

    (order,) = orders(tiny_study(), tmp_path / "elsewhere")
    (event,) = carry_out_remotely(order, str(tmp_path))
    assert event["event"] == "failed"
    assert (
        "elsewhere is not there on this node. Ray needs --out on a file system that all nodes share" in event["reason"]
    )


def test_an_address_where_no_cluster_answers_is_refused_at_once(monkeypatch):
    import socket

    from headwise.lab.engines.ray_cluster import RayEngine
    from headwise_verdict.files.errors import StudyError

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(StudyError, match=f"--ray-address {address}: no Ray cluster answers there .*ray start --head"):
        RayEngine(address)
