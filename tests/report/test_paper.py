"""What a report says first, what it suggests, and what it writes for a paper."""

from __future__ import annotations

import json
import math
import re

import pytest
from report.synthetic_study import write_study

import headwise.attend.methods as methods
import headwise_verdict.reporting
from headwise.attend.core.method import REGISTRY
from headwise_verdict.reporting.answer_table import answer_table
from headwise_verdict.reporting.difference_section import forest_section
from headwise_verdict.reporting.export import entries, export
from headwise_verdict.reporting.headline import headline, next_step, seeds_that_decide
from headwise_verdict.reporting.study_page import chosen_by_trials
from headwise_verdict.results.analysis import analyse, analyse_study
from headwise_verdict.results.folder import read_study

ARMS = ("baseline", "DropHead(p=0.2)", "DropColumn(p=0.2)", "QKNorm()")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_study(tmp_path_factory.mktemp("study"), methods=ARMS, effects=(0, 0.03, -0.02, 0.002), epochs=3)
    study = json.loads((made / "study.json").read_text())
    study["notes"] = [
        "baseline: 8 trials on validation chose baseline with learning rate 0.001.",
        "DropHead(p=0.1): 8 trials on validation chose DropHead(p=0.2) with learning rate 0.0012.",
        "DropColumn(p=0.2): all of 8 trials on validation diverged; it stays DropColumn(p=0.2) with learning rate "
        "0.002.",
        "No other note.",
    ]
    (made / "study.json").write_text(json.dumps(study))
    return made


@pytest.fixture(scope="module")
def analysis(folder):
    return analyse_study(read_study(folder))


def test_the_headline_is_sentences_of_effects_and_intervals_the_best_first(analysis):
    told = headline(analysis)
    amount = r"\d\.\d+ points \(95\u00a0% CI \d\.\d+ to \d\.\d+; 10 paired seeds\)"
    assert re.fullmatch(
        rf"DropHead raises test accuracy by {amount}\. DropColumn lowers it by {amount}\. "
        r"No evidence of a difference for QKNorm\.",
        told,
    ), told
    entry = analysis.arms[1].differences["test/accuracy"]
    assert f"by {100 * entry.mean:.2f} points" in told
    # the interval of what is lowered is that of its size
    lower = analysis.arms[2].differences["test/accuracy"]
    assert f"CI {-100 * lower.high:.2f} to {-100 * lower.low:.2f};" in told


def test_the_headline_names_no_cost_and_counts_many_arms(tmp_path):
    arms = ("baseline", "A()", "B()", "C()", "D()", "E()")
    made = write_study(tmp_path, methods=arms, effects=(0, 0.03, 0.04, 0.05, 0.03, -0.04), epochs=3)
    told = headline(analyse_study(read_study(made)))
    assert re.match(r"Four arms raise test accuracy, C most: by \d\.\d+ points \(95", told), told
    assert re.search(r"\. E lowers test accuracy by \d", told) and not re.search(r"\btime\b|\bms\b|\bstep\b", told)


def test_the_headline_tells_what_could_have_been_detected_where_there_is_no_evidence(tmp_path):
    made = write_study(tmp_path, methods=(ARMS[0], ARMS[3]), effects=(0, 0), epochs=3)
    found = analyse_study(read_study(made))
    seen = found.arms[1].differences["test/accuracy"].detectable
    assert (
        headline(found)
        == f"No evidence of a difference in test accuracy (80\u00a0% power to detect {100 * seen:.2f} points)."
    )


def test_divergence_leads_the_headline_where_it_is_decided(tmp_path):
    made = write_study(
        tmp_path, methods=ARMS[:2], effects=(0, 0.03), epochs=3, diverged={(ARMS[1], seed) for seed in range(8)}
    )
    assert headline(analyse_study(read_study(made))).startswith(
        "DropHead(p=0.2) diverged in 8 of 10 seeds, baseline in 0 (more often"
    )


