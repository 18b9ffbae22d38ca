"""Writing a report: its files, their figures, and what stands in the page before any browser sees it."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from report.synthetic_study import NINE, write_study

import headwise_verdict.reporting
from headwise_verdict.pages.shell import Column, Section, TableCell, figure, page, table
from headwise_verdict.reporting.export import figures_in
from headwise_verdict.results.stored import read_whole_json

TWO = ("baseline", "Other(p=0.1)")
EVIL = '<img src=x onerror="window.harmed=1"></script><b>|`*Evil'


def test_a_folder_of_neither_kind_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds neither study\.json nor findings\.json"):
        headwise_verdict.reporting.write(tmp_path)


def test_the_csv_holds_the_unrounded_figures_of_every_outcome(tmp_path):
    folder = write_study(tmp_path, methods=TWO)
    headwise_verdict.reporting.write(folder)
    analysis = read_whole_json(folder / "analysis.json")
    rows = list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["arm"], row["outcome"]) for row in rows[:2]] == [(arm, "test/accuracy") for arm in TWO]
    assert {row["outcome"] for row in rows} == set(analysis["outcomes"])
    other = analysis["arms"][1]
    assert float(rows[1]["mean"]) == other["metrics"]["test/accuracy"]["mean"]
    assert float(rows[1]["difference"]) == other["differences"]["test/accuracy"]["mean"]
    assert float(rows[1]["detectable"]) == other["differences"]["test/accuracy"]["detectable"]
    assert rows[0]["difference"] == ""


@pytest.mark.parametrize(("settings", "moment", "last"), [({}, "epoch", 3), ({"steps": 30}, "step", 30)])
def test_the_axis_of_curves_names_steps_where_a_recipe_is_set_in_steps(tmp_path, settings, moment, last):
    folder = write_study(tmp_path, methods=TWO, seeds=2, epochs=3)
    record = json.loads((folder / "study.json").read_text())
    record["settings"] |= settings
    (folder / "study.json").write_text(json.dumps(record))
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert f"Mean over seeds of every {moment};" in html
    specs = {name: spec for name, spec in figures_in(html) if name.startswith("learning-curve")}
    assert specs
    for spec in specs.values():
        rows = [row for rows in spec["datasets"].values() for row in rows]
        assert max(row["x"] for row in rows) == last
        assert {layer["encoding"]["x"]["title"] for layer in spec["layer"]} == {moment}


def test_every_outcome_is_there_by_run_and_by_epoch(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=3, epochs=4, diverged={(TWO[1], 1)}, heads=True)
    headwise_verdict.reporting.write(folder)
    runs = list(csv.DictReader((folder / "runs.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["arm"], row["seed"]) for row in runs] == [(arm, str(seed)) for arm in TWO for seed in range(3)]
    stored = read_whole_json(folder / "runs" / "000100000002" / "result.json")
    assert {name: float(runs[5][name]) for name in stored["metrics"]} == stored["metrics"]
    assert (runs[4]["status"], runs[4]["diverged_at_step"]) == ("diverged", "10")
    epochs = list(csv.DictReader((folder / "epochs.csv").read_text(encoding="utf-8").splitlines()))
    assert len(epochs) == 5 * 4 + 1
    line = json.loads((folder / "runs" / "000100000002" / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(epochs[-1]["test/loss"]) == line["metrics"]["test/loss"] and epochs[-1]["step"] == "40"


def test_latex_tables_escape_what_latex_acts_on(tmp_path):
    folder = write_study(tmp_path, methods=("baseline", "A_b(p=1) & 50% #{x} | y=1"), effects=(0, -0.03))
    headwise_verdict.reporting.write(folder)
    text = (folder / "table.tex").read_text(encoding="utf-8")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 8
    assert r"\texttt{A\_b(p=1) \& 50\% \#\{x\} \textbar{} y=1}" in text
    row = next(line for line in text.splitlines() if line.startswith(r"\texttt{A"))
    assert row.endswith(r"\\") and "$-$3." in row and "worse" in row
    columns = len(re.search(r"begin\{tabular\}\{(l?r+)\}", text)[1])
    assert all(
        len(re.findall(r"(?<!\\)&", line)) == columns - 1
        for line in text.split("end{tabular}")[0].splitlines()
        if line.endswith(r"\\")
    )


def test_the_markdown_table_shows_divergence_and_what_is_missing(tmp_path):
    folder = write_study(tmp_path, methods=TWO, diverged={(TWO[1], 3)}, missing={(TWO[1], 5)})
    headwise_verdict.reporting.write(folder)
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()
    assert "= 1.00). So far, in test accuracy" in lines[0]
    assert lines[-1].startswith("| `Other(p=0.1)` |")
    assert "8 of 10; seed 3 diverged at step 40; 1 missing" in lines[-1]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:]}) == 1


def test_figures_of_the_page_are_those_of_the_analysis(tmp_path):
    folder = write_study(tmp_path, methods=TWO)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    difference = read_whole_json(folder / "analysis.json")["arms"][1]["differences"]["test/accuracy"]
    assert f"{100 * difference['mean']:+.2f}" in html
    assert f'data-value="{difference["mean"]}"' in html
    assert "headwise compare synthetic --seeds 10" in html
    assert 'href="runs/000100000003/result.json">000100000003<' in html


def test_a_report_says_which_runs_are_missing(tmp_path):
    html = headwise_verdict.reporting.write(
        write_study(tmp_path, methods=TWO, seeds=3, missing={(TWO[1], 0), (TWO[1], 2)})
    ).read_text()
    assert "This study is not finished" in html
    assert "Other(p=0.1): seeds 0, 2" in html


def test_a_study_without_any_run_still_gives_a_report(tmp_path):
    folder = write_study(
        tmp_path, methods=TWO, seeds=2, missing={(method, seed) for method in TWO for seed in range(2)}
    )
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert '<span class="missing">missing</span>' in html
    assert "0 of 4" in html


def test_a_method_name_with_html_is_escaped_everywhere(tmp_path):
    folder = write_study(tmp_path, methods=("baseline", EVIL), seeds=2, diverged={(EVIL, 1)}, watched=True)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html
    markdown = (folder / "table.md").read_text(encoding="utf-8")
    assert "\\|'*Evil" in markdown


def test_a_report_is_rebuilt_to_the_same_bytes(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    first = headwise_verdict.reporting.write(folder).read_bytes()
    assert headwise_verdict.reporting.write(folder).read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == [
        ".headwise",
        "analysis.json",
        "epochs.csv",
        "report.html",
        "runs",
        "runs.csv",
        "study.json",
        "table.csv",
        "table.md",
        "table.tex",
    ]


def test_a_page_names_no_address_that_a_browser_would_open(tmp_path):
    html = headwise_verdict.reporting.write(write_study(tmp_path, methods=TWO, seeds=2)).read_text(encoding="utf-8")
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
    html = headwise_verdict.reporting.write(tmp_path).read_text(encoding="utf-8")
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
        TableCell("x", href=target)


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
    html = headwise_verdict.reporting.write(write_study(tmp_path, seeds=2, epochs=3)).read_text(encoding="utf-8")
    first = html.split("Every arm against the baseline</caption>")[1].split("<tbody>")[1].split("</tbody>")[0]
    assert len(re.findall(r'<th scope="row"', first)) == len(NINE)


def change_results(folder, names, **changes):
    for name in names:
        path = folder / "runs" / name / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_report_names_the_environment_of_the_results_and_not_that_of_the_last_start(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    study = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(study | {"commit": "started-later", "versions": {"torch": "9.9"}}))
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert "0000000" in html and "started-later" not in html and "environments, which differ" not in html


def test_results_of_several_environments_are_counted_and_told_apart(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2)
    change_results(folder, ["000100000001"], commit="1111111", versions={"torch": "2.0"})
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert html.count("The results come from 2 environments, which differ in commit, version: torch") == 2
    assert "0000000" in html and "1111111" in html and "<dt>runs</dt><dd>3</dd>" in html
    found = read_whole_json(folder / "analysis.json")["environments"]
    assert [(entry["runs"], entry["commit"]) for entry in found] == [(3, "0000000"), (1, "1111111")]


@pytest.mark.parametrize(("named", "words"), [((0, 1), "1 of 4 runs were not watched"), ((), ""), ((0, 1, 2), "")])
def test_a_report_says_when_some_runs_were_not_watched(tmp_path, named, words):
    folder = write_study(tmp_path, methods=TWO, seeds=2, watched=bool(named))
    names = sorted(path.name for path in (folder / "runs").iterdir())
    change_results(folder, names[:3] if named else [], watched=True)
    change_results(folder, names[3:], watched=len(named) == 3)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert (words or "were not watched") in html if words else "were not watched" not in html


def test_what_diverged_is_not_called_missing(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=2, diverged={(TWO[1], 0), (TWO[1], 1)}, epochs=3)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert '<span class="missing">missing</span>' not in html
    table = html.split("Every arm against the baseline</caption>")[1]
    row = table.split("<tbody>")[1].split("</tbody>")[0].split("<tr>")[1]
    assert row.count('<span class="tag diverged">diverged</span>') == 6
    last = (folder / "table.md").read_text(encoding="utf-8").splitlines()[-1]
    assert "missing" not in last and last.count("| diverged ") == 6


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path, monkeypatch):
    import os

    from headwise_verdict.files.errors import StudyError

    folder = write_study(tmp_path, methods=TWO, seeds=1)

    def refuse(path, *arguments):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        StudyError, match=r"cannot be written: Read-only file system\. .* or work on a copy of the folder"
    ):
        headwise_verdict.reporting.write(folder)


@pytest.mark.parametrize("content", ["[]", '{"paragraphs": [1], "tables": [{}]}', '{"tables": 3}'])
def test_findings_of_another_shape_are_named(tmp_path, content):
    (tmp_path / "findings.json").write_text(content)
    with pytest.raises(ValueError, match=r"findings\.json (is not a valid|contains \[\]).*[Rr]un the study again"):
        headwise_verdict.reporting.write(tmp_path)


def test_the_charts_and_the_tables_can_be_exported(tmp_path):
    from headwise_verdict.reporting.export import export

    axis = ("A.p", (0.1, 0.2, 0.4), ("A(p=0.1)", "A(p=0.2)", "A(p=0.4)"))
    arms = ("baseline", *axis[2])
    folder = write_study(tmp_path / "study", methods=arms, seeds=3, epochs=3, axes=[axis])
    written = export(folder, tmp_path / "out")
    names = {path.name for path in written}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {".headwise"}
    assert {"table.csv", "table.tex", "runs.csv", "epochs.csv"} <= names
    figures = {name.removesuffix(".svg") for name in names if name.endswith(".svg")}
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    assert len(figures) == html.count("<figure id=") == len(set(re.findall(r'<figure id="([^"]+)"', html)))
    assert {f"{name}.png" for name in figures} <= names
    assert {"paired-differences-in-test-accuracy", "test-accuracy-along-a-p"} <= figures
    forest = (tmp_path / "out" / "paired-differences-in-test-accuracy.svg").read_text(encoding="utf-8")
    assert forest.startswith("<svg") and "var(" not in forest and "A(p=0.4)" in forest
    png = (tmp_path / "out" / "test-accuracy-along-a-p.png").read_bytes()
    # the width of a PNG stands in its header
    assert png[:4] == b"\x89PNG" and int.from_bytes(png[16:20], "big") > 1200


def test_an_export_into_a_file_is_a_message(tmp_path):
    from headwise_verdict.files.errors import StudyError
    from headwise_verdict.reporting.export import export

    folder = write_study(tmp_path / "study", methods=TWO, seeds=1, epochs=3)
    (tmp_path / "out").write_text("here")
    with pytest.raises(StudyError, match="out"):
        export(folder, tmp_path / "out")


def test_a_kept_analysis_without_runs_is_refused_by_name(tmp_path):
    (tmp_path / "analysis.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"holds the kept analysis of a study, without the runs"):
        headwise_verdict.reporting.write(tmp_path)


@pytest.mark.parametrize("name", ["low-rank-toy", "oversmoothing-at-init"])
def test_kept_findings_can_be_read(tmp_path, name):
    kept = Path(__file__).parents[3] / "docs" / "results" / name / "findings.json"
    shutil.copy(kept, tmp_path)
    html = headwise_verdict.reporting.write(tmp_path).read_text(encoding="utf-8")
    stored = json.loads(kept.read_text())
    assert html.count("<caption>") == len(stored["tables"]) + bool(stored.get("claims")) and stored["title"] in html


def test_divergence_stands_first_where_there_is_any(tmp_path):
    settings = {"methods": TWO, "seeds": 8, "epochs": 3}
    html = headwise_verdict.reporting.write(
        write_study(tmp_path / "a", **settings, diverged={(TWO[1], seed) for seed in range(7)}, failure=0.1)
    ).read_text()
    order = re.findall(r'<section id="([^"]+)"', html)
    assert order[:3] == ["paired-differences", "result", "divergence"]
    assert "counts as 0.1 in test accuracy" in html and "more often" in html
    calm = headwise_verdict.reporting.write(write_study(tmp_path / "b", **settings)).read_text()
    assert 'id="divergence"' not in calm


def specifications(html, name):
    found = re.findall(r'<figure id="figure-([^"]+)".*?<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return {key: json.loads(spec) for key, spec in found if name in key}


def test_the_forest_plot_holds_a_dot_for_each_seed_and_the_numbers(tmp_path):
    folder = write_study(tmp_path, methods=TWO, seeds=7, epochs=3, margin=0.01)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    (spec,) = specifications(html, "paired-differences").values()
    rows = [row for rows in spec["datasets"].values() for row in rows]
    by_seed = read_whole_json(folder / "analysis.json")["arms"][1]["differences"]["test/accuracy"]["by_seed"]
    dots = {row["seed"]: row["value"] for row in rows if "seed" in row}
    assert dots == {seed: pytest.approx(100 * value, rel=1e-6) for seed, value in by_seed.items()}
    assert any("[" in row.get("number", "") for row in rows) and {"from": -1.0, "to": 1.0} in rows


def test_all_arms_share_one_colour_scale_and_differences_are_symmetric(tmp_path):
    arms = ("baseline", "A()", "B()")
    folder = write_study(tmp_path, methods=arms, effects=(0, 0.05, -0.03), seeds=6, epochs=3, heads=True, watched=True)
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")

    def scale(spec):
        return next(layer for layer in spec.get("layer", [spec]) if "color" in layer["encoding"])["encoding"]["color"][
            "scale"
        ]

    def domain(spec):
        return scale(spec)["domain"]

    found = specifications(html, "attention-entropy")
    heads = [domain(spec) for name, spec in found.items() if re.fullmatch(r"attention-entropy-nats(-\d+)?", name)]
    values = [one for one in heads if one[0] != -one[1]]
    assert len(values) >= 6 and all(one == values[0] for one in values)
    differences = specifications(html, "difference-to-baseline")
    assert {"token-cosine-difference-to-baseline", "token-cosine-cosine-by-step-difference-to-baseline"} <= set(
        differences
    )
    assert all(
        domain(spec)[0] == -domain(spec)[1] and scale(spec)["scheme"] == "blueorange" for spec in differences.values()
    )
    rows = [row for rows in differences["token-cosine-difference-to-baseline"]["datasets"].values() for row in rows]
    assert {row["mark"] for row in rows if row["layer"] == "3"} == {"●"} and {row["arm"] for row in rows} == {
        "A()",
        "B()",
    }


def test_anchors_are_unique_and_a_reader_without_scripts_is_told(tmp_path):
    html = headwise_verdict.reporting.write(
        write_study(tmp_path, methods=TWO, seeds=6, epochs=3, heads=True, watched=True)
    ).read_text(encoding="utf-8")
    anchors = re.findall(r'<(?:section|figure) id="([^"]+)"', html)
    assert len(anchors) == len(set(anchors)) > 10
    assert "<noscript>" in html and html.count('role="img" aria-label="') == html.count("<figure id=")
    assert 'aria-label=""' not in html


@pytest.mark.grid
def test_the_work_of_a_report_grows_no_faster_than_its_runs(tmp_path):
    def work(seeds):
        methods = tuple(f"A(p={at})" for at in range(10))
        folder = write_study(tmp_path / str(seeds), methods=methods, seeds=seeds, epochs=10)
        start = time.process_time()
        headwise_verdict.reporting.write(folder)
        return time.process_time() - start

    # once before, which imports
    work(2)
    few, many = work(3), work(24)
    # eight times the runs; what compares each run with each would take 64 times as long
    assert many / few < 16
