"""A finished run whose files were damaged is repeated by `compare` and named by `report`, never shown as whole."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from grids import part_of_grid
from small_studies import Silent, all_numbers, carry, orders, tiny_study

from headwise.lab.training.execution import execute
from headwise.lab.training.phases import read_start
from headwise_verdict.files.durable import clear_partials
from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting import write
from headwise_verdict.results.digests import digest_of
from headwise_verdict.results.folder import read_study

ARM = "DropHead(p=0.3)"


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def cut_at_a_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def empty(path):
    path.write_text("")


def double(path):
    path.write_text(2 * path.read_text())


def delete(path):
    path.unlink()


def damaged(study, out, name, harm):
    """Carry out a study, watched, then harm a file of its first run; give that run's folder."""
    carry(study, out, watch=True)
    runs = json.loads((out / "study.json").read_text())["runs"]
    folder = out / "runs" / runs[1]["hash"]
    harm(folder / name)
    return folder


def health(folder):
    records = map(json.loads, (folder / "health.jsonl").read_text().splitlines())
    return [record for record in records if "alert" not in record]


@pytest.mark.parametrize("harm", part_of_grid([cut, cut_at_a_line, empty, double, delete], [cut]))
@pytest.mark.parametrize("name", part_of_grid(["metrics.jsonl", "health.jsonl"], ["health.jsonl"]))
def test_compare_repeats_a_finished_run_whose_files_were_damaged_to_the_same_numbers(tmp_path, name, harm):
    study = tiny_study(methods=(ARM,), epochs=2)
    carry(study, tmp_path / "whole", watch=True)
    folder, listener = damaged(study, tmp_path / "harmed", name, harm), Silent()
    carry(study, tmp_path / "harmed", listener=listener, watch=True)
    what = "is gone" if harm is delete else "is not what the run wrote"
    assert [text for text in listener.said if f"{folder}: {name} {what}; the run is repeated" in text], listener.said
    assert [order.configuration.arm for order in listener.ends] == [ARM]
    assert all_numbers(tmp_path / "harmed") == all_numbers(tmp_path / "whole")
    assert health(folder) == health(tmp_path / "whole" / "runs" / folder.name)


@pytest.mark.parametrize("harm", part_of_grid([cut, cut_at_a_line, empty, double, delete], [cut]))
@pytest.mark.parametrize("name", part_of_grid(["metrics.jsonl", "health.jsonl"], ["metrics.jsonl"]))
def test_a_report_leaves_a_damaged_run_out_by_name(tmp_path, name, harm):
    folder = damaged(tiny_study(methods=(ARM,), epochs=2), tmp_path, name, harm)
    study = read_study(tmp_path)
    assert [(run.path.name, run.status, run.epochs, run.health()) for run in study.damaged()] == [
        (folder.name, "damaged", [], [])
    ]
    assert study.missing() == [(ARM, 0)]
    page = write(tmp_path).read_text()
    assert f"{ARM}, seed 0, is damaged and left out: in runs/{folder.name}, {name}" in page
    (entry,) = json.loads((tmp_path / "analysis.json").read_text())["damaged"]
    assert entry["run"] == folder.name and entry["files"][0].startswith(name)


@pytest.mark.grid
def test_the_command_names_the_damaged_run(tmp_path):
    folder = damaged(tiny_study(methods=(ARM,), epochs=1), tmp_path, "metrics.jsonl", empty)
    command = [sys.executable, "-m", "headwise.cli", "report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert f"note: {ARM}, seed 0, is damaged and left out: in runs/{folder.name}, metrics.jsonl" in done.stderr


def test_a_repeat_that_is_stopped_is_still_a_repeat(tmp_path, monkeypatch):
    import headwise.lab.training.checkpoint as clearing

    study = tiny_study(methods=(ARM,), epochs=2)
    folder = damaged(study, tmp_path, "health.jsonl", cut_at_a_line)

    def stop(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(clearing, "drop_all", stop)
    with pytest.raises(KeyboardInterrupt):
        carry(study, tmp_path, watch=True)
    monkeypatch.undo()
    listener = Silent()
    carry(study, tmp_path, listener=listener, watch=True)
    assert any("health.jsonl is not what the run wrote" in text for text in listener.said)
    assert len(health(folder)) == len({json.dumps(record, sort_keys=True) for record in health(folder)}) > 0


def test_a_run_that_was_not_watched_holds_no_readings_of_another(tmp_path):
    study = tiny_study(epochs=1)
    (result,) = carry(study, tmp_path)
    (tmp_path / "runs" / result["hash"] / "health.jsonl").write_text('{"step": 0}\n')
    assert read_study(tmp_path).damaged()[0].damage == ("health.jsonl came after the run had finished",)


def without_digests(out):
    """Take the ledger and the digests of results out of a study."""
    for path in (out / "study.json", *out.glob("runs/*/result.json")):
        found = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in found.items() if k not in ("ledger", "digest", "digests")}))