def test_the_next_step_names_the_arm_that_needs_the_fewest_seeds(analysis):
    told = next_step(analysis)
    entry = analysis.arms[3].differences["test/accuracy"]
    assert entry.verdict == "no evidence"
    seeds = int(re.search(r"^Next: (\d+) seeds would decide QKNorm", told)[1])
    assert len(analysis.seeds) < seeds <= 100


def test_an_arm_that_always_diverged_is_no_next_step_and_lost_pairs_are_counted(tmp_path):
    """What diverged in ten of ten seeds is decided; of what diverges in six of ten, only four in ten seeds make a
    pair."""
    lost = {("A()", seed) for seed in range(10)} | {("B()", seed) for seed in range(6)}
    made = write_study(tmp_path, methods=("baseline", "A()", "B()"), effects=(0, 0.02, 0.02), epochs=3, diverged=lost)
    found = analyse(made)
    pairs = seeds_that_decide(found.compared[1].differences["test/accuracy"])
    assert f"{math.ceil(pairs * 10 / 4)} seeds would decide B" in next_step(found)
    only = write_study(tmp_path / "only", methods=("baseline", "A()"), epochs=3, diverged=lost)
    assert next_step(analyse(only)) == ""


def test_a_name_of_several_words_is_the_subject_of_its_sentence(tmp_path):
    arm = "DropHead(p=0.2) | learning_rate=0.01"
    made = write_study(tmp_path, methods=("baseline", arm), effects=(0, 0.02), epochs=3)
    assert headline(analyse(made)).startswith("DropHead | learning_rate=0.01 raises test accuracy by ")


def test_a_difference_too_small_for_seeds_asks_for_another_setting(analysis):
    arm = analysis.arms[3]
    entry = arm.differences["test/accuracy"].model_copy(update={"mean": 1e-5, "low": -0.01, "high": 0.01})
    open_ = arm.model_copy(update={"differences": {"test/accuracy": entry}})
    small = analysis.model_copy(update={"arms": [*analysis.arms[:3], open_]})
    assert next_step(small).startswith("Next: another setting. More than 100 seeds would be needed to decide QKNorm")


def test_arms_without_pairs_are_asked_for_no_seeds_and_their_differences_are_called_of_means(analysis):
    """How many seeds would decide is computed from pairs; ten seeds had run, and six were asked for."""
    arm = analysis.arms[3]
    entry = arm.differences["test/accuracy"].model_copy(update={"paired": False, "by_seed": {}})
    unpaired = arm.model_copy(update={"differences": {"test/accuracy": entry}})
    alone = analysis.model_copy(update={"arms": [analysis.arms[0], unpaired]})
    assert next_step(alone) == "" and next_step(analysis)
    page = "".join([str(answer_table(alone)), *(section.title for section in forest_section(alone))])
    assert "of means, points" in page and "Differences of means" in page and "aired" not in page


def test_every_arm_shows_its_trials_and_what_they_chose(folder):
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    first = html.split("Every arm against the baseline</caption>")[1].split("</tbody>")[0]
    assert "chosen by 8 trials; learning rate 0.001" in first
    assert "chosen by 8 trials, from DropHead(p=0.1); learning rate 0.0012" in first
    assert "all of 8 trials diverged; learning rate 0.002" in first
    assert chosen_by_trials(["Every number is made up."]) == {}


def test_the_table_that_answers_is_sorted_by_effect_and_speaks_plainly(folder, analysis):
    html = headwise_verdict.reporting.write(folder).read_text(encoding="utf-8")
    body = html.split("Every arm against the baseline</caption>")[1].split("<tbody>")[1].split("</tbody>")[0]
    # <wbr> stands before the settings of a name
    names = [re.sub("<.*?>", "", found) for found in re.findall(r'<th scope="row"[^>]*>(.*?)(?: <small>|</th>)', body)]
    assert names == ["baseline", "DropHead(p=0.2)", "QKNorm()", "DropColumn(p=0.2)"]
    seen = analysis.arms[3].differences["test/accuracy"].detectable
    assert body.count("no evidence") == 1 and body.count(f">{100 * seen:.2f}</td>") == 1
    assert 'data-name="detectable"' in html.split("Every arm against the baseline</caption>")[1].split("<tbody>")[0]
    # methodology is folded
    assert "<summary><h3>How this was judged</h3></summary>" in html


