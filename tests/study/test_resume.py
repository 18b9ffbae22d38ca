"""A run can be left at any moment and goes on to the same numbers: killed, cut, torn, full disk."""

import contextlib
import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from grids import part_of_grid
from small_studies import Silent, all_numbers, carry, numbers, orders, tiny_study

from headwise.lab.training.checkpoint import PREVIOUS, RunCheckpoint, load_checkpoint, save_checkpoint
from headwise.lab.training.execution import execute
from headwise_verdict.files import durable
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.digests import CHECKPOINT

ARM = "DropHead(p=0.3) + NeuTRENO(strength=0.4)"


def in_a_child(order, seconds=None):
    """Carry out an order in a forked process, killed with SIGKILL after `seconds`; tell whether it was killed."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            execute(order, lambda event: None)
            os._exit(0)
        os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def weights(order):
    return load_checkpoint(order.folder, pytest.fail).tensors


def stopped_after(order, epochs, monkeypatch):
    """Carry out an order up to the end of an epoch, as a process that dies there."""
    import headwise.lab.training.execution as run

    kept, save = [0], run.save_checkpoint

    def save_and_stop(*arguments):
        save(*arguments)
        kept[0] += 1
        if kept[0] == epochs:
            raise KeyboardInterrupt

    monkeypatch.setattr(run, "save_checkpoint", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        execute(order, lambda event: None)
    monkeypatch.undo()


@pytest.mark.grid
def test_twenty_kills_at_random_moments_change_no_number(tmp_path):
    study = tiny_study(methods=(ARM,), epochs=8)
    order = orders(study, tmp_path / "whole")[1]
    begin = time.perf_counter()
    in_a_child(order)
    whole, kills = time.perf_counter() - begin, 0
    chance = random.Random(0)
    for attempt in range(100):
        broken = orders(study, tmp_path / f"broken {attempt}")[1]
        while kills < 20 and in_a_child(broken, chance.uniform(0.02, 0.4 * whole)):
            kills += 1
        in_a_child(broken)
        assert numbers(broken.folder) == numbers(order.folder)
        assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(order).items())
        if kills == 20:
            break
    assert kills == 20


def trained_epochs(monkeypatch):
    """Return the list that fills with the epochs that are really trained."""
    import headwise.lab.training.execution as run

    trained, train = [], run.train_epoch
    monkeypatch.setattr(run, "train_epoch", lambda *a: trained.append(a[2]) or train(*a))
    return trained


def test_a_run_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    study = tiny_study(methods=(ARM,), epochs=4, loss_goal=1.35, divergence_smoothing=0.8)
    order, other = orders(study, tmp_path / "a")[1], orders(study, tmp_path / "b")[1]
    stopped_after(order, 2, monkeypatch)
    trained = trained_epochs(monkeypatch)
    execute(order, lambda event: None)
    assert trained == [3, 4]
    execute(other, lambda event: None)
    assert numbers(order.folder) == numbers(other.folder)


def test_a_run_does_not_go_on_with_the_moments_of_other_parameters(tmp_path, monkeypatch):
    import headwise.lab.training.execution as run

    order, build = orders(tiny_study(methods=(ARM,), epochs=4), tmp_path)[1], run.build_optimizer

    def in_another_order(*arguments, **options):
        optimizer = build(*arguments, **options)
        optimizer.param_groups[0]["params"].reverse()
        return optimizer

    stopped_after(order, 2, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(run, "build_optimizer", in_another_order)
        with pytest.raises(StudyError, match=r"other parameters, or in another order.*Delete this folder"):
            execute(order, lambda event: None)
    assert execute(order, lambda event: None).epochs == 4


def test_a_run_whose_checkpoint_names_no_parameters_starts_again(tmp_path, monkeypatch):
    order, whole = (orders(tiny_study(methods=(ARM,), epochs=4), tmp_path / name)[1] for name in "ab")
    stopped_after(order, 2, monkeypatch)
    saved = load_checkpoint(order.folder, pytest.fail)
    del saved.state["parameters"]
    save_checkpoint(order.folder, saved)
    events = []
    execute(order, events.append)
    (note,) = (event["text"] for event in events if event["event"] == "note")
    assert note == f"{order.folder}: its checkpoint does not name the optimizer's parameters; the run starts again"
    execute(whole, lambda event: None)
    assert numbers(order.folder) == numbers(whole.folder)


@pytest.mark.grid
@pytest.mark.bits
def test_equal_runs_leave_equal_checkpoints_in_whatever_process_and_though_one_was_stopped(tmp_path, monkeypatch):
    study = tiny_study(methods=(ARM,), epochs=3)
    stopped, *others = (orders(study, tmp_path / name)[1] for name in "abcdef")
    stopped_after(stopped, 2, monkeypatch)
    execute(stopped, lambda event: None)
    content = (stopped.folder / CHECKPOINT).read_bytes()
    for order in others:
        # another process orders what it hashes in another way
        code = (
            "import sys, pickle; from headwise.lab.training.execution import execute; "
            "execute(pickle.load(sys.stdin.buffer), print)"
        )
        subprocess.run([sys.executable, "-c", code], input=pickle.dumps(order), check=True, capture_output=True)
        assert (order.folder / CHECKPOINT).read_bytes() == content


def test_times_come_back_with_a_run_and_lost_ones_count_for_none(tmp_path, monkeypatch):
    study = tiny_study(epochs=3)
    (order,), (lost,) = orders(study, tmp_path / "a"), orders(study, tmp_path / "b")
    stopped_after(order, 2, monkeypatch)
    before = [json.loads(line)["seconds"] for line in (order.folder / "metrics.jsonl").read_text().splitlines()]
    (order.folder / "metrics.jsonl").unlink()
    execute(order, lambda event: None)
    after = [json.loads(line)["seconds"] for line in (order.folder / "metrics.jsonl").read_text().splitlines()]
    assert after[:2] == before and all(after)
    stopped_after(lost, 3, monkeypatch)
    (lost.folder / "times.json").write_text("{torn")
    result = execute(lost, lambda event: None)
    assert result.metrics["cost/seconds_per_step"] is None
    assert result.metrics["test/accuracy"] is not None


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path, monkeypatch, damage):
    study = tiny_study(epochs=4)
    (order,), (whole,) = orders(study, tmp_path / "a"), orders(study, tmp_path / "b")
    stopped_after(order, 3, monkeypatch)
    path = order.folder / CHECKPOINT
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes({"cut": content[: len(content) // 2], "changed": bytes(content), "empty": b""}[damage])
    notes, trained = [], trained_epochs(monkeypatch)
    execute(order, lambda event: notes.append(event.get("text", "")))
    assert trained == [3, 4]
    assert any(f"{CHECKPOINT} is damaged" in note and "checkpoint before it" in note for note in notes)
    execute(whole, lambda event: None)
    assert numbers(order.folder) == numbers(whole.folder)


def test_without_any_whole_checkpoint_a_run_starts_again(tmp_path, monkeypatch):
    (order,) = orders(tiny_study(epochs=3), tmp_path)
    stopped_after(order, 2, monkeypatch)
    for name in (CHECKPOINT, PREVIOUS):
        (order.folder / name).write_bytes(b"torn")
    execute(order, lambda event: None)
    assert [line["epoch"] for line in numbers(order.folder)[0]] == [1, 2, 3]


def test_the_checkpoint_before_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    first, second = (RunCheckpoint({"x": torch.full((3,), float(n))}, {"n": n}) for n in (1, 2))
    save_checkpoint(tmp_path, first)
    for fails_at in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, fails_at, lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(OSError, match="broken"):
                save_checkpoint(tmp_path, second)
        assert load_checkpoint(tmp_path, pytest.fail).state == {"n": 1}
    moved, replace = [0], os.replace

    def stop_before_the_last(*arguments):
        moved[0] += 1
        if moved[0] == 3:
            raise OSError(errno.EIO, "broken")
        replace(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop_before_the_last)
        with pytest.raises(OSError, match="broken"):
            save_checkpoint(tmp_path, second)
    # complete, though not yet in its place: it takes it now
    assert not (tmp_path / CHECKPOINT).exists()
    assert load_checkpoint(tmp_path, pytest.fail).state == {"n": 2}
    assert (tmp_path / CHECKPOINT).exists()
    save_checkpoint(tmp_path, first)
    assert load_checkpoint(tmp_path, pytest.fail).state == {"n": 1}


def test_a_checkpoint_that_another_process_puts_in_its_place_meanwhile_is_read_there(tmp_path, monkeypatch):
    import headwise.lab.training.checkpoint as checkpoint

    save_checkpoint(tmp_path, RunCheckpoint({}, {"n": 1}))
    coming, read = tmp_path / checkpoint.COMING, checkpoint.read_checkpoint
    os.replace(tmp_path / CHECKPOINT, coming)

    def read_too_late(path):
        if path == coming:
            os.replace(coming, tmp_path / CHECKPOINT)
        return read(path)

    monkeypatch.setattr(checkpoint, "read_checkpoint", read_too_late)
    assert load_checkpoint(tmp_path, pytest.fail).state == {"n": 1}


def test_a_checkpoint_gives_back_every_bit_and_type(tmp_path):
    tied = torch.randn(4, 2)
    tensors = {
        "a": tied,
        "b": tied,
        "step": torch.tensor(7),
        "half": torch.randn(3).bfloat16(),
        "none": torch.empty(0, 2),
    }
    save_checkpoint(tmp_path, RunCheckpoint(tensors, {"history": [{"loss": 0.1}]}))
    found = load_checkpoint(tmp_path, pytest.fail)
    assert found.state == {"history": [{"loss": 0.1}]}
    assert all(
        torch.equal(found.tensors[name], tensor) and found.tensors[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("ending", ['{"epoch": 9, "tr', '{"epoch": 9}', "\x00\x00\x00"])
def test_a_last_line_without_its_end_is_repaired(tmp_path, monkeypatch, ending):
    (order,), (whole,) = (orders(tiny_study(epochs=4), tmp_path / name) for name in "ab")
    stopped_after(order, 2, monkeypatch)
    with open(order.folder / "metrics.jsonl", "a") as stream:
        stream.write(ending)
    whole_line = [9] if ending.endswith("}") else []
    assert [line["epoch"] for line in durable.read_lines(order.folder / "metrics.jsonl")] == [1, 2, *whole_line]
    execute(order, lambda event: None)
    execute(whole, lambda event: None)
    assert numbers(order.folder) == numbers(whole.folder)


@pytest.mark.parametrize("code", part_of_grid([errno.ENOSPC, errno.EDQUOT], [errno.ENOSPC]))
def test_a_full_disk_stops_with_a_remedy_and_loses_nothing(tmp_path, monkeypatch, code):
    study, synced = tiny_study(epochs=3, seeds=2), os.fsync

    def full(descriptor, left=[9]):  # noqa: B006
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, "No space left on device")
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StudyError, match=r"the disk of .* is full .*Free some space.*same command again"):
            carry(study, tmp_path / "full")
    carry(study, tmp_path / "full")
    carry(study, tmp_path / "whole")
    assert all_numbers(tmp_path / "full") == all_numbers(tmp_path / "whole")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(tmp_path, monkeypatch, code):
    def refuse(path, *arguments):
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(durable, "open", refuse, raising=False)
    with pytest.raises(StudyError, match=r"cannot be written: .*choose another --out"):
        carry(tiny_study(), tmp_path / "out")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").write_text("not a folder")
    with pytest.raises(StudyError, match=r"out cannot be used as a folder.*It is a file"):
        carry(tiny_study(), tmp_path / "out")
    with pytest.raises(StudyError, match="It is a file"):
        carry(tiny_study(), tmp_path / "out" / "deeper")


def test_json_holds_no_nan_and_lines_are_whole(tmp_path):
    durable.append_lines(tmp_path / "x.jsonl", [{"loss": float("nan"), "list": [float("inf"), 1.5]}])
    assert json.loads((tmp_path / "x.jsonl").read_text()) == {"loss": None, "list": [None, 1.5]}


def test_a_study_continues_from_what_git_keeps_of_its_folder(tmp_path):
    root = Path(__file__).parents[2]
    first = tmp_path / "first"
    carry(tiny_study(seeds=2), first)
    journal = Path("docs/results/blog-cifar10/journal")
    inside = [path.relative_to(first) for path in first.rglob("*") if path.is_file()]
    asked = "\n".join(str(journal / path) for path in inside)
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    ignored = subprocess.run(command, cwd=root, input=asked, capture_output=True, text=True).stdout.splitlines()
    kept = [path for path in inside if str(journal / path) not in ignored]
    assert {path.name for path in kept} == {
        ".headwise",
        "study.json",
        "config.json",
        "metrics.jsonl",
        "result.json",
        "times.json",
    }
    for path in kept:
        (tmp_path / "second" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(first / path, tmp_path / "second" / path)
    listener = Silent()
    carry(tiny_study(seeds=3), tmp_path / "second", listener=listener)
    # two of three runs are finished
    assert listener.plans[0] == (3, 2) and len(listener.ends) == 1
    assert all_numbers(first).items() <= all_numbers(tmp_path / "second").items()
