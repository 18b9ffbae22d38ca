"""The charts: valid specifications, honest data, nothing that depends on colour alone."""

from __future__ import annotations

import itertools

import altair as alt
import pytest

from headwise.pages.charts import attention_maps, heat_map, pairs_of
from headwise.pages.line_charts import against_cost, curves, dose, lines
from headwise.reporting.difference_section import forest, panel

HEADS = [
    {"layer": layer, "head": head, "step": step, "value": layer + head / 10}
    for layer in range(11)
    for head in (0, 1)
    for step in (0, 50)
]
TEXT = {"number": "1.00 [0.50, 1.50]", "short": "1.00", "seeds": [{"seed": "0", "value": 0.5}]}
DIFFERENCES = [
    {"label": "A()", "mean": 1.0, "low": 0.5, "high": 1.5, "verdict": "better", "words": "+1.00"} | TEXT,
    {"label": "B()", "mean": -1.0, "low": None, "high": None, "verdict": "undecided", "words": "−1.00"} | TEXT,
]
EPOCHS = [
    {
        "x": x,
        "mean": 1.0 / x,
        "low": 0.9 / x,
        "high": 1.1 / x,
        "split": split,
        "dashed": split == "train",
        "role": "arm",
    }
    for x in (1, 2)
    for split in ("train", "test")
]


def data_of(spec: dict) -> list[dict]:
    return [row for rows in spec["datasets"].values() for row in rows]


@pytest.mark.parametrize(
    "spec",
    [
        heat_map(HEADS),
        heat_map(HEADS, reading="step", legend_title="", tooltip=["step"], domain=(0, 1)),
        heat_map(HEADS, reading="step", packed=True),
        heat_map(HEADS, x="step", packed=True),
        heat_map([]),
        attention_maps([[[0.2, 0.8], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]], top=1.0),
        forest(DIFFERENCES, title="difference"),
        forest(DIFFERENCES, title="difference", margin=0.5),
        panel(DIFFERENCES, title="difference"),
        heat_map(HEADS, y="layer", diverging=True, domain=(-1, 1), mark="step", y_order=list(range(11))),
        dose(
            [{"x": "1", "mean": 1.0, "low": 0.5, "high": 1.5}],
            x="p",
            y="loss",
            seeds=[{"x": "1", "seed": 0, "value": 1.0}],
            baseline=0.5,
        ),
        against_cost(
            [{"name": "0", "label": "A()", "role": "arm", "x": 1.0, "mean": 1.0, "low": None, "high": None}],
            x="ms",
            y="loss",
        ),
        curves(EPOCHS, x="epoch", y="loss", domain=(0, 1)),
        curves(EPOCHS, x="epoch", y="loss", broken=[{"x": 1, "value": 0.5, "run": "seed 1", "last": True}]),
        lines(EPOCHS, x="x", y="mean", series="split", log_y=True),
        lines(EPOCHS, x="split", y="mean", points=True),
        pairs_of(
            [{"a": 1.0, "b": 2.0, "model": "A"}, {"a": 2.0, "b": 2.0, "model": "B"}], x="a", y="b", series="model"
        ),
        pairs_of([], x="a", y="b"),
    ],
)
def test_every_chart_is_a_valid_specification_of_the_width_of_its_box(spec):
    assert alt.Chart.from_dict(spec).to_dict()["width"] == "container"


def test_layers_stand_in_their_order_and_not_in_that_of_the_alphabet():
    rows = [{"layer": f"{layer} · 0", "head": "all", "value": 1.0} for layer in (10, 9, 0)]
    assert heat_map(rows)["encoding"]["y"]["sort"] == ["0 · 0", "9 · 0", "10 · 0"]


def test_a_slider_starts_at_the_last_reading_and_names_its_step():
    spec = heat_map(HEADS, reading="step")
    (slider,) = spec["params"]
    assert (slider["value"], slider["bind"]["max"]) == (1, 1)
    assert spec["title"]["text"]["expr"] == "'step ' + [0, 50][position]"
    assert {row["position"] for row in data_of(spec) if row["step"] == 50} == {1}


def test_a_difference_without_interval_draws_a_point_and_no_line():
    layers = forest(DIFFERENCES, title="difference")["layer"]
    assert any({"filter": "datum.low != null"} in layer.get("transform", []) for layer in layers)
    shapes = next(layer for layer in layers if "shape" in layer["encoding"])["encoding"]["shape"]["scale"]
    assert len(set(shapes["range"])) == len(shapes["domain"]) == 7


def test_what_a_log_axis_cannot_show_is_left_out():
    rows = [{"t": 1, "y": 0.0}, {"t": 2, "y": 1.0}]
    assert [row["y"] for row in data_of(lines(rows, x="t", y="y", log_y=True))] == [1.0]
    assert [row["y"] for row in data_of(lines(rows, x="t", y="y"))] == [0.0, 1.0]


def test_a_packed_map_holds_one_row_for_each_cell_and_gaps_where_nothing_was_read():
    rows = [row for row in HEADS if (row["layer"], row["head"], row["step"]) != (3, 1, 50)]
    packed = data_of(heat_map(rows, reading="step", packed=True))
    assert len(packed) == 22
    assert {"layer": 3, "head": 1, "values": [3.1, None]} in packed
    assert {"layer": 3, "head": 0, "values": [3.0, 3.0]} in packed


def test_what_has_no_interval_gets_no_layer_of_intervals():
    single = [row | {"low": None, "high": None} for row in DIFFERENCES]
    assert len(forest(DIFFERENCES, title="d")["layer"]) - len(forest(single, title="d")["layer"]) == 1
    without = [row | {"low": None, "high": None} for row in EPOCHS]
    assert len(curves(EPOCHS, x="e", y="l")["layer"]) - len(curves(without, x="e", y="l")["layer"]) == 1


def test_names_of_points_against_a_cost_lie_on_no_other(tmp_path):
    from headwise.pages.line_charts import LETTER, LINE, _beside

    rows = [
        {"label": str(at), "name": "Regularizer" * 2, "x": x, "mean": mean, "low": None, "high": None}
        for at, (x, mean) in enumerate([(1, 0.5), (1.1, 0.5), (1.2, 0.501), (3, 0.5), (3, 0.9)])
    ]
    places = _beside(rows)
    # those of the left half stand to the right of their points, one below the other
    left = [places[str(at)] for at in range(3)]
    assert {place["align"] for place in left} == {"left"} and places["3"]["align"] == "right"
    heights = sorted(280 * (0.9 - row["mean"]) / 0.4 + place["dy"] for row, place in zip(rows, left))
    assert min(after - before for before, after in itertools.pairwise(heights)) >= LINE - 1 and LETTER > 0
