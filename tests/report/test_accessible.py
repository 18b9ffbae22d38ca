"""axe finds nothing serious on a report and on pages of the site: light and dark, on a desk and on a phone."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from grids import part_of_grid
from report.synthetic_study import NINE, write_study

import headwise_verdict.reporting

ROOT = Path(__file__).parents[2]
# The look of the real site, without what it makes of the kept results.
CONF = """
from pathlib import Path
__file__ = {conf!r}
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"))
nb_execution_in_temp = False


def generate(app):
    made = Path({source!r}) / "methods"
    made.mkdir(exist_ok=True)
    method_pages._put(made / "DropHead.md", method_pages.page("DropHead", method_pages.entries()["DropHead"], made))
    notebooks.write(Path(app.outdir) / notebooks.FOLDER)


def adapt(app, name, source):
    source[0] = re.sub(r"\\[([^\\]]+)\\]\\((?:\\.\\./)+[^)]*\\)", r"\\1", source[0])
"""
PAGES = {
    "index": "# headwise\n\n```{toctree}\nstart\nhouse\nclaims\nmethods/DropHead\n```\n\nTo [a page](start.md).\n\n"
    "![pairs](forest.svg)\n",
    "start": "---\nfile_format: mystnb\nkernelspec:\n  name: python3\n---\n\n# Start\n\n```{code-cell} ipython3\n"
    "import warnings\n\n\ndef told(x: int = 3) -> str:  # a comment\n    return f'{x}'\n\nprint(told())\n"
    "warnings.warn('loud')\n```\n\n```{code-cell} ipython3\n:tags: [raises-exception]\n\n{'a': 1}['b']\n```\n\n"
    "```\nplain text\n```\n\n```diff\n- old\n+ new\n```\n\n```bash\nheadwise compare --seeds 2  # comment\n```\n\n"
    '```json\n{"a": [1, null]}\n```\n',
    "claims": "# Claims\n\n| claim | source | method | verdict |\n|---|---|---|---|\n"
    "| A `code` | blog | DropHead | [as published]{.badge .held} [small]{.badge .setting} |\n"
    "| B | blog | QKNorm | [contrary]{.badge .against} |\n| C | blog | QKNorm | [undecided]{.badge .open} |\n"
    "| D | blog | QKNorm | [not run]{.badge .left} |\n",
}


@pytest.fixture(scope="module")
def axe() -> str:
    """Return the script of axe."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python, which carries axe.min.js, is not installed")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    for needed in ("furo", "myst_nb"):
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install -e '.[docs]'")
    source, conf, built = (tmp_path_factory.mktemp(name) for name in ("source", "conf", "built"))
    for name, text in PAGES.items():
        (source / f"{name}.md").write_text(text, encoding="utf-8")
    (source / "forest.svg").write_bytes((ROOT / "docs" / "pictures" / "forest-light.svg").read_bytes())
    (source / "house.md").write_bytes((ROOT / "docs" / "house.md").read_bytes())
    (conf / "conf.py").write_text(
        CONF.format(conf=str(ROOT / "docs" / "site" / "conf.py"), source=str(source)), encoding="utf-8"
    )
    command = [sys.executable, "-m", "sphinx", "-q", "-c", str(conf), str(source), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    return headwise_verdict.reporting.write(
        write_study(folder, methods=NINE[:4], epochs=3, diverged={(NINE[2], 3)}, watched=True)
    )


# light and dark, wide and narrow; each once in two of them
LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (1280, 390)]
EACH_ONCE = (("light", 1280), ("dark", 390))


def serious(browser, axe: str, page: Path, looks=LOOKS) -> list[str]:
    """Return a line for each serious or critical finding of axe on a page, everything unfolded."""
    found = []
    for scheme, width in looks:
        seen = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        seen.goto(page.as_uri())
        seen.evaluate("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
        if seen.locator("figure[data-chart]").count():
            seen.wait_for_function(
                "() => !document.querySelector('figure[data-chart]:not([data-drawn])')", timeout=120_000
            )
        seen.evaluate(axe)
        result = seen.evaluate("axe.run({resultTypes: ['violations']})")
        for one in result["violations"]:
            if one["impact"] in ("serious", "critical"):
                found += [
                    f"{scheme} {width}: {one['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
                    for node in one["nodes"]
                ]
        seen.close()
    return found


def test_axe_sees_what_is_wrong(browser, axe, tmp_path):
    """The other tests can fail: grey on grey and a picture without words are found."""
    (tmp_path / "bad.html").write_text(
        '<html lang="en"><title>x</title><main><p style="color:#999;background:#aaa">grey</p><img src="data:,"></main>'
    )
    assert {line.split(": ")[1] for line in serious(browser, axe, tmp_path / "bad.html", LOOKS[:1])} == {
        "color-contrast",
        "image-alt",
    }


def test_a_look_at_the_site_sees_what_sticks_out_where_the_theme_scrolls(browser, axe, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    import look

    wide, code = '<p style="width:900px">wide</p>', f"<pre tabindex=0 style='overflow-x:auto'>{'a' * 200}</pre>"
    page = '<html lang="en"><title>x</title><main style="overflow-x:auto" tabindex=0><article><h1>x</h1>{}</article>'
    (tmp_path / "bad.html").write_text(page.format(wide))
    assert {line.split(": <")[0] for line in look.problems(browser, axe, tmp_path / "bad.html")} == {
        "light 390: overflows",
        "dark 390: overflows",
        "print: overflows",
    }
    (tmp_path / "code.html").write_text(page.format(code))
    assert look.problems(browser, axe, tmp_path / "code.html") == ["print: 1 tables or blocks are cut"]


@pytest.mark.parametrize(("scheme", "width"), part_of_grid(LOOKS, EACH_ONCE))
def test_nothing_serious_is_found_on_a_report(browser, axe, report, scheme, width):
    assert serious(browser, axe, report, [(scheme, width)]) == []


@pytest.mark.grid
@pytest.mark.parametrize("name", ["index", "start", "house", "claims", "methods/DropHead", "search"])
def test_nothing_serious_is_found_on_a_page_of_the_site(browser, axe, site, name):
    assert serious(browser, axe, site / f"{name}.html") == []


@pytest.mark.grid
def test_a_page_whose_code_runs_offers_its_notebook(browser, site):
    page = browser.new_page()
    page.goto((site / "start.html").as_uri())
    link = page.locator("p.notebook a")
    assert link.count() == 1 and (site / link.get_attribute("href")).is_file()
    page.goto((site / "index.html").as_uri())
    assert page.locator("p.notebook a").count() == 0
    assert page.locator("article img:not([loading=lazy])").count() == 0
