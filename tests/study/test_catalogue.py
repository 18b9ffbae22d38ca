"""The catalogue that `headwise methods` and `headwise studies` print is what the code says, and is read without
torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from headwise.lab.studies.listing import SOURCES, print_studies
from headwise.lab.studies.registry import catalogue, print_methods, study_names
from headwise_verdict.files.errors import StudyError

ROOT = Path(__file__).parents[2]


def test_the_catalogue_is_what_the_code_gives(monkeypatch):
    pytest.importorskip("headwise_papers")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import catalogue as made

    assert made.TARGET.read_text(encoding="utf-8") == made.text(), "run python docs/catalogue.py"


def test_every_method_is_for_something():
    assert not [name for name, entry in catalogue()["methods"].items() if not entry["for"]]


@pytest.mark.parametrize("command", ["methods", "studies"])
def test_a_list_is_printed_without_torch(command):
    code = (
        f"import sys; sys.argv = ['headwise', '{command}']\nfrom headwise.cli import main\ntry: main()\nfinally: "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.endswith("False\n"), done.stdout[-300:] + done.stderr


def test_methods_are_found_by_what_they_are_for_and_by_name(capsys):
    print_methods(purpose="overfitting")
    said = capsys.readouterr().out
    assert "DropHead(p=" in said and "SigmaReparam" not in said
    print_methods("drophead")
    said = capsys.readouterr().out
    assert "arXiv" in said and "headwise compare digits --method 'DropHead(p=" in said
    with pytest.raises(StudyError, match=r"no method 'DropHed'. Did you mean 'DropHead'"):
        print_methods("DropHed")
    with pytest.raises(StudyError, match=r"--for toothache: no method is for it. Purposes: overfitting; "):
        print_methods(purpose="toothache")


def test_a_verdict_that_was_found_here_is_told(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    print_studies("digits")
    said = capsys.readouterr().out
    assert "9 arms x 10 seeds; data: comes with its packages" in said and "headwise compare digits: 9 x 10" in said
    assert "kept: In test accuracy" in " ".join(said.split())
    (tmp_path / "results" / "digits").mkdir(parents=True)
    (tmp_path / "results" / "digits" / "analysis.json").write_text('{"answer": "All is well."}')
    print_studies("digits")
    said = capsys.readouterr().out
    assert "found here: All is well." in said and max(map(len, said.splitlines())) <= 80


def listed(capsys, **options):
    print_studies(**options)
    lines = capsys.readouterr().out.splitlines()
    return lines, {line.split()[0]: line for line in lines[1 : lines.index("")] if not line.startswith(" ")}


def test_every_question_is_read_to_its_end_in_a_narrow_terminal_and_in_a_pipe(capsys, monkeypatch):
    questions = [entry["question"] for name, entry in catalogue()["studies"].items() if name in study_names()]
    monkeypatch.setenv("COLUMNS", "80")
    lines, found = listed(capsys)
    assert list(found) == study_names() and max(map(len, lines)) <= 80
    assert found["digits"].split() == ["digits", "own", "6.9"]
    said = " ".join(" ".join(lines).split())
    assert questions and all(question in said for question in questions)
    monkeypatch.delenv("COLUMNS")
    # one line a study, which grep prints in full
    found = listed(capsys)[1]
    assert all(any(line.endswith(question) for line in found.values()) for question in questions)


def test_studies_are_chosen_by_source_and_minutes(capsys):
    by_source = [set(listed(capsys, source=source)[1]) for source in SOURCES]
    assert sum(map(len, by_source)) == len(set.union(*by_source)) == len(study_names())
    assert all(by_source) and "digits" in by_source[-1]
    short, found = listed(capsys, minutes=10)
    assert "digits" in found and "alarms" not in found and any("as no time was kept" in line for line in short)
    assert all(float(line.split()[2]) <= 10 for line in found.values())
    with pytest.raises(StudyError, match=r"--source nowhere: no study is from it\. Sources: blog, "):
        print_studies(source="nowhere")
    with pytest.raises(StudyError, match="there is no study 'digit'"):
        print_studies("digit")
