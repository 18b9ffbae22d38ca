"""Names and JSON of strangers: nothing of them acts on a terminal, a spreadsheet or a drawing."""

import csv
import json

import pytest
from report.synthetic_study import write_study

import headwise.report
from headwise_verdict.files.foreign_text import as_cell, printable, read_as_json
from headwise_verdict.reporting.export import export
from headwise_verdict.results.digests import sealed
from headwise_verdict.results.folder import ledger_of, read_study
from headwise_verdict.results.records import RunEntry
from headwise_verdict.results.table import print_answer

DEEP = "[" * 5000 + "]" * 5000
DEEPER = '{"a":' * 100_000 + "1" + "}" * 100_000
ESCAPES = "A\x1b]0;title\x07\x9b31m\x00\u202ep=0"


def edit(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def listed(folder):
    """Give a written study the list of its runs and their seals, as `headwise compare` does."""
    runs = []
    for path in sorted(folder.glob("runs/*/result.json")):
        result = json.loads(path.read_text(encoding="utf-8")) | {"hash": path.parent.name, "digests": {}}
        path.write_text(json.dumps(sealed(result)), encoding="utf-8")
        runs.append(RunEntry(hash=path.parent.name, arm=result["arm"], seed=result["seed"]))
    entries = [run.model_dump() for run in runs]
    edit(folder / "study.json", lambda study: study.update(runs=entries, ledger=ledger_of(runs)))
    return folder


@pytest.mark.parametrize("sealed_study", [False, True])
def test_control_characters_in_names_reach_no_page_figure_or_terminal(tmp_path, capsys, sealed_study):
    folder = write_study(tmp_path / "study", methods=("baseline", ESCAPES), seeds=6, epochs=2, watched=True)
    edit(folder / "study.json", lambda study: study.update(name=ESCAPES, title=ESCAPES, question=ESCAPES))
    if sealed_study:
        listed(folder)
    for path in export(folder, tmp_path / "out"):
        if path.suffix not in (".png", ".pdf"):
            assert printable(path.read_text(encoding="utf-8")) == path.read_text(encoding="utf-8"), path
    headwise.report.write(folder)
    print_answer(folder)
    shown = capsys.readouterr().out
    assert printable(shown) == shown and "\ufffd" in shown


@pytest.mark.parametrize("text", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\tx", "\rx"])
def test_no_text_of_a_table_is_a_formula(text):
    assert as_cell(text)[0] == "'"
    assert [as_cell(value) for value in (-0.5, None, "-0.5", "+1e-3", "DropHead(p=0.1)")] == [
        -0.5,
        None,
        "-0.5",
        "+1e-3",
        "DropHead(p=0.1)",
    ]


def test_the_csv_files_of_a_study_hold_no_formula(tmp_path):
    evil = "=HYPERLINK(A1)"
    folder = write_study(tmp_path, methods=("baseline", evil), seeds=2, epochs=2)
    headwise.report.write(folder)
    for name in ("table.csv", "runs.csv", "epochs.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as stream:
            arms = {row["arm"] for row in csv.DictReader(stream)}
        assert arms == {"baseline", f"'{evil}"}, name


@pytest.mark.parametrize("text", [DEEP, DEEPER, "[" * 102 + "]" * 102])
def test_json_that_nests_too_deeply_is_refused_before_it_is_used(text):
    with pytest.raises(ValueError, match=r"nested (too deeply|more than 100 levels deep)"):
        read_as_json(text)


@pytest.mark.parametrize("text", [DEEP, DEEPER, '{"settings": ' + DEEP + "}"])
@pytest.mark.parametrize("name", ["study.json", "findings.json"])
def test_a_deep_file_of_a_study_is_named_in_one_sentence(tmp_path, name, text):
    folder = write_study(tmp_path, methods=("baseline", "A"), seeds=2)
    (folder / "study.json").unlink()
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name} is not valid JSON \(it is nested"):
        headwise.report.write(folder)


@pytest.mark.parametrize("name", ["result.json", "config.json"])
@pytest.mark.parametrize("text", [DEEP, "[" * 150 + "]" * 150, "{", "[]"])
def test_a_file_that_cannot_be_read_costs_its_run_alone(tmp_path, capsys, name, text):
    folder = listed(write_study(tmp_path, methods=("baseline", "A"), seeds=7, epochs=2))
    broken = read_study(folder).runs["A", 3].path / name
    broken.write_text(text)
    headwise.report.write(folder)
    print_answer(folder)
    study = read_study(folder)
    assert [(run.arm, run.seed) for run in study.damaged()] == [("A", 3)]
    assert str(broken) in study.damaged()[0].damage[0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("study.json", {"primary": "nothing"}),
        ("study.json", {"evaluations": []}),
        ("study.json", {"metrics": []}),
        ("study.json", {"seeds": [10**400]}),
        ("study.json", {"seeds": []}),
        ("study.json", {"arms": ["baseline"], "baseline": "baseline"}),
    ],
)
def test_a_study_of_valid_parts_that_do_not_fit_has_no_traceback(tmp_path, name, change):
    folder = write_study(tmp_path, methods=("baseline", "A"), seeds=3, epochs=2)
    edit(folder / name, lambda study: study.update(change))
    try:
        headwise.report.write(folder)
    except ValueError as error:
        assert name in str(error)
