"""The site: links of the written pages, the check of the built site, and the pages generated from the registry and the
kept results."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from grids import part_of_grid

import headwise
from headwise.attend import methods
from headwise.attend.core.method import REGISTRY

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WRITTEN = [
    path
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    if not {"generated", ".ipynb_checkpoints"} & {*path.relative_to(ROOT).parts}
]
ADDRESS = re.compile(r"https?://[\w.-]+\.[a-z]{2,}(:\d+)?(/\S*)?$")


@pytest.fixture(scope="module")
def site():
    # after the session's own paths, so that no test finds another module of these names
    added = [str(DOCS / "site"), str(DOCS)]
    sys.path.extend(added)
    import check_links
    import gallery
    import method_pages
    import reference

    yield {"links": check_links, "gallery": gallery, "methods": method_pages, "reference": reference}
    for path in added:
        sys.path.remove(path)


def links(path: Path) -> list[str]:
    """Return the targets of the links of a Markdown file, without code."""
    text = re.sub(r"^```(?!\{include).*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))


def anchors(path: Path) -> set[str]:
    """Return the anchors of the headings of a Markdown file."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def tables(text: str) -> list[list[int]]:
    """Return the number of cells of each row of each table of a Markdown text, one list a table."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\|.*\n\|[ :|-]+\n(?:\|.*\n?)*", text, re.MULTILINE)
    return [[len(re.split(r"(?<!\\)\|", row.strip().strip("|"))) for row in table.splitlines()] for table in found]


def made_by_the_build() -> set[Path]:
    """Return the pages that are in docs/generated once the site is built."""
    pages = {DOCS / "generated" / "gallery.md"}
    pages |= {DOCS / "generated" / "methods" / f"{name}.md" for name in (*methods.__all__, "index")}
    return pages | {
        DOCS / "generated" / "api" / f"{name}.md"
        for name in (
            "index",
            "headwise",
            "study",
            "report",
            "lightning",
            "axolotl",
            "own_method",
            "testing",
            "objects",
            "statistics",
            "command_line",
        )
    }


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_what_is_written_lead_somewhere(path):
    for link in links(path):
        target, _, place = link.partition("#")
        if "://" in link:
            assert ADDRESS.match(link), link
            continue
        found = (path.parent / target).resolve() if target else path
        assert found.exists() or found in made_by_the_build(), f"{path.name}: {link}"
        if place and found.suffix == ".md" and found.is_file():
            assert place in anchors(found), f"{path.name}: {link}"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_rows_of_a_table_are_of_one_length(path):
    # a table whose second line is longer than its first is shown as text
    assert all(len(set(cells)) == 1 for cells in tables(path.read_text(encoding="utf-8")))


def test_a_table_whose_rows_differ_is_found():
    assert tables("| a | b |\n| --- | --- | --- |\n| 1 | 2 \\| 3 |\n") == [[2, 3, 2]]
    assert not tables("```\n| a |\n| - | - |\n```\n")


@pytest.fixture(scope="module")
def api(site, tmp_path_factory):
    """Return the folder of the written API reference, for which every command's help is printed."""
    folder = tmp_path_factory.mktemp("reference") / "api"
    site["reference"].write(folder)
    return folder


def test_the_names_that_the_build_makes_are_those_that_links_may_have(api):
    written = {DOCS / "generated" / "api" / path.name for path in api.iterdir()}
    assert written == {path for path in made_by_the_build() if path.parent.name == "api"}
    text = "".join(path.read_text(encoding="utf-8") for path in api.glob("*.md"))
    for name in [name for name in dir(headwise) if name not in methods.__all__ and name != "__version__"]:
        assert len(re.findall(rf"auto\w+:: headwise\.{name}\n", text)) == 1, name
    assert "headwise audit" in text and "--jobs" in text
    own = (api / "own_method.md").read_text(encoding="utf-8")
    assert "### `rowwise`\n\nDefault: `False`. Whether" in own and "### `weights`\n\n```python\nweights(self" in own


def test_every_statistic_is_explained_in_one_table_and_in_full(api):
    from headwise.health.statistics import STATISTICS
    from headwise.health.statistics.weights import WEIGHT_STATISTICS
    from headwise.health.watching.drift import DRIFTS
    from headwise.health.watching.whole_model import OF_MODEL

    text = (api / "statistics.md").read_text(encoding="utf-8")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if re.match(r"\| \[?`", line)]
    assert [re.search(r"`(\w+)`", row[0])[1] for row in rows] == [*STATISTICS, *WEIGHT_STATISTICS, *OF_MODEL, *DRIFTS]
    assert all(cell.strip() for row in rows for cell in row)
    headings = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert headings == [*STATISTICS, *WEIGHT_STATISTICS]
    # a stroke of a formula is not a border of the table
    assert {len(row) for row in rows} == {2, 3} and r"\|i − j\|" in text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('<a href="absent.html">x</a>', "the file does not exist"),
        ('<a href="#absent">x</a>', "the place does not exist"),
        ('<a href="other.html#absent">x</a>', "the place does not exist"),
        ('<a href="https://">x</a>', "is not an address"),
        ('<img src="absent.svg">', "the file does not exist"),
        ('<script src="https://example.org/x.js"></script>', "is loaded from elsewhere"),
    ],
)
def test_a_link_of_the_built_site_that_leads_nowhere_is_named(site, tmp_path, body, problem):
    (tmp_path / "other.html").write_text(
        '<h1 id="here">x</h1><a href="#here">y</a> <a href="https://example.org/z">z</a>'
    )
    (tmp_path / "page.html").write_text('<a href="other.html#here">x</a>')
    assert site["links"].problems(tmp_path) == []
    (tmp_path / "page.html").write_text(body)
    (found,) = site["links"].problems(tmp_path)
    assert found.startswith("page.html: ") and problem in found
    assert site["links"].main([str(tmp_path)]) == 1


