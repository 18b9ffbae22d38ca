"""No command deletes or overwrites what headwise did not write, whatever its name, nor writes through links."""

import os

import pytest
import torch
from small_studies import carry, orders, tiny_study
from typer.testing import CliRunner

import headwise
from headwise.health.watching.replay_file import Keeper
from headwise.lab.comparing.compare import free_folder
from headwise_verdict.files.errors import StudyError
from headwise_verdict.files.ownership import MARKER, claim
from headwise_verdict.reporting.rebuild import rebuild

ROWS = [f"{arm},{seed},0.{seed}{n}\n" for n, arm in enumerate(("baseline", "b")) for seed in range(6)]
TABLE = "arm,seed,acc\n" + "".join(ROWS)


def command(*arguments):
    from headwise.cli import app

    done = CliRunner().invoke(app, list(map(str, arguments)))
    if done.exception is not None:
        raise done.exception


def of_table(out):
    table = out.parent / "t.csv"
    table.write_text(TABLE)
    command("report", table, "--outcome", "acc:higher", "--out", out)


def export(out):
    made = out.parent / "made"
    if not made.exists():
        of_table(made)
    command("report", made, "--export", out)


def study(out):
    carry(tiny_study(epochs=1), out)
    rebuild(out)


def league(out):
    command("league", "--page", "--out", out)


def ledger_of_a_world(out):
    from headwise_papers.league.brief_run import Figures
    from headwise_papers.league.run_ledger import Ledger, Run

    ledger = Ledger(out, "0")
    for seed in range(2):
        ledger.add(Run("plain", 0.1, len(ledger.runs) + seed), Figures(0.5, 0.6, 0.6, 1.0))


def audit(out):
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 2, batch_first=True))
    headwise.audit(model).write(out / "audit.html")


def contents(folder):
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("write", [of_table, export, study, league, audit])
def test_foreign_files_with_our_names_stay_byte_for_byte(tmp_path, write):
    ours, foreign = tmp_path / "ours", tmp_path / "foreign"
    write(ours)
    write(ours)
    names = list(contents(ours))
    assert MARKER in names
    for chosen in (names, *([name] for name in {name.split("/")[0]: name for name in names}.values())):
        for name in chosen:
            (foreign / name).parent.mkdir(parents=True, exist_ok=True)
            (foreign / name).write_bytes(b"mine\n")
        before = contents(foreign)
        with pytest.raises((StudyError, ValueError), match=r"foreign holds .*headwise did not write"):
            write(foreign)
        assert contents(foreign) == before
        foreign.rename(tmp_path / f"foreign-{len(list(tmp_path.iterdir()))}")


@pytest.mark.parametrize("write", [of_table, export, study])
def test_a_folder_of_others_is_left_alone_even_without_our_names(tmp_path, write):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(StudyError, match=r"holds notes.txt, which headwise did not write\. Choose another --"):
        write(tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["notes.txt"]


def test_a_table_in_the_working_folder_deletes_no_folder_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "events.out.tfevents").write_bytes(b"mine")
    (tmp_path / "runs.csv").write_text(TABLE)
    before = contents(tmp_path)
    with pytest.raises(StudyError, match="holds the table itself"):
        command("report", "runs.csv", "--outcome", "acc:higher", "--out", ".")
    assert contents(tmp_path) == before


def test_a_table_made_again_replaces_its_runs_and_keeps_files_put_beside_them(tmp_path):
    out = tmp_path / "out"
    of_table(out)
    kept, gone = sorted((out / "runs").iterdir())[:2]
    (kept / "notes.txt").write_text("mine")
    (out / "runs" / "events").mkdir()
    (out / "runs" / "events" / "a").write_text("mine")
    table = tmp_path / "t.csv"
    table.write_text(TABLE.replace("0.", "0.9"))
    command("report", table, "--outcome", "acc:higher", "--out", out)
    assert not gone.exists() and os.listdir(kept) == ["notes.txt"]
    assert (out / "runs" / "events" / "a").read_text() == "mine"


