"""What a watch shows: six figures in loggers, heat maps that can be read, charts, and tables in a notebook."""

import json
from html.parser import HTMLParser

import pytest
import torch
from watched_model import VECTORS, figure, read, sharpen, watched

import headwise
from headwise.files.html import html_table
from headwise.health.watching.pictures import BRIEF, GAP, SIGNS, SQUARE, heat_map, lettered, shown


class Run:
    def __init__(self):
        self.seen = {}

    def log(self, values, step):
        self.seen.update(values)


class Cells(HTMLParser):
    """Collects the texts of the cells of a table's body, and fails on tags that do not close."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows = [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"]:
            self.rows[-1].append(data)


def test_a_logger_gets_six_figures_where_nobody_names_statistics():
    run = Run()
    model, watch = watched(log=run, statistics=None)
    read(model, watch)
    assert len(run.seen) <= 6 and set(run.seen) <= {f"health/{name}/{end}" for name, end in BRIEF.items()}
    values = {r["value"] for r in watch.records() if r["statistic"] == "entropy_share"}
    assert run.seen["health/entropy_share/lowest"] == min(values)
    cosines = {r["value"] for r in watch.records() if r["statistic"] == "token_cosine"}
    assert run.seen["health/token_cosine/highest"] == max(cosines)


def test_a_logger_gets_of_named_statistics_every_layer():
    run = Run()
    model, watch = watched(log=run, statistics=["entropy_share"])
    read(model, watch)
    assert {f"health/entropy_share/blocks.{at}.attn" for at in (0, 1)} <= set(run.seen)


def test_alerts_are_counted_among_the_few():
    model, watch = watched(log=(run := Run()), statistics=None)
    sharpen(model, 100)
    read(model, watch)
    assert run.seen["health/alerts"] == len(watch.alerts()) > 0 and len(run.seen) <= 8


def test_a_heat_map_holds_its_squares_axes_and_scale():
    records = [
        figure("entropy_share", v, head=h, site=f"s{d}") | {"depth": d}
        for d, h, v in ((3, 0, 0.5), (3, 1, 1.0), (7, 0, 0.25))
    ]
    picture = heat_map(records)
    high, low = torch.tensor([253, 231, 37], dtype=torch.uint8), torch.tensor([68, 1, 84], dtype=torch.uint8)
    is_high, is_low = ((picture == one).all(-1) for one in (high, low))
    # a square for each of the two, and the ends of the scale
    assert is_high.sum() >= SQUARE * SQUARE + 10 and is_low.sum() >= SQUARE * SQUARE + 10
    for text in ("layer", "head", "3", "7", "1", "0.25"):
        signs = lettered(text)
        dark = (picture.int().sum(-1) == 120).float()[None, None]
        found = torch.nn.functional.conv2d(dark, signs.float()[None, None]).amax()
        assert int(found) == int(signs.sum()), f"{text} is not written"
    assert picture.dtype == torch.uint8 and picture.shape[0] > 2 * (SQUARE + GAP)


def test_any_number_can_be_written():
    for value in (0.0, -1.5e-7, 12345.678, 1e22, 3):
        assert set(f"{value:.3g}") <= set(SIGNS)


def test_a_map_without_a_finite_value_is_drawn():
    assert heat_map([figure("max_logit", float("nan"), head=0)]).dim() == 3
    assert shown([figure("max_logit", float("nan"), head=0)]).maps


def test_a_plot_has_a_panel_for_each_statistic_and_marks_alerts():
    model, watch = watched()
    read(model, watch)
    sharpen(model, 100)
    read(model, watch)
    chart = json.loads(watch.plot("max_logit", "token_cosine").to_json())
    first, second = chart["concat"]

    def data(layer):
        return chart["datasets"][layer["data"]["name"]]

    assert first["layer"][0]["title"] == "max logit" and second["title"] == "token cosine"
    rows = data(first["layer"][0])
    assert {row["step"] for row in rows} == {0, 1} and len({row["place"] for row in rows}) == 8
    assert data(first["layer"][1])[0]["step"] == 1
    assert {
        panel.get("title") or panel["layer"][0]["title"] for panel in json.loads(watch.plot().to_json())["concat"]
    } == {"entropy share", "max logit", "token cosine"}


def test_a_plot_marks_alerts_of_the_loss_in_every_panel():
    model, watch = watched(every=1000, closer=None)
    read(model, watch)
    for step in range(60):
        watch.step(5.0 if step == 55 else 1 + 0.01 * (step % 3))
    assert [alert["alert"] for alert in watch.alerts()] == ["loss_spike"]
    chart = json.loads(watch.plot("max_logit", "token_cosine").to_json())
    for panel in chart["concat"]:
        assert [row["step"] for row in chart["datasets"][panel["layer"][1]["data"]["name"]]] == [56]


def test_a_plot_of_what_was_not_read_is_refused():
    model, watch = watched()
    with pytest.raises(ValueError, match="nothing was read yet"):
        watch.plot()
    read(model, watch)
    with pytest.raises(ValueError, match=r"nothing was read of 'max_logits'. Did you mean 'max_logit'"):
        watch.plot("max_logits")


def test_a_notebook_shows_the_watch_and_its_alerts_as_tables():
    model, watch = watched()
    assert "nothing was read yet" in watch._repr_html_() and "call watch.step(loss)" in watch._repr_html_()
    read(model, watch)
    sharpen(model, 100)
    read(model, watch)
    rows = Cells(watch.alerts()._repr_html_()).rows[1:]
    assert [row[2] for row in rows] == [alert["sentence"] for alert in watch.alerts()]
    whole = {row[0]: row[1:] for row in Cells(watch._repr_html_()).rows if len(row) == 4}
    newest = [r["value"] for r in watch.records() if r["statistic"] == "max_logit" and r["step"] == 1]
    assert whole["max_logit"][0] == f"{min(newest):.4g}" and whole["max_logit"][2] == f"{max(newest):.4g}"


def test_a_notebook_shows_the_handle_and_its_report_as_tables():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    handle = headwise.regularize(model, headwise.DropHead(p=0.2))
    rows = Cells(handle._repr_html_()).rows
    assert [row[0] for row in rows if row and row[0].startswith("DropHead")] == ["DropHead(p=0.2)"]
    assert [row[0] for row in Cells(handle.report()._repr_html_()).rows[1:]] == [
        row.name for row in handle.report().rows
    ]
    handle.remove()
    assert "removed" in handle._repr_html_()


def test_a_table_escapes_what_it_is_given_and_counts_what_it_leaves_out():
    text = html_table("a < b", ("x",), [("<script>",)] * 103, "done & dusted")
    assert "<script>" not in text and "3 more rows" in text and "a &lt; b" in text
    assert len(Cells(text).rows) == 101
    assert VECTORS.shape[0] == 4
