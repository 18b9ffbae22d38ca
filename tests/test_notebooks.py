"""Pages of the site as notebooks: each is complete, and one is run as downloaded, without a network."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
GUIDES = sorted(path.stem for path in DOCS.glob("*.md") if "file_format: mystnb" in path.read_text(encoding="utf-8"))
# connections to other machines fail
OFFLINE = """
import socket
whole = socket.socket.connect
def connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"the notebook asks for {address}")
    return whole(self, address)
socket.socket.connect = connect
"""


@pytest.fixture(scope="module")
def notebooks():
    pytest.importorskip("myst_nb", reason="myst-nb is not installed: pip install -e '.[docs]'")
    added = str(DOCS / "site")
    sys.path.append(added)
    import notebooks

    yield notebooks
    sys.path.remove(added)


def test_the_guides_of_the_first_hour_have_notebooks(notebooks):
    assert [path.stem for path in notebooks.pages()] == GUIDES
    expected = {"start", "training_script", "trainer", "own_task", "own_method", "my_loss_exploded", "fine_tuning"}
    assert expected <= {*GUIDES}


@pytest.mark.parametrize("name", GUIDES)
def test_a_notebook_has_the_code_of_its_page_and_no_link_that_leads_nowhere(notebooks, name):
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    made = notebooks.notebook(DOCS / f"{name}.md")
    code = [cell.source for cell in made.cells if cell.cell_type == "code"]
    assert len(code) == page.count("```{code-cell}") and all(source.splitlines()[-1] in page for source in code)
    for source in code:
        if not source.startswith("%%"):
            ast.parse(source)
    text = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert text.startswith("# ") and "pip install" in text
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link] == []


@pytest.mark.parametrize("name", ["start"])
@pytest.mark.grid
def test_a_notebook_runs_as_it_is_downloaded(notebooks, name, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[docs]'")
    import nbformat

    notebooks.write(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    read = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    read.cells.insert(0, nbformat.v4.new_code_cell(OFFLINE))
    nbclient.NotebookClient(read, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(out.get("text", "") for cell in read.cells for out in cell.get("outputs", []))
    assert "loss " in printed and "regularized" in printed