def test_the_report_of_a_study_replaces_no_foreign_page(tmp_path):
    carry(tiny_study(epochs=1), tmp_path / "a")
    (tmp_path / "a" / MARKER).unlink()
    (tmp_path / "a" / "table.csv").write_text("mine")
    with pytest.raises(StudyError, match=r"holds table.csv, which headwise did not write\. Move it away; or, if an"):
        rebuild(tmp_path / "a")
    assert (tmp_path / "a" / "table.csv").read_text() == "mine" and not (tmp_path / "a" / "report.html").exists()
    (tmp_path / "a" / MARKER).write_text("*\n")
    rebuild(tmp_path / "a")
    assert (tmp_path / "a" / "table.csv").read_text() != "mine"


def test_without_out_a_new_folder_is_taken_beside_a_foreign_one(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    chosen = free_folder(tmp_path / "tiny", tiny_study(), 0)
    assert chosen.parent == tmp_path and chosen.name.startswith("tiny-")


def test_a_marker_of_others_is_no_marker(tmp_path):
    (tmp_path / MARKER).write_text("runs\n")
    with pytest.raises(StudyError, match=r"holds a file \.headwise that headwise did not write"):
        claim(tmp_path, ["runs"])


def test_a_log_is_not_appended_to_the_file_of_others(tmp_path):
    for text in ('{"name": "mine"}\n', "step,loss\n", '["site"]\n', "mine"):
        (tmp_path / "health.jsonl").write_text(text)
        with pytest.raises(FileExistsError, match="something other than a log"):
            headwise.JsonLines(tmp_path / "health.jsonl")
        assert (tmp_path / "health.jsonl").read_text() == text


def test_a_replay_file_replaces_none(tmp_path):
    (tmp_path / "step_00000001.pt").write_bytes(b"mine")
    (tmp_path / "step_00000001.part").write_bytes(b"mine")
    model = torch.nn.Linear(2, 2)
    keeper = Keeper(model, None, 2, tmp_path)
    keeper.begin(0)
    path = keeper.write([{"step": 1}], [], {})
    keeper.stop()
    assert path.name == "step_00000001-2.pt" and torch.load(path, weights_only=True)["alerts"] == [{"step": 1}]
    assert (tmp_path / "step_00000001.pt").read_bytes() == (tmp_path / "step_00000001.part").read_bytes() == b"mine"


# links that a stranger's study folder may hold, to a file outside
LINKS = ("study.json.partial", ".lock.json.partial", ".lock", ".lock.json", "study.json", "report.html", "failures.log")
IN_RUN = ("result.json.partial", "config.json.partial", "times.json.partial", "metrics.jsonl", "times.json", ".lock")


@pytest.mark.parametrize("name", [*LINKS, *(f"runs/RUN/{name}" for name in IN_RUN)])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(tmp_path, name, exists):
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    if exists:
        (outside / "file").write_text("mine")
    link = out / name.replace("RUN", orders(tiny_study(epochs=1), out)[0].identity)
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / "file")
    (out / MARKER).write_text("*\n")
    try:
        study(out)
    except (StudyError, ValueError) as error:
        assert "link" in str(error)
    assert contents(outside) == ({"file": b"mine"} if exists else {})


@pytest.mark.parametrize("name", ["runs", "runs/RUN"])
def test_a_folder_of_runs_that_is_a_link_is_refused(tmp_path, name):
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    link = out / name.replace("RUN", orders(tiny_study(epochs=1), out)[0].identity)
    link.parent.mkdir(parents=True)
    link.symlink_to(outside, target_is_directory=True)
    (out / MARKER).write_text("*\n")
    with pytest.raises(StudyError, match=r"link.*headwise writes through no links"):
        study(out)
    assert contents(outside) == {}


def test_what_a_script_wrote_stays_when_its_damaged_run_starts_again(tmp_path):
    from headwise.lab.training.script_process import _clear

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "checkpoint.pt").write_text("mine")
    _clear(tmp_path)
    assert not (tmp_path / "own").exists() and (tmp_path / "own-1" / "checkpoint.pt").read_text() == "mine"


def test_the_runs_of_a_world_are_written_over_no_foreign_file(tmp_path):
    (tmp_path / "world.json").write_text("{}")
    with pytest.raises(StudyError, match="headwise did not write"):
        ledger_of_a_world(tmp_path)
    assert contents(tmp_path) == {"world.json": b"{}"}
