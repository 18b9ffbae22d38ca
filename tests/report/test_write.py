"""Writing a report: its files, their figures, and what stands in the page before any browser sees it."""

from __future__ import annotations

import csv
import json
import re

import pytest
from report.synthetic_study import NINE, write_study

import headwise.comparing.report
from headwise.comparing.results.records import read_json
from headwise.pages.shell import Cell, Column, Section, figure, page, table

TWO = ("baseline", "Other(p=0.1)")
EVIL = '<img src=x onerror="window.harmed=1"></script><b>|`*Evil'


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither study\.json nor findings\.json"):
        headwise.comparing.report.write(tmp_path)


def test_the_csv_holds_the_unrounded_figures(tmp_path):
    folder = write_study(tmp_path, methods=TWO)
    headwise.comparing.report.write(folder)
    analysis = read_json(folder / "analysis.json")
    rows = list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["method"] for row in rows] == list(TWO)
    other = analysis["methods"][1]
    assert float(rows[1]["test_accuracy"]) == other["metrics"]["test_accuracy"]["mean"]
    assert float(rows[1]["difference"]) == other["differences"]["test_accuracy"]["mean"]
    assert rows[0]["difference"] == ""


def test_the_markdown_table_shows_divergence_and_what_is_missing(tmp_path):
    folder = write_study(tmp_path, methods=TWO, diverged={(TWO[1], 3)}, missing={(TWO[1], 5)})
    headwise.comparing.report.write(folder)
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("So far, in test accuracy")
    assert lines[-1].startswith("| `Other(p=0.1)` |")
    assert "8 of 10; seed 3 diverged at step 40; 1 missing" in lines[-1]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}) == 1


def test_figures_of_the_page_are_those_of_the_analysis(tmp_path):
    folder = write_study(tmp_path, methods=TWO)
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    difference = read_json(folder / "analysis.json")["methods"][1]["differences"]["test_accuracy"]
    assert f"{100 * difference['mean']:+.2f}" in html
    assert f'data-value="{difference["mean"]}"' in html
    assert "headwise compare synthetic --seeds 10" in html
    assert 'href="runs/000100000003/result.json">000100000003<' in html


def test_a_report_says_which_runs_are_missing(tmp_path):
    html = headwise.comparing.report.write(
        write_study(tmp_path, methods=TWO, seeds=3, missing={(TWO[1], 0), (TWO[1], 2)})
    ).read_text()
    assert "This study is not finished" in html
    assert "Other(p=0.1): seeds 0, 2" in html


def test_a_study_without_any_run_still_gives_a_report(tmp_path):
    folder = write_study(
        tmp_path, methods=TWO, seeds=2, missing={(method, seed) for method in TWO for seed in range(2)}
    )
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert '<span class="missing">missing</span>' in html
    assert "0 of 4" in html


def test_a_method_name_with_html_is_escaped_everywhere(tmp_path):
    folder = write_study(tmp_path, methods=("baseline", EVIL), seeds=2, diverged={(EVIL, 1)}, watched=True)
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    markdown = (folder / "table.md").read_text(encoding="utf-8")
    assert "\\|'*Evil" in markdown