def test_a_study_without_digests_is_read_and_its_runs_are_repeated(tmp_path):
    study = tiny_study(epochs=1)
    (result,) = carry(study, tmp_path)
    without_digests(tmp_path)
    assert read_study(tmp_path).damaged() == [] and read_study(tmp_path).missing() == []
    listener = Silent()
    carry(study.model_copy(update={"seeds": 2}), tmp_path, listener=listener)
    assert [order.configuration.seed for order in listener.ends] == [0, 1]
    assert ["result.json carries no digest; the run is repeated" in text for text in listener.said] == [True]
    path = tmp_path / "runs" / result["hash"] / "result.json"
    change(path, '"seed": 0', '"seed":  0')
    assert read_study(tmp_path).damaged() == []
    change(path, '"test/accuracy": ', '"test/accuracy": 1')
    assert [run.path for run in read_study(tmp_path).damaged()] == [path.parent]


def test_a_result_without_a_digest_is_taken_only_where_the_whole_study_has_none(tmp_path):
    carry(tiny_study(epochs=1), tmp_path)
    ledger = (tmp_path / "study.json").read_text()
    without_digests(tmp_path)
    (tmp_path / "study.json").write_text(ledger)
    assert [run.damage for run in read_study(tmp_path).damaged()] == [("result.json carries no digest",)]


def change(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def edit_metric(value):
    def edit(folder):
        lines = (folder / "result.json").read_text().splitlines(keepends=True)
        at = next(n for n, line in enumerate(lines) if '"test/accuracy"' in line)
        lines[at] = f'  "test/accuracy": {value},\n'
        (folder / "result.json").write_text("".join(lines))

    return edit


def flip_digit(folder):
    path = folder / "result.json"
    text = path.read_text()
    at = text.index('"train/loss": ') + len('"train/loss": 0.')
    path.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])


def edit_status(folder):
    change(folder / "result.json", '"finished"', '"diverged"')


def drop_digest(folder):
    path = folder / "result.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "digest"}))


def take_result_of_another(folder):
    shutil.copy(other(folder) / "result.json", folder / "result.json")


def swap_folders(folder):
    aside = folder.with_name("aside")
    shutil.move(folder, aside)
    shutil.move(other(aside, folder.name), folder)
    shutil.move(aside, aside.with_name(json.loads((folder / "result.json").read_text())["hash"]))


def flip_checkpoint(folder):
    path = folder / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def checkpoint_of_another(folder):
    shutil.copy(other(folder) / "checkpoint.safetensors", folder)


def other(folder, name=None):
    return next(path for path in sorted(folder.parent.iterdir()) if path.name not in (folder.name, name))


