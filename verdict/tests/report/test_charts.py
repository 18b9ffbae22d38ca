"""The charts: valid specifications, honest data, nothing that depends on colour alone."""

from __future__ import annotations

import altair as alt
import pytest

from headwise_verdict.pages.charts import attention_maps, beyond, digits_of, heat_map, pairs_of, robust_range
from headwise_verdict.pages.line_charts import against_cost, curves, dose, lines, lines_of
from headwise_verdict.reporting.difference_section import forest, panel

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
            [
                {"label": "A()", "brief": "A", "role": "arm", "x": 1.0, "text": "0.5"},
                {"label": "plain", "brief": "plain", "role": "baseline", "x": 1.5, "text": "0.6"},
            ],
            x="ms",
            outcome="loss",
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


@pytest.mark.parametrize(
    ("label", "brief", "room", "lines"),
    [
        ("DropHead(p=0.2)", "", (20, 3), ["DropHead(p=0.2)"]),
        ("InputNoise(scale=0.01, per_head=True)", "", (34, 2), ["InputNoise(scale=0.01,", "per_head=True)"]),
        ("NeuTRENO(strength=0.6) + FeatScale()", "", (34, 2), ["NeuTRENO(strength=0.6) +", "FeatScale()"]),
        # the short form stands where the label does not fit
        ("AttentionNormPenalty(strength=1.0) + DropHead(p=0.2)", "Norm + Drop", (20, 2), ["Norm + Drop"]),
        ("A" * 50, "A" * 50, (20, 3), ["A" * 19 + "…"]),
        ("a b c d e f", "", (1, 2), ["a", "…"]),
    ],
)
def test_labels_are_broken_into_lines_that_fit_their_column(label, brief, room, lines):
    assert lines_of(label, brief or label, *room) == lines


def test_labels_and_numbers_are_columns_beside_the_marks():
    """Each is an axis, which lies outside the plot, left and right of it; a small chart has a form of its own."""
    spec = forest(DIFFERENCES, title="difference")
    axes = [axis for layer in spec["layer"] if (axis := layer["encoding"].get("y", {}).get("axis"))]
    assert [axis["orient"] for axis in axes] == ["left", "right"]
    assert "1.00 [0.50, 1.50]" in axes[1]["labelExpr"] and "containerSize" in axes[1]["labelExpr"]
    assert spec["resolve"] == {"axis": {"y": "independent"}} and "text" not in str(
        [one["mark"] for one in spec["layer"]]
    )


def test_one_outlier_flattens_no_colours_and_is_counted():
    values = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 500.0]
    domain = robust_range(values)
    assert domain == (1.0, 1.7) and beyond(values, domain).endswith("1 above (to 500).")
    assert robust_range([3.0] * 9 + [7.0]) == (3.0, 7.0) and robust_range([2.0]) == (1.5, 2.5)
    assert beyond(values[:-1], domain) == ""


@pytest.mark.parametrize(
    ("domain", "form"),
    [
        ((0.1, 0.9), ".3~r"),
        ((0.99981, 0.99989), ".7~r"),
        ((0.0, 1.0), ".2~r"),
        ((1e-7, 4e-7), ".3~e"),
        ((0, 0), ".3~r"),
    ],
)
def test_a_legend_has_the_digits_that_distinguish_its_values(domain, form):
    assert digits_of(domain) == form


def test_a_legend_lists_the_verdicts_that_are_drawn():
    (points,) = [one for one in forest(DIFFERENCES, title="d")["layer"] if "shape" in one["encoding"]]
    assert points["encoding"]["shape"]["legend"]["values"] == ["better", "undecided"]
    assert points["encoding"]["color"]["legend"] == points["encoding"]["shape"]["legend"]