def test_the_export_holds_what_a_paper_takes(folder, tmp_path, analysis):
    export(folder, tmp_path / "out")
    table = (tmp_path / "out" / "paper-table.tex").read_text(encoding="utf-8")
    assert r"\begin{tabular}{@{}lrrr@{}}" in table and table.count(r" \\") == 5
    rows = [line.split(" & ") for line in table.splitlines() if line.endswith(r"\\")]
    assert [row[0] for row in rows] == ["arm", "baseline", "DropHead", "QKNorm", "DropColumn"] and {
        len(row) for row in rows
    } == {4}
    entry = analysis.arms[1].differences["test/accuracy"]
    assert rows[2][2].startswith(f"+{100 * entry.mean:.2f} [") and "$-$" in rows[4][2]
    text = (tmp_path / "out" / "paper-text.tex").read_text(encoding="utf-8")
    assert "Over 10 seeds, DropHead raises test accuracy by " in text and "; p = 0.0" in text
    assert (
        "; DropColumn lowers it by " in text
        and "there is no evidence that QKNorm changes it (" in text
        and r"80~\% power to detect " in text
    )
    assert {path.suffix for path in (tmp_path / "out").glob("paired-differences-*")} == {".svg", ".pdf", ".png"}
    assert next((tmp_path / "out").glob("paired-differences-*.pdf")).read_bytes().startswith(b"%PDF-")
    assert r"\texttt{DropHead(p=0.2)}, \cite{zhou2020}" in text
    bib = (tmp_path / "out" / "paper-references.bib").read_text(encoding="utf-8")
    assert re.findall(r"@misc\{(\w+),", bib) == ["zhou2020", "meindl2023", "zehui2019", "dehghani2023"]
    assert "Scheduled {DropHead}: A Regularization Method for Transformer Models" in bib and "usedby" not in bib
    # plain styles print notes, and no eprint
    assert "note = {arXiv:2004.13342}" in bib
    keys = set(re.findall(r"\\cite\{(\w+)\}", text))
    assert keys == set(re.findall(r"@misc\{(\w+),", bib))


@pytest.mark.grid
def test_a_long_name_is_folded_in_the_table_of_a_paper(tmp_path):
    """A row as wide as its name would leave the column; nothing in a name acts in LaTeX."""
    long = r'Mine(text="50% & $x_1$ #~^{}") @ 2-5 | learning_rate=0.001, weight_decay=0.1, clip=1'
    made = write_study(tmp_path / "study", methods=("baseline", long), seeds=2, epochs=3)
    export(made, tmp_path / "out")
    table = (tmp_path / "out" / "paper-table.tex").read_text(encoding="utf-8")
    assert r"\begin{tabular}{@{}p{0.3\columnwidth}rrr@{}}" in table
    row = next(line for line in table.splitlines() if line.startswith(r"\raggedright Mine"))
    assert row.count(" & ") == 3 and not re.search(r"(?<![\\])[%#_]", row)


@pytest.mark.grid
def test_a_method_without_an_entry_is_named(tmp_path):
    made = write_study(tmp_path / "study", methods=("baseline", "Mine(p=0.1)"), seeds=2, epochs=3)
    export(made, tmp_path / "out")
    assert (tmp_path / "out" / "paper-references.bib").read_text() == "% No entry is known for Mine.\n"


def test_every_method_has_an_entry_of_the_paper_that_it_names():
    known = entries()
    for name in methods.__all__:
        mine = [text for used, text in known.values() if name in used]
        assert mine, name
        for text in mine:
            eprint, author, year = (
                re.search(one, text) for one in (r"eprint = .([\d.]+)", r"author = .+?(\w+)", r"year = .(\d+)")
            )
            ways = [eprint[1]] if eprint else []
            ways += [f"{author[1]} {year[1]}", f"{author[1]} et al. {year[1]}"]
            assert any(way in REGISTRY[name].paper for way in ways), (name, text)
    assert all(name in methods.__all__ for used, _ in known.values() for name in used)