def test_a_page_that_is_too_large_is_named(site, tmp_path):
    (tmp_path / "page.html").write_text("x" * site["links"].LIMIT)
    assert site["links"].problems(tmp_path) == []
    (tmp_path / "page.html").write_text("x" * (site["links"].LIMIT + 1))
    assert site["links"].problems(tmp_path) == ["page.html: has 250,001 bytes, more than 250,000: split it"]


def test_an_empty_site_is_no_good_site(site, tmp_path):
    assert site["links"].main([str(tmp_path)]) == 1


def test_every_method_has_its_formula_and_says_when_to_use_it(site):
    texts = site["methods"].entries()
    assert {*texts} == {*methods.__all__}, "docs/site/methods.toml has an entry for each method: formula and when"
    for name, one in texts.items():
        assert {"family", "formula", "when"} <= {*one} <= {"family", "formula", "when", "picture"}, name
        assert headwise.parse(one.get("picture", name))[0].__class__ is REGISTRY[name]


def test_a_method_page_shows_every_study_in_which_the_method_ran_and_says_no_more_of_it(site):
    import method_results

    def read(name):
        lines = method_results.results_of(name).partition(method_results.LEAGUE)[0].splitlines()
        return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")][2:]

    rows = read("DropHead")
    kept = [
        path.parent
        for path in (DOCS / "results").glob("*/analysis.json")
        if '"label": "DropHead(' in path.read_text(encoding="utf-8")
    ]
    assert {re.search(r"\[([\w-]+)\]", row[-1])[1] for row in rows} == {path.name for path in kept}
    digits = next(row for row in rows if "digits" in row[-1])
    page = (DOCS / "results" / "digits" / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"\| `DropHead\(p=0.2\)` \|[^|]+\| ([^|]+) \|", page)[1]
    assert digits[4].replace(" points", "").strip() == shown and digits[5].strip() == "better"
    # an arm that trains longer is compared with the plain model that does; a failed premise is in the row
    longer = next(row for row in read("NeuTRENO") if "NeuTRENO(strength=0.6) \\| steps=100`" in row[1])
    assert longer[2].strip() == "`baseline \\| steps=100`" and longer[4].startswith(" +")
    assert all("a premise failed" in row[5] for row in read("SigmaReparam") if "sigma-simclr" in row[-1])
    # a method that is only in a calculation, and one that was never run
    assert (
        "[sigma-bound]" in method_results.results_of("SigmaReparam")
        and method_results.results_of("SpectralCap") == method_results.NONE
    )
    claims = re.compile(r"\b(helped|best|better|beats|wins|outperforms|digits|CIFAR|ImageNet)\b")
    assert not [name for name, one in site["methods"].entries().items() if claims.search(one["when"])]


def test_notes_on_searches_stand_in_no_list_of_pages(site, tmp_path):
    made = (DOCS / "site" / "gallery.py").read_text(encoding="utf-8")
    assert "results/*/*" not in made
    conf = (DOCS / "site" / "conf.py").read_text(encoding="utf-8")
    assert "orphan: true" in conf
    lists = [path.read_text(encoding="utf-8") for path in WRITTEN if path.parent == DOCS]
    assert not [text for text in lists if re.search(r"^results/.*(search|quick|pre)$", text, re.MULTILINE)]


# make docs writes all pages
@pytest.mark.parametrize(
    "name", part_of_grid(methods.__all__, ("DropHead", "DropKey", "EntropyPenalty", "SigmaReparam"))
)
def test_the_page_of_a_method_has_picture_code_and_cost(site, tmp_path, name):
    pages = site["methods"]
    texts = pages.entries()[name]
    text = pages.page(name, texts, tmp_path)
    assert texts["formula"] in text and REGISTRY[name].paper in text and "## The two forms" in text
    stages = [stage for stage in (*pages.STAGES, *pages.TWINS["read"]) if REGISTRY[name].overrides(stage)]
    assert stages and all(f"def {stage}(" in text for stage in stages)
    # the picture shows something: the maps with the method differ visibly from the plain ones
    plain, seen, _ = pages.pictured(headwise.parse(texts.get("picture", name))[0])
    assert REGISTRY[name].only_rounding or (seen - plain).abs().max() >= 0.05 * plain.max()
    assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8").count("<rect") == 4 * (100 + 1)


