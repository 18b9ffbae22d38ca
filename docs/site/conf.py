"""The configuration of Sphinx for the site: `make docs`, which runs `sphinx-build -c docs/site docs build/docs`.

The guides of docs/ are pages without changes. Methods, results, figures and the reference are written into
docs/generated from the code and the kept results during the build; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
DOCS, ROOT = SITE.parent, SITE.parents[1]
SOURCES = [str(ROOT / "src"), str(ROOT / "verdict" / "src")]
sys.path[:0] = [*SOURCES, str(DOCS), str(SITE)]

import gallery  # noqa: E402
import mathml  # noqa: E402
import method_pages  # noqa: E402
import notebooks  # noqa: E402
import reference  # noqa: E402
import streams  # noqa: E402

import headwise  # noqa: E402

# Cells of executed pages run in separate processes, which import this tree and find the commands of this
# environment.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")]))
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ.update(TQDM_DISABLE="1", TERM="dumb", COLUMNS="88", HF_HUB_OFFLINE="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
# tqdm's warning about a notebook without widgets contains a path of this machine and is of no use to a reader
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"
# a kernel asks the commands in its cells for colours; every bash sources this file, which disables them
os.environ["BASH_ENV"] = str(SITE / "plain.bash")

project, author, release = "headwise", "The headwise developers", headwise.__version__
project_copyright = author
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["site", "**.ipynb_checkpoints"]
html_theme, html_title, html_static_path = "furo", f"headwise {release}", [str(SITE / "static")]
html_css_files, html_js_files = ["site.css"], ["claims.js"]
html_show_sphinx = html_copy_source = html_use_index = False
html_theme_options = {"top_of_page_buttons": []}

myst_enable_extensions = ["deflist", "attrs_inline", "colon_fence"]
myst_heading_anchors = 3
# An inline `x` in a docstring is code.
default_role = "literal"

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_execution_in_temp = True
nb_merge_streams = True
# terminal colours that a command printed in pieces
suppress_warnings = ["misc.highlighting_failure"]

nitpicky = True
# Types of other libraries have no page here, and those of inner rooms no page either.
nitpick_ignore_regex = [("py:.*", r"(?!headwise\.\w+$).*")]
autodoc_typehints = "description"
# libraries that headwise.lightning and headwise.axolotl need
autodoc_mock_imports = ["lightning", "axolotl"]
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True

# bold words of a table of verdicts, and the style of their badges
BADGES = {
    "as published": "held",
    "same direction": "held",
    "contrary": "against",
    "no effect": "against",
    "margin too wide": "open",
    "undecided": "open",
}
BADGES |= {"not testable": "left", "not run": "left"}

# Pages of the repository outside of docs/, and the page of the site that shows each.
ELSEWHERE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def generate(app: Any) -> None:
    """Write the files generated from the code and the kept results, before Sphinx looks for pages."""
    generated = DOCS / "generated"
    method_pages.write(generated / "methods")
    gallery.write(DOCS / "results", generated)
    reference.write(generated / "api")
    notebooks.write(Path(app.outdir) / notebooks.FOLDER)


def adapt(app: Any, name: str, source: list[str]) -> None:
    """Point links that leave docs/ to the pages that show their files, and add figures to kept results."""
    up = "../" * name.count("/")
    for file, page in ELSEWHERE.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}([#)])", rf"]({up}{page}\1", source[0])
    here = (DOCS / name).parent
    # a folder is not a page: only its text is kept
    source[0] = re.sub(r"\[([^\]]+)\]\((\.[\w./-]+)\)", lambda m: m[1] if (here / m[2]).is_dir() else m[0], source[0])
    if (
        name.startswith("results/")
        and name.rpartition("/")[2] not in ("README", "claims", "changed_verdicts")
        and "/sources/" not in name
    ):
        # notes on a study are linked from its page, and are in no list of pages
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"
    if "/sources/" in name:
        source[0] = re.sub(r"\| \*\*([^*|]+)\*\*((?: `[^`|]+`)*)((?:;? \*[^*|]+\*)*) \|", badges, source[0])
    if name.startswith("results/"):
        # a note on a result is linked by its title
        source[0] = re.sub(r"\[([\w-]+\.md)\]\(\1\)", r"[](\1)", source[0])
    if name.startswith("results/") and name.endswith("/README"):
        source[0] += gallery.figures_of(name.split("/")[1], up)


def badges(found: re.Match[str]) -> str:
    """Return the badges of a claim's row (its verdict, its setting and what it is besides) and its earlier verdicts."""
    verdict, marks, earlier = found.groups()
    tone = next((tone for start, tone in BADGES.items() if verdict.startswith(start)), "left")
    others = "".join(f" [{mark}]{{.badge .setting}}" for mark in re.findall(r"`([^`]+)`", marks))
    return f"| [{verdict}]{{.badge .{tone}}}{others}{earlier} |"


def shape(app: Any, name: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Add the notebook below the title, load pictures lazily, and omit style sheets that no cell needs."""
    body = context.get("body", "")
    if button := notebooks.button(name):
        body = body.replace("</h1>", f"</h1>\n{button}", 1)
    context["body"] = body.replace("<img ", '<img loading="lazy" ')
    if tree_of_pages := context.get("furo_navigation_tree"):
        context["furo_navigation_tree"] = tree_of_pages.replace('role="heading"', 'role="heading" aria-level="2"')
    context["body"] = slim(context["body"])
    # a call in a cell may be broken before its settings, and a command is copied without the mark of its cell
    context["body"] = re.sub(r'(?<=<span class="pre">)([\w.]+\()(?=[^)\s<])', r"\1<wbr>", context["body"])
    context["body"] = re.sub(r'<span class="o">%%</span><span class="k">bash</span>\n', "", context["body"])
    if name.startswith("results/"):
        context["body"] = re.sub(r"(?<=<td>)(?:(?!</?t[dhr]).)+", listed, context["body"], flags=re.DOTALL)
    # elements that scroll sideways must be reachable by keyboard
    context["body"] = re.sub(
        r'<(pre|table (?:border="1" )?class="(?:docutils|dataframe)[^"]*")(?=>| )', r'<\1 tabindex="0"', context["body"]
    )
    context["body"] = re.sub(
        r'<(p|figure|div)([^>]*)>(?=\s*<img [^>]*src="[^"]+\.svg")', r'<\1\2 tabindex="0">', context["body"]
    )
    if 'class="cell ' not in body:
        context["css_files"] = [
            one for one in context["css_files"] if "mystnb" not in str(getattr(one, "filename", one))
        ]


def listed(cell: re.Match[str]) -> str:
    """Return a table's cell with three or more items, each on its own line."""
    return cell[0].replace("; ", ";<br>") if cell[0].count("; ") > 1 else cell[0]


def slim(body: str) -> str:
    """Return a page's body with tables as short as HTML allows: phones also load a table of 800 rows."""
    body = re.sub(r"(<t[dh][^>]*>)<p>((?:(?!</?p>|</?t[dh]).)*)</p>(?=</t[dh]>)", r"\1\2", body, flags=re.DOTALL)
    body = re.sub(r'<tr class="row-(?:odd|even)">', "<tr>", body)
    # the end tag of a cell may be omitted before another cell or the row's end
    return re.sub(r"</t[dh]>\s*(?=<t[dh]|</tr>)", "", body)


def setup(app: Any) -> None:
    """Register the site's additions to Sphinx."""
    mathml.register(app)
    streams.register()
    app.connect("builder-inited", generate)
    app.connect("source-read", adapt)
    app.connect("html-page-context", shape, priority=900)