RESULTS = {
    "another metric": (edit_metric(0.99), "result.json is not what the run wrote"),
    "NaN": (edit_metric("NaN"), "result.json is not what the run wrote"),
    "infinity": (edit_metric("Infinity"), "result.json is not what the run wrote"),
    "null": (edit_metric("null"), "result.json is not what the run wrote"),
    "a digit": (flip_digit, "result.json is not what the run wrote"),
    "the status": (edit_status, "result.json is not what the run wrote"),
    "no digest": (drop_digest, "result.json carries no digest"),
    "of another run": (take_result_of_another, "result.json is of the run"),
    "swapped folders": (swap_folders, "result.json is of the run"),
}
# no report reads a checkpoint
CHECKPOINTS = {
    "a damaged checkpoint": (flip_checkpoint, "checkpoint.safetensors is not what the run wrote"),
    "a checkpoint of another run": (checkpoint_of_another, "checkpoint.safetensors is not what the run wrote"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    carry(tiny_study(methods=(ARM,), epochs=2), out, watch=True)
    return out


@pytest.mark.parametrize("kind", [*RESULTS, *CHECKPOINTS])
def test_compare_names_what_is_not_the_result_that_was_written_and_repeats_it(finished, tmp_path, kind):
    harm, words = (RESULTS | CHECKPOINTS)[kind]
    out, listener = tmp_path / "harmed", Silent()
    shutil.copytree(finished, out)
    folder = out / "runs" / json.loads((out / "study.json").read_text())["runs"][1]["hash"]
    harm(folder)
    carry(tiny_study(methods=(ARM,), epochs=2), out, listener=listener, watch=True)
    assert any(f"{folder}: {words}" in text and "the run is repeated" in text for text in listener.said), listener.said
    assert len(listener.ends) == (2 if kind == "swapped folders" else 1)
    assert all_numbers(out) == all_numbers(finished)
    name = folder.name
    assert (folder / "health.jsonl").read_bytes() == (finished / "runs" / name / "health.jsonl").read_bytes()
    assert read_study(out).damaged() == [] and read_study(out).missing() == []


@pytest.mark.parametrize("kind", RESULTS)
def test_a_report_names_what_is_not_the_result_that_was_written_and_leaves_it_out(finished, tmp_path, kind):
    harm, words = RESULTS[kind]
    out = tmp_path / "harmed"
    shutil.copytree(finished, out)
    folder = out / "runs" / json.loads((out / "study.json").read_text())["runs"][1]["hash"]
    harm(folder)
    assert (ARM, 0) in read_study(out).missing()
    assert f"{ARM}, seed 0, is damaged and left out: in runs/{folder.name}, {words}" in write(out).read_text()


def test_a_checkpoint_of_another_run_is_not_trained_on(finished, tmp_path):
    out, said = tmp_path / "harmed", []
    shutil.copytree(finished, out)
    order = orders(tiny_study(methods=(ARM,), epochs=2), out, watch=True)[1]
    (order.folder / "result.json").unlink()
    checkpoint_of_another(order.folder)
    execute(order, lambda event: said.append(event.get("text", "")))
    assert any(f"it is of the run {other(order.folder).name}" in text for text in said), said
    assert all_numbers(out) == all_numbers(finished)


def test_a_phase_does_not_start_from_a_damaged_checkpoint(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(next((finished / "runs").iterdir()), folder)
    assert read_start(folder)
    flip_checkpoint(folder)
    with pytest.raises(StudyError, match=r"is damaged \(its checksum does not match"):
        read_start(folder)


def test_a_deleted_checkpoint_of_a_finished_run_is_no_damage(finished, tmp_path):
    out, listener = tmp_path / "lighter", Silent()
    shutil.copytree(finished, out)
    for path in out.glob("runs/*/checkpoint.safetensors"):
        path.unlink()
    carry(tiny_study(methods=(ARM,), epochs=2), out, listener=listener, watch=True)
    assert listener.ends == [] and listener.said == []


def test_a_copy_of_a_run_is_named_and_left_out(finished, tmp_path):
    out, listener = tmp_path / "more", Silent()
    shutil.copytree(finished, out)
    folder = next((out / "runs").iterdir())
    shutil.copytree(folder, out / "runs" / "copy")
    carry(tiny_study(methods=(ARM,), epochs=2), out, listener=listener, watch=True)
    assert listener.said == [f"note: {out / 'runs' / 'copy'} is not a run of this study and is omitted"]
    assert "runs/copy is not a run of this study and is omitted" in write(out).read_text()
    assert len(read_study(out).runs) == 2


@pytest.mark.parametrize(
    ("before", "after"), [('"seed": 0', '"seed": 1'), ('"hash": "', '"hash": "0'), ('"arm": "', '"arm": "x')]
)
def test_an_edited_list_of_runs_is_told_and_written_anew(finished, tmp_path, before, after):
    out = tmp_path / "edited"
    shutil.copytree(finished, out)
    start, _, runs = (out / "study.json").read_text().partition('"runs": [')
    (out / "study.json").write_text(f'{start}"runs": [{runs.replace(before, after, 1)}')
    with pytest.raises(ValueError, match=r"study.json: its list of runs is not what `headwise compare` wrote"):
        read_study(out)
    listener = Silent()
    carry(tiny_study(methods=(ARM,), epochs=2), out, listener=listener, watch=True)
    assert listener.ends == [] and read_study(out).missing() == []


def turned(record):
    record["baseline"] = record["arms"][1]


def other_direction(record):
    record["metrics"][0]["higher_is_better"] = not record["metrics"][0]["higher_is_better"]


DECIDING = {
    "the baseline": turned,
    "the arms": lambda record: record["arms"].reverse(),
    "the scale": lambda record: record.update(scale="paper"),
    "a direction": other_direction,
    "a unit": lambda record: record["metrics"][0].update(unit="m"),
    "a label": lambda record: record["metrics"][0].update(label="error"),
    "the value of failure": lambda record: record["metrics"][0].update(failure=0.9),
    "the margin": lambda record: record.update(margin=0.5),
    "the outcome": lambda record: record.update(primary="test/loss"),
    "the order of the arms and the baseline": lambda record: (record["arms"].reverse(), turned(record)),
    "a claim": lambda record: record.update(claims=[{"text": "All is well."}]),
    "a premise": lambda record: record.update(premises=[{"name": "learned"}]),
    "the kind": lambda record: record.update(kind="numbers"),
    "its digest": lambda record: record.update(digest="0"),
}


@pytest.mark.parametrize("what", DECIDING)
def test_what_verdicts_depend_on_is_believed_of_no_edited_study(finished, tmp_path, what):
    out = tmp_path / "edited"
    shutil.copytree(finished, out)
    record = json.loads((out / "study.json").read_text())
    # a title may be written anew
    (out / "study.json").write_text(json.dumps(record | {"title": "Mine", "notes": ["Mine."]}))
    assert read_study(out).study.title == "Mine"
    DECIDING[what](record)
    (out / "study.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"study.json: its arms, baseline, .* are not those of its runs. Start the"):
        read_study(out)
    listener = Silent()
    carry(tiny_study(methods=(ARM,), epochs=2), out, listener=listener, watch=True)
    assert listener.ends == [] and read_study(out).missing() == []


def test_a_digest_that_was_taken_out_is_missed_and_that_of_an_earlier_version_is_not(finished, tmp_path):
    out = tmp_path / "edited"
    shutil.copytree(finished, out)
    record = json.loads((out / "study.json").read_text())
    (out / "study.json").write_text(json.dumps(record | {"digest": None, "margin": 0.5}))
    with pytest.raises(ValueError, match="its list of runs is not what"):
        read_study(out)
    earlier = {"digest": None, "ledger": digest_of(record["runs"])}
    (out / "study.json").write_text(json.dumps(record | earlier))
    assert not read_study(out).missing()


def test_a_report_clears_what_a_killed_one_left_and_leaves_what_another_writes(tmp_path):
    carry(tiny_study(epochs=1), tmp_path)
    names = [f".report.html.{2**22 + 1}-0123abcd.partial", f".report.html.{os.getppid()}-0123abcd.partial"]
    left, writing, mine = (tmp_path / name for name in (*names, ".report.html.2024"))
    for path in (left, writing, mine):
        path.write_text("<html>")
    write(tmp_path)
    assert not left.exists() and writing.exists() and mine.exists()


def test_what_a_killed_process_wrote_is_cleared_before_its_parent_notices(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = tmp_path / f".result.json.{child.pid}-0123abcd.partial"
    left.write_text("{")
    clear_partials(tmp_path)
    assert left.exists()
    child.kill()
    # ended, and not waited for
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    clear_partials(tmp_path)
    assert not left.exists()
    child.stdin.close()
    child.wait()
