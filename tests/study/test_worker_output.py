"""What workers print stands in the display, each line once, and a worker that is stopped while it works ends in
order."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from small_studies import Silent, carry, study_of
from test_engines import Engine, headwise, lines, wait_for

from headwise.lab.engines.worker import WorkerOutput
from headwise_verdict.files.errors import StudyError

PLACE = Path(__file__).with_name("talking_tasks.py")
# of a command, whose task imports its neighbor
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(PLACE.parent), os.environ.get("PYTHONPATH", "")])}
OTHER = "baseline | learning_rate=0.01"


class Heard(Silent):
    """Keep what workers print."""

    def hear(self, order, event):
        super().hear(order, event)
        if event["event"] == "output":
            self.say(event["text"])


def carried_out(task, out, jobs=2, **settings):
    listener = Heard()
    with Engine(jobs) as engine:
        carry(study_of(f"{PLACE}:{task}", (OTHER,), 2, **settings), out, engine, listener)
    return listener.said


@pytest.mark.grid
def test_what_a_task_prints_comes_through_the_display_once(tmp_path, capfd):
    said = carried_out("Talking", tmp_path)
    # where each arm is tried, a line comes once; runs that print it later add nothing
    assert said[1:5] == ["said with Python", "100%|####", "said past Python", "twice"]
    assert said[0].startswith("trying 2 arms") and said[5].startswith("plan:") and "twice" not in said[5:]
    assert capfd.readouterr() == ("", "")


@pytest.mark.grid
def test_what_transformers_reports_while_it_loads_comes_once_and_without_bars(tmp_path, capfd, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 8,
    }
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    said = "\n".join(carried_out("Loading", tmp_path / "out", source=str(tmp_path / "model")))
    assert said.count("classifier.weight") == 1 and "Loading weights" not in said
    assert capfd.readouterr() == ("", "")
    # this process is the user's own
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ


@pytest.mark.grid
def test_the_last_words_of_a_worker_come_before_its_replacement(tmp_path):
    listener = Heard()
    with Engine(1) as engine, pytest.raises(StudyError, match="ended with exit code -6"):
        carry(study_of(f"{PLACE}:Aborting"), tmp_path, engine, listener)
    assert listener.said[0] == "no such device: the process ends"
    assert listener.said[1].startswith("a worker ended with exit code -6")


def test_a_line_is_whole_before_it_is_shown():
    reader, writer = multiprocessing.Pipe(duplex=False)
    output = WorkerOutput(reader)
    os.write(writer.fileno(), b"be")
    assert output.lines() == []
    os.write(writer.fileno(), b"gun\n\n 1%\r99%\r\n\x1b[1A\x1b[2Kabove\n\xffend")
    assert output.lines() == ["begun", "99%", "above"]
    writer.close()
    assert output.lines() == ["\N{REPLACEMENT CHARACTER}end"] and output.ended


@pytest.mark.grid
def test_workers_that_are_stopped_while_they_work_leave_no_semaphore(tmp_path):
    out = tmp_path / "out"
    command = ("compare", "--task", f"{PLACE}:FailingBeside", "--method", OTHER, "--jobs", "2", "--seeds", "1")
    stopped = headwise(*command, "--out", str(out), env=ENVIRONMENT)
    wait_for(lambda: lines(out) >= 2)
    stopped.send_signal(signal.SIGINT)
    _, said = stopped.communicate(timeout=300)
    assert stopped.returncode == 130 and "semaphore" not in said and len(said.strip().splitlines()) == 1, said


@pytest.mark.grid
def test_a_failure_ends_the_other_workers_in_order(tmp_path):
    out = tmp_path / "out"
    failing = ("--method", "baseline | learning_rate=0.5", "--set", f"source={out}", "--set", "epochs=1000")
    command = ("compare", "--task", f"{PLACE}:FailingBeside", *failing, "--jobs", "2", "--seeds", "1")
    # its task waits for another run
    failed = headwise(*command, "--no-rehearsal", "--out", str(out), env=ENVIRONMENT)
    _, said = failed.communicate(timeout=300)
    assert failed.returncode == 1 and "is full" in said, said
    assert "semaphore" not in said
