"""`--json`: standard output is one object that its shipped schema describes, and all else is on standard error."""

import csv
import json
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from headwise_papers.league import json_answer as of_league
from report.synthetic_study import write_study

from headwise_verdict.results import json_answer as of_results

ROOT = Path(__file__).parents[2]
TASK = f"{Path(__file__).with_name('tiny_task.py')}:Tiny"
SCHEMAS = {
    "results": (of_results, resources.files(of_results.__package__) / "results.schema.json"),
    "league": (of_league, resources.files(of_league.__package__) / "league.schema.json"),
}


def headwise(*arguments, **options):
    command = [sys.executable, "-m", "headwise", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def here(monkeypatch, capfd):
    """The command in this process, which has imported its parts already."""
    from headwise import cli

    monkeypatch.setattr(cli, "end_on_stops", lambda: None)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capfd.readouterr())

    return run


def problems(answer):
    """Return what a validator of the shipped schema finds, for this object and for one with an unknown field."""
    name = re.fullmatch(r"headwise\.(\w+)/\d+", answer["schema"])[1]
    check = jsonschema.Draft202012Validator(json.loads(SCHEMAS[name][1].read_text(encoding="utf-8")))
    assert list(check.iter_errors(answer | {"mood": "good"}))
    return list(check.iter_errors(answer))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_shipped_schema_is_that_of_the_records(name):
    module, file = SCHEMAS[name]
    kept = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(kept)
    assert kept == module.schema(), f"write module.schema() of {module.__name__} into {file}"
    assert set(kept["required"]) == set(kept["properties"]) and kept["$id"] == module.SCHEMA


def test_a_report_prints_the_verdict_of_every_arm(tmp_path):
    diverged = {("A(p=1)", 0)}
    folder = write_study(
        tmp_path / "one", methods=("baseline", "A(p=1)", "B()"), effects=(0, 0.03, 0), diverged=diverged, epochs=3
    )
    done = headwise("report", folder, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and problems(answer) == [] and str(folder / "report.html") in done.stderr
    (study,) = answer["studies"]
    assert study["outcome"] == "test/accuracy" and study["better"] == "higher" and study["complete"] is True
    arms = {arm["arm"]: arm for arm in study["arms"]}
    assert [arms[name]["verdict"] for name in arms] == [None, "better", "no evidence"]
    assert arms["baseline"]["difference"] is None and arms["A(p=1)"]["runs"] == {
        "requested": 10,
        "finished": 9,
        "diverged": 1,
    }
    # a share: 0.03 is three points
    assert 0.025 < arms["A(p=1)"]["difference"]["low"] < arms["A(p=1)"]["difference"]["mean"] < 0.035
    assert answer["across"] == []


def test_missing_runs_and_several_folders_are_in_the_object(tmp_path, here):
    missing = {("A()", 3)}
    folders = [
        write_study(
            tmp_path / name, methods=("baseline", "A()"), effects=(0, 0.03), missing=missing if name == "two" else ()
        )
        for name in ("one", "two")
    ]
    answer = of_results.results_of(folders) if all(map(_reported, folders)) else None
    assert problems(answer) == []
    assert [study["complete"] for study in answer["studies"]] == [True, False]
    assert answer["studies"][1]["missing"] == [{"arm": "A()", "seed": 3}]
    done = here("report", *folders, "--json")
    together = json.loads(done.stdout)
    assert problems(together) == [] and [one["arm"] for one in together["across"]] == ["A()"]
    assert 0 < together["across"][0]["low"] < together["across"][0]["high"] and together["across"][0]["studies"] == 2


def _reported(folder):
    from headwise_verdict.reporting import write

    return write(folder).is_file()


def test_findings_are_an_answer_without_arms(tmp_path, here):
    (tmp_path / "findings.json").write_text(json.dumps({"name": "x", "paragraphs": ["Yes.", "More."]}))
    answer = json.loads(here("report", tmp_path, "--json").stdout)
    assert problems(answer) == [] and answer["studies"][0]["arms"] == []
    assert answer["studies"][0]["answer"] == "Yes." and answer["studies"][0]["outcome"] is None


def test_a_table_of_numbers_is_answered_as_a_study(tmp_path, here):
    rows = [
        f"{arm},{seed},{0.5 + seed / 100 + (arm == 'new') * (0.1 + seed / 1000)}"
        for arm in ("old", "new")
        for seed in range(7)
    ]
    (tmp_path / "runs.csv").write_text("\n".join(["arm,seed,acc", *rows, "new,9,0.7"]) + "\n")
    done = here("report", tmp_path / "runs.csv", "--outcome", "acc:higher", "--baseline", "old", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and problems(answer) == []
    assert answer["studies"][0]["arms"][1]["verdict"] == "better"
    assert any("no row of seed 9" in text for text in answer["studies"][0]["warnings"])


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("report", "nowhere", "--json"), 1, "error: "),
        (("compare", "no-such-study", "--json"), 1, "there is no study 'no-such-study'"),
        (("compare", "--json", "--plan"), 1, "--plan trains nothing"),
        (("league", "--json", "--plan", "--page"), 1, "give one of the three"),
        (("league", "--json", "--worlds", "short-pair"), 1, "Did you mean 'short-pairs'?"),
        (("compare", "--jsn"), 2, "No such option"),
    ],
)
def test_an_error_leaves_standard_output_empty(tmp_path, monkeypatch, here, arguments, code, told):
    monkeypatch.chdir(tmp_path)
    done = here(*arguments)
    assert (done.returncode, done.stdout) == (code, "") and told in done.stderr, done