def test_every_kept_analysis_gives_figures(site):
    kept = [path.parent for path in sorted((DOCS / "results").glob("*/analysis.json"))]
    assert kept
    for folder in kept:
        own, drawn = site["gallery"].shown(folder), dict(site["gallery"].specifications(folder))
        assert bool(own) != bool(drawn), folder.name
        assert all((folder / f"{name}.svg").is_file() for name in own)
        assert any(name.startswith(("paired-differences", "differences-in")) for name in (*own, *drawn)), folder.name


@pytest.mark.parametrize("kept", sorted((DOCS / "results").glob("*/analysis.json")), ids=lambda path: path.parent.name)
def test_the_page_of_a_study_says_the_answer_of_its_analysis(kept):
    answer = json.loads(kept.read_text(encoding="utf-8"))["answer"]
    assert answer in kept.with_name("README.md").read_text(encoding="utf-8")


def test_a_method_page_shows_its_rows_of_the_league(site):
    import method_results

    rows = list(csv.DictReader((DOCS / "league" / "league.csv").read_text(encoding="utf-8").splitlines()))
    own = [row for row in rows if "DropHead(" in row["arm"]]
    shown = method_results.results_of("DropHead").partition(method_results.LEAGUE)[2]
    assert own and all(f"`{row['chosen']}`, rate {float(row['learning_rate']):g}" in shown for row in own)
    assert method_results.LEAGUE not in method_results.results_of("LinearAttention")


def test_pictures_in_the_documentation_name_the_command_that_makes_them():
    drawn = [path for path in DOCS.rglob("*") if path.suffix in (".svg", ".png") and "generated" not in path.parts]
    assert drawn
    texts = {
        folder: "\n".join(other.read_text(encoding="utf-8") for other in WRITTEN if other.parent == folder)
        for folder in {p.parent for p in WRITTEN}
    }
    results = DOCS / "results"
    for path in drawn:
        text = texts.get(path.parent, texts[DOCS]) + texts[ROOT]
        # the dark version of a picture is shown in dark mode
        assert path.name in text or path.name.replace("-dark", "") in text, f"{path} is shown nowhere"
        command = (
            r"python docs/keep_results\.py" if results in path.parents else r"python docs/(pictures|which_method)\.py"
        )
        assert re.search(command, texts[results] if results in path.parents else text), (
            f"{path}: the command that makes it"
        )


@pytest.mark.grid
def test_the_loop_of_the_first_screen_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = text.split("<!-- first screen: begin -->")[1].split("<!-- first screen: end -->")[0]
    code = screen.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 12 and len(text.splitlines()) < 120
    before = (
        "import torch, headwise\nfrom transformers import BertConfig, BertForMaskedLM\n"
        "model = BertForMaskedLM(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, "
        "intermediate_size=16, vocab_size=9))\n"
        "loader = [{'input_ids': torch.randint(0, 9, (2, 4)), 'labels': torch.randint(0, 9, (2, 4))}]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{before}{code}print(handle.step)"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout == "1\n", done.stderr


def test_what_a_cell_printed_in_pieces_is_one_text(site):
    pytest.importorskip("myst_nb", reason="myst-nb is not installed: pip install -e '.[docs]'")
    import streams

    def piece(name, text):
        return {"output_type": "stream", "name": name, "text": text}

    shown = {"output_type": "display_data"}
    merged = streams.joined([piece("stderr", "bad"), piece("stdout", "model.la"), shown, piece("stdout", "yers\n")])
    assert [(one.get("name"), one.get("text")) for one in merged] == [
        ("stdout", "model.layers\n"),
        ("stderr", "bad"),
        (None, None),
    ]
    # the name that is replaced exists
    import myst_nb.core.render

    assert callable(myst_nb.core.render.coalesce_streams)


@pytest.mark.parametrize(
    "name", ["start", "training_script", "trainer", "fine_tuning", "my_loss_exploded", "audit", "compare", "own_task"]
)
def test_code_of_the_first_hour_fits_its_column(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks and not [line for block in blocks for line in block.splitlines() if len(line) > 88]


def test_every_script_that_can_check_its_page_is_run_by_the_linter_or_by_a_test(site, tmp_path, monkeypatch, capsys):
    import check

    can_check = {path.name for path in DOCS.glob("*.py") if '"--check"' in path.read_text(encoding="utf-8")}
    by_tests = {"at_home.py", "backends_matrix.py"}
    assert can_check - by_tests - {"check.py", "judge_again.py"} == {*check.GENERATED}
    monkeypatch.setattr(check, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    endings = {"stale": 'import sys; sys.exit("old")', "one": "raise SystemExit(1)", "broken": "1 / 0"}
    for name, text in {**endings, "current": "", "zero": "raise SystemExit(0)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        assert check.fails(f"{name}.py", "--check") == (name in endings)
    told = capsys.readouterr().err
    assert "old" in told and "ZeroDivisionError" in told
