"""The Slurm engine: the same numbers as without Slurm, also when jobs are preempted, killed, cancelled or found
again."""

import dataclasses
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import stand_in_for_slurm
from grids import part_of_grid
from small_studies import PLACE, Silent, all_numbers, carry, orders, tiny_study
from test_engines import headwise, lines, wait_for

from headwise.lab.engines.slurm_cluster import SlurmEngine
from headwise.lab.engines.slurm_job import SlurmRun
from headwise.lab.engines.slurm_options import SlurmOptions, read_slurm_options
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError

submitit = pytest.importorskip("submitit")

ARM = "DropHead(p=0.3)"


@pytest.fixture
def local(monkeypatch):
    """Return a function that makes an engine whose jobs are processes of this machine; all are ended after the test."""
    # seconds that submitit waits for a result to come over a slow file system
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 0)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    made = []

    def make(jobs=1, **options):
        made.append(SlurmEngine(SlurmOptions(executor="local", **options), jobs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def tasks(engine):
    """Return the processes that carry out runs, below submitit's own."""
    found = [psutil.Process(int(job.job_id)).children() for job, _ in engine._running.values()]
    return [process for children in found for process in children]


class Interfere(Silent):
    """Send a signal to the first job once its run is in the middle."""

    def __init__(self, number):
        super().__init__()
        self.number, self.engine, self.hit = number, None, []

    def hear(self, order, event):
        super().hear(order, event)
        if event["event"] == "progress" and not self.hit and 2 <= event["epoch"] < event["epochs"]:
            self.hit = tasks(self.engine)
            for process in self.hit:
                process.send_signal(self.number)


@pytest.mark.parametrize("number", part_of_grid([signal.SIGUSR2, signal.SIGKILL], []))
def test_a_job_that_is_preempted_or_killed_goes_on_to_the_same_numbers(tmp_path, local, number):
    study, listener = tiny_study("Slow", methods=(ARM,), pause=0.1), Interfere(number)
    listener.engine = local(jobs=2)
    carry(study, tmp_path / "slurm", listener.engine, listener)
    carry(study, tmp_path / "here")
    assert listener.hit and len(listener.ends) == 2
    assert all_numbers(tmp_path / "slurm") == all_numbers(tmp_path / "here")
    logs = "".join(path.read_text() for path in (tmp_path / "slurm" / "slurm").glob("*.out"))
    if number == signal.SIGUSR2:
        # the same job was begun twice
        assert "Requeued job" in logs and not listener.said
    else:
        assert any("Its run resumes from its last checkpoint in another job" in text for text in listener.said)


# submitit leaves the files of this executor's logs open
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_jobs_of_this_process_give_the_same_numbers_and_the_limit_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("headwise.lab.engines.remote_runs.worker_environment", lambda threads: {})
    study, engine, out = tiny_study(methods=(ARM,), seeds=2), SlurmEngine(SlurmOptions(executor="debug"), 3), []

    class Count(Silent):
        def hear(self, order, event):
            super().hear(order, event)
            out.append(len(engine._running) + 1)

    carry(study, tmp_path / "debug", engine, Count())
    carry(study, tmp_path / "here")
    assert all_numbers(tmp_path / "debug") == all_numbers(tmp_path / "here") and max(out) <= 3


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put a stand-in for Slurm's commands on the path and give the folder of its state."""
    state = stand_in_for_slurm.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    yield state
    for path in state.glob("*.state"):
        (state / f"{path.stem}.cancel").touch()


def pids(state):
    return [int(line) for path in state.glob("*.begun") for line in path.read_text().split()]


@pytest.mark.grid
def test_an_array_of_slurm_is_queued_again_found_again_and_cancelled(tmp_path, cluster):
    study, out = tiny_study("Slow", methods=(ARM,), pause=0.1), tmp_path / "out"
    options = read_slurm_options(("partition=gpu,timeout_min=7",))

    class Leave(Silent):
        """Preempt the first run in the middle, and leave as a command that is killed does, once it goes on."""

        def hear(self, order, event):
            super().hear(order, event)
            if event["event"] == "progress" and event["epoch"] >= 2 and not list(cluster.glob("*.hit")):
                (cluster / "a.hit").touch()
                job, _ = first._running[order.identity]
                (leader,) = (cluster / f"{job.job_id}.begun").read_text().split()
                (process,) = psutil.Process(int(leader)).children()
                process.send_signal(signal.SIGUSR2)
                raise RuntimeError("the terminal is gone")

    first = SlurmEngine(options, jobs=1)
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        carry(study, out, first, Leave())
    script = (cluster / "100.sh").read_text()
    assert all(f"#SBATCH --{flag}\n" in script for flag in ("array=0-1%1", "partition=gpu", "time=7", "signal=USR2@90"))
    second = SlurmEngine(options, jobs=1)
    carry(study, out, second)
    carry(study, tmp_path / "here")
    assert all_numbers(out) == all_numbers(tmp_path / "here")
    # the second command queued nothing, and one job was begun twice
    assert [path.name for path in cluster.glob("*.sh")] == ["100.sh"] and len(pids(cluster)) == 3
    third = SlurmEngine(options)
    for order in orders(study, tmp_path / "other"):
        third.submit(order)
    third._queue_runs()
    wait_for(lambda: len(pids(cluster)) == 5)
    third.close()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids(cluster)))
    assert (tmp_path / "other" / "slurm" / "jobs.json").read_text().strip() == "{}"


