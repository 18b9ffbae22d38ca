"""The table of docs/backends.md is what runs."""

import pytest


@pytest.fixture
def matrix(monkeypatch, pytestconfig):
    monkeypatch.syspath_prepend(pytestconfig.rootpath / "docs")
    import backends_matrix

    return backends_matrix


def test_the_page_has_a_row_for_every_method_and_no_cell_differs(matrix):
    text = matrix.PAGE.read_text(encoding="utf-8")
    kept = text.split(matrix.BEGIN)[1].split(matrix.END)[0].strip().splitlines()
    names = [line.split("|")[1].strip(" `") for line in kept[2:]]
    assert names == sorted(matrix.methods.__all__)
    cells = {cell.strip() for line in kept[2:] for cell in line.strip("|").split("|")[1:]}
    assert cells == {"yes", "around", "headwise", "not on causal layers"}


@pytest.mark.slow
@pytest.mark.grid
def test_a_column_of_the_page_is_what_runs(matrix, capsys):
    assert matrix.main(["--check", "--only", "flash_attention_2"]) == 0
    page = matrix.PAGE.read_text(encoding="utf-8")
    assert matrix.columns("| a | b | c | d |", ["eager"]) == "| a | c |"
    assert page.count(matrix.BEGIN) == 1