def test_a_comparison_prints_progress_on_standard_error_and_one_object(tmp_path, here):
    options = (
        "--task",
        TASK,
        "--method",
        "DropHead(p=0.2)",
        "--seeds",
        2,
        "--epochs",
        1,
        "--jobs",
        1,
        "--out",
        tmp_path,
    )
    done = headwise("compare", *options, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and problems(answer) == []
    assert "[4/4]" in done.stderr and "report: " in done.stderr
    assert [arm["verdict"] for arm in answer["studies"][0]["arms"]] == [None, "undecided"]
    assert answer == json.loads(here("report", tmp_path, "--json").stdout)


def test_what_child_processes_print_is_no_part_of_the_object(tmp_path):
    code = (
        "import os, subprocess, sys\nfrom headwise.files.json_output import json_alone\n"
        "with json_alone() as show:\n"
        "    print('ours'); subprocess.run([sys.executable, '-c', 'print(\"of a child\")']); os.write(1, b'of C\\n')\n"
        "    show({'answer': 1})\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == '{"answer": 1}\nafter\n'
    assert all(text in done.stderr for text in ("ours", "of a child", "of C"))


def test_a_league_prints_how_far_its_worlds_are_and_their_tables(here):
    kept = ROOT / "docs" / "league" / "second"
    done = here("league", "--plan", "--out", kept, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1 and problems(answer) == [] and "short-pairs: complete" in done.stderr
    states = {one["world"]: one["state"] for one in answer["worlds"]}
    assert states["short-pairs"] == "complete" and answer["page"] is None
    assert answer["complete"] is all(state in ("complete", "failed") for state in states.values())
    with (kept / "gains.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    names = [(one["world"], one["contestant"]) for one in answer["gains"]]
    assert names == [(row["world"], row["contestant"]) for row in rows] and rows
    for one, row in zip(answer["gains"], rows, strict=True):
        assert one["mean"] == pytest.approx(float(row["mean"]))
        low = float(row["control_low"]) if row["control_low"] else None
        assert one["control_low"] == (None if low is None else pytest.approx(low))


def test_every_command_is_on_the_page_of_exit_codes_with_its_schema():
    import typer.main

    from headwise.cli import app

    page = (ROOT / "docs" / "exit_codes.md").read_text(encoding="utf-8")
    commands = typer.main.get_command(app).commands
    table = page.split("\n\n")[2]
    for name, command in commands.items():
        assert re.search(rf"`(headwise )?{name}`", table), name
        options = {option for parameter in command.params for option in parameter.opts}
        row = next(line for line in table.splitlines() if re.search(rf"`(headwise )?{name}`", line))
        assert ("--json" in options) == (not row.endswith("| no |")), row
        if "--json" in options:
            assert "Exit code:" in command.help, name
    for module, file in SCHEMAS.values():
        assert module.SCHEMA in page
        package = module.__package__.replace(".", "/")
        assert f"{package}/{file.name}" in page and os.path.exists(str(file))