def test_a_report_is_rebuilt_to_the_same_bytes(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    first = headwise.comparing.report.write(folder).read_bytes()
    assert headwise.comparing.report.write(folder).read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [
        "analysis.json",
        "report.html",
        "runs",
        "study.json",
        "table.csv",
        "table.md",
    ]


def test_a_page_names_no_address_that_a_browser_would_open(tmp_path):
    html = headwise.comparing.report.write(write_study(tmp_path, methods=TWO, seeds=2)).read_text(encoding="utf-8")
    tags = re.sub(r"(<script[^>]*>).*?</script>", r"\1", html, flags=re.DOTALL)
    assert not re.findall(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?!data:)[^"'> ]""", tags)
    assert "default-src 'none'" in html


def test_findings_give_a_page_and_tables(tmp_path):
    findings = {
        "kind": "findings",
        "name": "made-up",
        "title": "Made up",
        "question": "Is it shown?",
        "paragraphs": ["The answer is yes.", "And <more>."],
        "tables": [{"title": "Figures", "columns": ["name", "value"], "rows": [["a|b", 0.123456789], ["c", None]]}],
        "charts": [
            {
                "title": "Line",
                "x": "step",
                "y": "value",
                "series": None,
                "data": [{"step": 1, "value": 2.0}],
                "log_y": True,
            }
        ],
        "settings": {"seeds": 1},
    }
    (tmp_path / "findings.json").write_text(json.dumps(findings), encoding="utf-8")
    html = headwise.comparing.report.write(tmp_path).read_text(encoding="utf-8")
    assert '<p class="lead">The answer is yes.</p>' in html
    assert "And &lt;more&gt;." in html
    assert "| a\\|b | 0.1235 |" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "a|b,0.123456789" in (tmp_path / "table.csv").read_text(encoding="utf-8")


def test_a_table_refuses_rows_of_another_width():
    with pytest.raises(ValueError, match=r"A table of 2 columns got rows of \[1\] cells"):
        table([Column("a"), Column("b")], [["only one"]])


@pytest.mark.parametrize("target", ["https://example.org", "//example.org", "javascript:alert(1)"])
def test_a_link_that_leaves_the_folder_is_refused(target):
    with pytest.raises(ValueError, match="must be a relative path"):
        Cell("x", href=target)


def test_a_page_without_charts_carries_no_chart_library():
    html = page("Plain", [Section("Table", table([Column("a")], [[1]]))])
    assert "vegaEmbed=" not in html
    assert len(html) < 40_000


def test_chart_data_cannot_end_its_script():
    spec = {"data": {"values": [{"name": "</script><script>window.harmed=1</script>"}]}, "mark": "point"}
    markup = str(figure(spec))
    assert markup.count("</script>") == 1
    inside = markup.split('<script type="application/json">')[1].split("</script>")[0]
    assert json.loads(inside) == spec


def test_the_nine_arms_are_told_apart_in_the_answer_table(tmp_path):
    html = headwise.comparing.report.write(write_study(tmp_path, seeds=2, epochs=3)).read_text(encoding="utf-8")
    first = html.split("<tbody>")[1].split("</tbody>")[0]
    assert len(re.findall(r'<th scope="row"', first)) == len(NINE)


def change_results(folder, names, **changes):
    for name in names:
        path = folder / "runs" / name / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_report_names_the_environment_of_the_results_and_not_that_of_the_last_start(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"commit": "started-later", "versions": {"torch": "9.9"}}))
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert "0000000" in html and "started-later" not in html and "environments, which differ" not in html


def test_results_of_several_environments_are_counted_and_told_apart(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    change_results(folder, ["000100000001"], commit="1111111", versions={"torch": "2.0"})
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert html.count("The results come from 2 environments, which differ in commit, version: torch") == 2
    assert "0000000" in html and "1111111" in html and "<dt>runs</dt><dd>3</dd>" in html
    found = read_json(folder / "analysis.json")["environments"]
    assert [(entry["runs"], entry["commit"]) for entry in found] == [(3, "0000000"), (1, "1111111")]


@pytest.mark.parametrize(("named", "words"), [((0, 1), "1 of 4 runs were not watched"), ((), ""), ((0, 1, 2), "")])
def test_a_report_says_when_some_runs_were_not_watched(tmp_path, named, words):
    folder = write_study(tmp_path, methods=TWO, seeds=2, watched=bool(named))
    names = sorted(path.name for path in (folder / "runs").iterdir())
    change_results(folder, names[:3] if named else [], watched=True)
    change_results(folder, names[3:], watched=len(named) == 3)
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert (words or "were not watched") in html if words else "were not watched" not in html


def test_what_diverged_is_not_called_missing(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2, diverged={(TWO[1], 0), (TWO[1], 1)}, epochs=3)
    html = headwise.comparing.report.write(folder).read_text(encoding="utf-8")
    assert '<span class="missing">missing</span>' not in html
    row = html.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1]
    assert row.count('<span class="tag diverged">diverged</span>') == 6
    last = (folder / "table.md").read_text(encoding="utf-8").splitlines()[-1]
    assert "missing" not in last and last.count("| diverged ") == 6


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, monkeypatch):
    from pathlib import Path

    from headwise.files.errors import StudyError

    folder = write_study(tmp_path, methods=TWO, seeds=1)

    def refuse(self, *arguments, **settings):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(StudyError, match="cannot be written: Read-only file system"):
        headwise.comparing.report.write(folder)


@pytest.mark.parametrize("content", ["[]", '{"paragraphs": [1], "tables": [{}]}', '{"tables": 3}'])
def test_findings_of_another_shape_are_named(tmp_path, content):
    (tmp_path / "findings.json").write_text(content)
    with pytest.raises(ValueError, match=r"findings\.json does not hold what a study writes.*Run the study again"):
        headwise.comparing.report.write(tmp_path)
