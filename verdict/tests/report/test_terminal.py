"""The table of the terminal: what it says and that it fits."""

from __future__ import annotations

import json

import pytest
from report.synthetic_study import NINE, write_study

import headwise_verdict.reporting
from headwise_verdict.files.ownership import MARKER
from headwise_verdict.results.table import _wrapped, print_answer

LONG = "InputNoise(scale=0.01, per_head=True) + Decorrelation(strength=0.25) @ 2-5 | learning_rate=0.003"


def printed(folder, capsys) -> list[str]:
    headwise_verdict.reporting.write(folder)
    print_answer(folder)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("methods", [NINE, (NINE[0], LONG, "x" * 90)])
def test_no_line_is_wider_than_eighty_columns(tmp_path, capsys, methods):
    broken = {(methods[1], 3), (methods[1], 4)}
    lines = printed(write_study(tmp_path, methods=methods, diverged=broken, epochs=3), capsys)
    assert max(map(len, lines)) <= 80
    together = "".join(line[:40].strip() for line in lines)
    assert all(part in together for part in ("difference", methods[1].split("(")[0]))


def test_every_arm_has_its_difference_its_p_and_its_verdict(tmp_path, capsys):
    broken = {("B()", seed) for seed in range(10)} | {("A(p=1)", 0)}
    methods = ("baseline", "A(p=1)", "B()")
    lines = printed(write_study(tmp_path, methods=methods, effects=(0, 0.03, 0), diverged=broken, epochs=3), capsys)
    row = next(line for line in lines if line.startswith("A(p=1) (1 diverged)"))
    assert "+2.88 [+2.55, +3.22]" in row and row.endswith("better")
    assert "diverged" in next(line for line in lines if line.startswith("B()"))[18:]
    assert " ".join(lines).count("B() diverged in 10 of 10 seeds, baseline in 0 (more often, exact p = 0.002)") == 1
    assert "A step takes 10.7 ms (baseline) to 11.1 ms (A(p=1))." in lines


def test_a_unit_stays_in_one_piece(tmp_path, capsys):
    folder = write_study(tmp_path, methods=("baseline", LONG), effects=(0, 0.01), seeds=10, epochs=3)
    study = json.loads((folder / "study.json").read_text())
    study["metrics"][0]["label"] = "F1"
    study["evaluations"] = ["test"]
    (folder / "study.json").write_text(json.dumps(study))
    lines = printed(folder, capsys)
    head = lines[: next(at for at, line in enumerate(lines) if line.startswith("baseline"))]
    assert any("(%)" in line for line in head) and not any(line.rstrip().endswith("(") or "( " in line for line in head)


def test_findings_print_the_sentence_that_leads(tmp_path, capsys):
    (tmp_path / "findings.json").write_text(json.dumps({"paragraphs": ["The answer is yes. " * 8, "More."]}))
    lines = printed(tmp_path, capsys)
    assert lines[1].startswith("The answer is yes.") and max(map(len, lines)) <= 80
    assert "More." not in lines


def test_an_analysis_of_another_version_is_refused_by_name(tmp_path):
    folder = write_study(tmp_path, methods=NINE[:2], seeds=1, epochs=1)
    (folder / "analysis.json").write_text(json.dumps({"methods": [], "metric": {}}))
    with pytest.raises(ValueError, match=r"analysis\.json is not a valid analysis.*headwise report"):
        print_answer(folder)


def test_several_folders_are_put_together_arm_by_arm(tmp_path, capsys):
    from headwise_verdict.reporting.command import run

    folders = [
        write_study(tmp_path / name, methods=("baseline", *arms), effects=(0, 0.03, -0.02), epochs=3)
        for name, arms in (("one", ("A()", "B()")), ("two", ("A()", "C()")), ("three", ("A()", "B()")))
    ]
    run(folders, None)
    printed = " ".join(capsys.readouterr().out.split())
    assert "A(): over 3 data sets the paired difference is +" in printed
    assert "B():" not in printed and "C():" not in printed
    low, high = map(float, printed.split("deviations [")[1].split("]")[0].split(","))
    assert 0 < low < high


def test_folders_that_share_no_arm_are_refused(tmp_path):
    from headwise_verdict.files.errors import StudyError
    from headwise_verdict.results.across import across

    folders = [write_study(tmp_path / arm, methods=("baseline", f"{arm}()"), seeds=3, epochs=3) for arm in "AB"]
    with pytest.raises(StudyError, match="A, B share no arm"):
        across(folders)
    with pytest.raises(StudyError, match="same name"):
        across([folders[0], folders[0]])


def test_the_command_exports(tmp_path, capsys):
    from headwise_verdict.reporting.command import run

    folder = write_study(tmp_path / "study", methods=NINE[:2], seeds=2, epochs=3)
    run([folder], tmp_path / "out")
    lines = capsys.readouterr().out.splitlines()
    files = [path for path in (tmp_path / "out").iterdir() if path.name != MARKER]
    assert lines == [str(folder / "report.html"), f"{len(files)} files in {tmp_path / 'out'}"]
    assert len(files) > 10


def test_a_number_in_a_name_is_never_cut():
    name = "baseline | attention_weight_decay=0.003"
    for width in range(14, 40):
        lines = _wrapped(name, width, "  ")
        assert "".join(lines).replace(" ", "") == name.replace(" ", "")
        assert all(len(line) <= width for line in lines)
        assert any("0.003" in line for line in lines), (width, lines)