@pytest.mark.grid
def test_ctrl_c_cancels_the_jobs_and_their_runs_can_go_on(tmp_path):
    out = tmp_path / "out"
    command = ["compare", "--task", f"{PLACE}:Slow", "--seeds", "1", "--method", ARM, "--engine", "slurm"]
    command += ["--slurm", "executor=local", "--jobs", "1", "--out", str(out)]
    stopped = headwise(*command)
    wait_for(lambda: lines(out) >= 3, seconds=400)
    family = psutil.Process(stopped.pid).children(recursive=True)
    assert len(family) >= 2
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=300)
    assert stopped.returncode == 130 and f"The same command resumes from {out}" in said, said
    wait_for(lambda: not psutil.wait_procs(family, timeout=0)[1])
    study = tiny_study("Slow", methods=(ARM,)).model_copy(update={"name": "Slow"})
    for order in orders(study, out):
        execute(order, lambda event: None)
    carry(study, tmp_path / "whole")
    assert all_numbers(out) == all_numbers(tmp_path / "whole")


def test_a_run_that_gets_no_further_is_given_up_with_the_remedy(tmp_path):
    (order,) = orders(tiny_study(), tmp_path)
    run = SlurmRun.of(order).again().again()
    with pytest.raises(StudyError, match=r"3 jobs in a row were stopped before one more epoch.*timeout_min.*mem_gb"):
        run.again()
    order.folder.mkdir(parents=True)
    (order.folder / "metrics.jsonl").write_text('{"epoch": 1}\n')
    assert (run.again().kept, run.again().idle) == (1, 0)


def test_a_folder_that_a_node_cannot_see_is_an_error_with_the_remedy(tmp_path):
    (order,) = orders(tiny_study(), tmp_path / "elsewhere")
    (event,) = SlurmRun.of(order)()
    assert event["event"] == "failed" and "elsewhere is not there on this node. Slurm needs --out" in event["reason"]


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (
            ("partition=gpu,gpus_per_node=1,timeout_min=90",),
            {"slurm_partition": "gpu", "gpus_per_node": 1, "timeout_min": 90},
        ),
        (
            ("nodelist=a1,a2,mem_gb=1.5", "exclusive=true"),
            {"slurm_nodelist": "a1,a2", "mem_gb": 1.5, "slurm_exclusive": True},
        ),
        (("reservation=r",), {"slurm_additional_parameters": {"reservation": "r"}}),
        (("setup=module load a; b",), {"slurm_setup": ["module load a; b"], "local_setup": ["module load a; b"]}),
        (("gres=gpu:a100:1,exclusive=false",), {"slurm_gres": "gpu:a100:1"}),
    ],
)
def test_options_become_what_submitit_takes(tmp_path, texts, found):
    given = read_slurm_options(texts).parameters("cpu", 2)
    usual = {"name": "headwise", "timeout_min": 60, "cpus_per_task": 2, "slurm_signal_delay_s": 90}
    assert given == usual | found
    submitit.AutoExecutor(tmp_path, cluster="local").update_parameters(**given)
    assert read_slurm_options(()).parameters("cuda", 1)["gpus_per_node"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time=5", r"there is no option 'time'. Did you mean 'timeout_min'\?"),
        ("timeout_min=soon", "write a whole number above 0"),
        ("timeout_min=0", "a whole number above 0"),
        ("mem_gb=inf", "a number above 0"),
        ("partition", "a value is missing. Write partition=VALUE"),
        ("exclusive=maybe", "true or false"),
        ("account=a,account=b", "account is given twice"),
        ("executor=ray", "executors are slurm, local, debug"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(text, message):
    with pytest.raises(StudyError, match=message):
        read_slurm_options((text,))


def test_the_guide_names_every_option_and_no_other():
    rows = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text().splitlines()
    named = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {one.name for one in dataclasses.fields(SlurmOptions)}


def test_the_device_is_that_of_the_jobs_and_not_of_the_machine_that_submits():
    from headwise.lab.comparing.choosing import _device_of_jobs
    from headwise.lab.comparing.request import Request

    def device(*texts, asked=None):
        return _device_of_jobs(Request(engine="slurm", slurm=texts, device=asked))

    assert [device(), device("gpus_per_node=1"), device("gres=gpu:1"), device(asked="cuda")] == ["cpu", *["cuda"] * 3]
    assert device("gpus_per_node=1", asked="cpu") == "cpu"


def test_what_is_missing_is_told_by_name(monkeypatch):
    with pytest.raises(StudyError, match=r"there is no sbatch here.*--slurm executor=local"):
        SlurmEngine(SlurmOptions())
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(StudyError, match=r"needs submitit, which is not installed: pip install 'headwise\[slurm\]'"):
        SlurmEngine(SlurmOptions())
