"""Pages whose code runs, as notebooks that readers can download from the page.

python docs/site/notebooks.py FOLDER    only the notebooks, without Sphinx
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook

DOCS = Path(__file__).resolve().parents[1]
FOLDER = "_notebooks"
# the mark of a page whose cells are run during the build
RUN = "file_format: mystnb"
FIRST = (
    "*This notebook is a page of headwise's documentation. It needs no network. From a checkout: "
    "`pip install -e verdict -e '.[study,hf]'` into the environment of this kernel.*"
)
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def pages() -> list[Path]:
    """Return the guides whose code runs."""
    return [path for path in sorted(DOCS.glob("*.md")) if RUN in path.read_text(encoding="utf-8").partition("\n---")[0]]


def notebook(path: Path) -> Any:
    """Return a page as a notebook; links to other pages, which are not next to it, become their titles."""
    found = read_myst_markdown_notebook(path.read_text(encoding="utf-8"), path=path)
    for cell in found.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"<!--.*?-->\n*", "", _unlinked(cell.source, path.parent), flags=re.DOTALL)
    title, *rest = found.cells
    found.cells = [title, nbformat.v4.new_markdown_cell(FIRST), *rest]
    for number, cell in enumerate(found.cells):
        # the same bytes in every build
        cell["id"] = f"{path.stem.replace('_', '-')}-{number}"
    found.metadata = nbformat.from_dict(KERNEL)
    found.nbformat, found.nbformat_minor = 4, 5
    nbformat.validate(found)
    return found


def write(folder: Path) -> None:
    """Write the notebook of every page whose code runs into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in pages():
        nbformat.write(notebook(path), folder / f"{path.stem}.ipynb")


def button(name: str) -> str:
    """Return the line below the title of page `name` that links to its notebook, or nothing if it has none."""
    if name not in {path.stem for path in pages()}:
        return ""
    return f'<p class="notebook"><a href="{FOLDER}/{name}.ipynb" download>Download this page as a notebook</a></p>'


def _unlinked(text: str, folder: Path) -> str:
    def linked_text(link: re.Match[str]) -> str:
        words, target = link.groups()
        if "://" in target:
            return link[0]
        return words or f"*{_title(folder / target.partition('#')[0])}*"

    return re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", linked_text, text)


def _title(path: Path) -> str:
    if path.is_file() and (found := re.search(r"^# (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)):
        return found[1]
    # a page that the build generates
    return (path.stem if path.stem != "index" else path.parent.name).replace("_", " ")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
