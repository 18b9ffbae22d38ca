"""The table of claims on the site: short rows, a click for all columns, and filters."""

from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "site" / "static" / "claims.js"
HEADS = ("claim", "source", "method", "verdict", "setting", "published", "ours [95 %]", "study")
ROWS = (
    ("A.", "One 2020", "DropHead, QKNorm", "as published", "small", "+1", "+1 [0, 2]", "a"),
    ("B.", "Two 2021", "QKNorm", "undecided (20 seeds would do)", "small", "–", "0 [−1, 1]", "b"),
)


def row(cells, tag):
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def test_rows_are_short_until_all_columns_are_asked_for_and_filters_find_hidden_ones(browser):
    body = "".join(row(cells, "td") for cells in ROWS)
    table = f"<table><thead>{row(HEADS, 'th')}</thead><tbody>{body}</tbody></table>"
    page = browser.new_page()
    page.set_content(f"<script>{SCRIPT.read_text(encoding='utf-8')}</script><article>{table}</article>")
    shown = lambda: [cell.inner_text() for cell in page.query_selector_all("thead th") if cell.is_visible()]
    assert shown() == ["claim", "source", "verdict", "ours [95 %]", "study"]
    page.select_option("select[name=method]", "DropHead")
    assert page.inner_text("[role=status]") == "1 of 2 claims"
    assert [one.is_visible() for one in page.query_selector_all("tbody tr")] == [True, False]
    page.check("input[type=checkbox]")
    assert shown() == list(HEADS)
    page.close()
