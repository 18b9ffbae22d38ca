"""Pictures of the readings: heat maps and alerts for loggers, and a small chart for each statistic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.files.errors import suggest
from headwise.files.optional_imports import load
from headwise.health.health_records import Alert, Line, Record, alerts_among, figures_among, flat

# Characters of three columns and five rows; each row is a digit from 0 to 7 whose bits are the columns.
ROWS = (
    "75557 26227 71747 71717 55711 74717 74757 71122 75757 75717 00002 00700 02720 00000 03553 11353 07747 "
    "44655 22223 06444 05716"
)
SIGNS = dict(zip("0123456789.-+ adehlry", ROWS.split()))
# In pixels: one dot of a character, the margin between parts, the width of the colour scale, the smallest height.
SIZE, MARGIN, BAR, LEAST = 2, 4, 10, 64
WHITE, BLACK = 255, 40


def lettered(text: str) -> Tensor:
    """Return a text as a bitmap, (height, width) bool."""
    signs = [torch.tensor([[int(row) >> (2 - bit) & 1 for bit in range(3)] for row in SIGNS[sign]]) for sign in text]
    spaced = [torch.nn.functional.pad(sign, (0, 1)) for sign in signs]
    return torch.cat(spaced, 1)[:, :-1].bool().repeat_interleave(SIZE, 0).repeat_interleave(SIZE, 1)


def labelled(picture: Tensor, rows: list[str], square: int, gap: int, ends: tuple[str, str], scale: Tensor) -> Tensor:
    """Return a picture of squares with labelled axes and a colour scale on its right.

    Args:
        picture: squares (height, width, 3), one row per layer with the first layer on top, one column per head.
        scale: colours (n, 3) from the highest to the lowest value.
    """
    step, (height, width) = square + gap, picture.shape[:2]
    labels, title, below = [lettered(row) for row in rows], lettered("layer"), lettered("head")
    line = title.shape[0]
    left = max(title.shape[1], *(label.shape[1] for label in labels)) + MARGIN
    numbers = [lettered(end) for end in ends]
    tall = max(height, LEAST)
    wide = left + max(width, below.shape[1]) + 3 * MARGIN + BAR + max(number.shape[1] for number in numbers)
    canvas = torch.full((line + MARGIN + tall + 2 * (MARGIN + line), wide, 3), WHITE, dtype=torch.uint8)
    top = line + MARGIN
    canvas[top : top + height, left : left + width] = picture
    _write(canvas, title, 0, 0)
    for row, label in enumerate(labels):
        _write(canvas, label, top + row * step + (square - line) // 2, left - MARGIN - label.shape[1])
    # From head 100 on a number is wider than a square.
    every = 1 if width <= 100 * step else 5
    for head in range(0, (width + gap) // step, every):
        number = lettered(str(head))
        _write(canvas, number, top + height + MARGIN, left + head * step + max(0, (square - number.shape[1]) // 2))
    _write(canvas, below, top + height + 2 * MARGIN + line, left)
    bar = left + max(width, below.shape[1]) + 2 * MARGIN
    index = (torch.arange(tall) * len(scale)).div(tall, rounding_mode="floor")
    canvas[top : top + tall, bar : bar + BAR] = scale[index][:, None]
    _write(canvas, numbers[1], top, bar + BAR + MARGIN)
    _write(canvas, numbers[0], top + tall - line, bar + BAR + MARGIN)
    return canvas


def _write(canvas: Tensor, signs: Tensor, top: int, left: int) -> None:
    part = canvas[top : top + signs.shape[0], left : left + signs.shape[1]]
    part[signs[: part.shape[0], : part.shape[1]]] = BLACK


# Evenly spaced from the lowest to the highest value: the colours of viridis, which colour-blind readers can tell apart.
COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
ABSENT = (255, 255, 255)
NOT_FINITE = (255, 0, 0)
# The statistics that loggers get unless others are named, each with its worrying end.
BRIEF = {
    "entropy_share": "lowest",
    "max_logit": "highest",
    "token_cosine": "highest",
    "massive_activations": "highest",
    "key_norm": "highest",
    "effective_rank_qk": "lowest",
}
BRIEF_MAPS = ("entropy_share", "max_logit")
# In pixels: the square of a head, and the gap between two squares.
SQUARE, GAP = 14, 2


def heat_map(records: Iterable[Record]) -> Tensor:
    """Return the heat map of one statistic's heads at one step, (height, width, 3) of uint8, with axes and scale."""
    records = list(records)
    depths = {record["site"]: record["depth"] for record in sorted(records, key=lambda record: record["depth"])}
    lowest, highest = _ends(records)
    ramp = torch.linspace(highest, lowest, 64).tolist() if highest > lowest else [lowest]
    scale = torch.tensor([colour(value, lowest, highest) for value in ramp], dtype=torch.uint8)
    rows = [str(depth) for depth in depths.values()]
    return labelled(squares(records), rows, SQUARE, GAP, (f"{lowest:.3g}", f"{highest:.3g}"), scale)


def _ends(records: list[Record]) -> tuple[float, float]:
    finite = [record["value"] for record in records if math.isfinite(record["value"])]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def squares(records: list[Record]) -> Tensor:
    """Return a picture with a square for each head and a row for each layer, (height, width, 3) of uint8.

    The first layer is on top, the first head on the left. Colours go from the lowest finite value (dark) to the highest
    (bright); red is a value that is not finite, white a head that a layer does not have.
    """
    rows = list(dict.fromkeys(record["site"] for record in sorted(records, key=lambda record: record["depth"])))
    heads = 1 + max(record["head"] or 0 for record in records)
    lowest, highest = _ends(records)
    colours = torch.tensor(ABSENT, dtype=torch.uint8).repeat(len(rows), heads, 1)
    for record in records:
        colours[rows.index(record["site"]), record["head"] or 0] = torch.tensor(
            colour(record["value"], lowest, highest), dtype=torch.uint8
        )
    return _enlarged(colours)


def colour(value: float, lowest: float, highest: float) -> tuple[int, ...]:
    """Return the red, green and blue of a value on the scale from `lowest` to `highest`."""
    if not math.isfinite(value):
        return NOT_FINITE
    share = (value - lowest) / (highest - lowest) if highest > lowest else 0.5
    place = share * (len(COLOURS) - 1)
    below = min(int(place), len(COLOURS) - 2)
    return tuple(round(a + (b - a) * (place - below)) for a, b in zip(COLOURS[below], COLOURS[below + 1]))


def _enlarged(colours: Tensor) -> Tensor:
    size = SQUARE + GAP
    picture = colours.repeat_interleave(size, 0).repeat_interleave(size, 1)
    edge = torch.arange(max(picture.shape[:2])) % size >= SQUARE
    picture[edge[: len(picture)]] = torch.tensor(ABSENT, dtype=torch.uint8)
    picture[:, edge[: picture.shape[1]]] = torch.tensor(ABSENT, dtype=torch.uint8)
    return picture[:-GAP, :-GAP]


@dataclass(frozen=True)
class Shown:
    """Figures and pictures by name."""

    figures: dict[str, float]
    maps: dict[str, Tensor]


def shown(lines: Iterable[Line], heads: bool = False, brief: bool = False) -> Shown:
    """Return what loggers get of the lines of one step.

    With `brief` these are six figures, which are the unhealthy ends of the statistics in `BRIEF` over all layers, two
    heat maps, and the number of alerts. Otherwise:

    `health/<statistic>/<site>` is the layer's figure, or the mean over its heads. A statistic of heads has the heat map
    `health/map/<statistic>`, and the figures `health/<statistic>/lowest` and `/highest` for the ends of its scale. With
    `heads`, every head has a figure `health/<statistic>/<site>/head<n>` too.
    """
    lines = list(lines)
    by_layer: dict[str, list[float]] = {}
    by_statistic: dict[str, list[Record]] = {}
    for record in figures_among(lines):
        by_layer.setdefault(f"health/{record['statistic']}/{record['site']}", []).append(record["value"])
        if record["head"] is not None:
            by_statistic.setdefault(record["statistic"], []).append(record)
    figures = {name: sum(values) / len(values) for name, values in by_layer.items()}
    for name, records in by_statistic.items():
        values = [value for record in records if math.isfinite(value := record["value"])] or [math.nan]
        figures |= {f"health/{name}/lowest": min(values), f"health/{name}/highest": max(values)}
    if brief:
        figures = {
            f"health/{name}/{end}": figures.get(f"health/{name}/{end}", _end(lines, name, end))
            for name, end in BRIEF.items()
            if any(name == record["statistic"] for record in figures_among(lines))
        }
        by_statistic = {name: records for name, records in by_statistic.items() if name in BRIEF_MAPS}
    if alerts := alerts_among(lines):
        figures["health/alerts"] = float(len(alerts))
    return Shown(
        figures | (flat(lines) if heads else {}),
        {f"health/map/{name}": heat_map(records) for name, records in by_statistic.items()},
    )


def _end(lines: Iterable[Line], name: str, end: str) -> float:
    """Return the lowest or highest finite value of a statistic of layers; NaN without one."""
    values = [r["value"] for r in figures_among(lines) if r["statistic"] == name and math.isfinite(r["value"])]
    return (min if end == "lowest" else max)(values, default=math.nan)


WIDTH, HEIGHT = 320, 160
# Altair's colours for the lines, from the first layer to the last.
SCHEME = "viridis"


def plot(records: Sequence[Record], alerts: Sequence[Alert], names: Sequence[str]) -> Any:
    """Return an altair chart with a panel for each statistic; notebooks display it, `.save("health.html")` writes it.

    Args:
        records: all records of a watch.
        alerts: marked at their steps in the panel of their statistic; alerts of the loss are marked in every panel.
        names: names of statistics; if empty, the six that loggers get.

    Raises:
        ValueError: if there is no record of a name, or no record at all.
        ImportError: if altair is missing, with the extra to install.
    """
    alt = load("altair", "study")
    known = list(dict.fromkeys(record["statistic"] for record in records))
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "nothing yet: call step() after optimizer.step()"
            raise ValueError(f"nothing was read of {name!r}.{suggest(name, known)} Read so far: {listed}.")
    chosen = list(names) or [name for name in BRIEF if name in known] or known[:6]
    if not chosen:
        raise ValueError("nothing was read yet: call step() after optimizer.step()")
    # An alert on a statistic without records, such as the loss, is marked in every panel.
    marked = {
        name: [alert for alert in alerts if alert["statistic"] == name or alert["statistic"] not in known]
        for name in chosen
    }
    panels = [_panel(alt, name, records, marked[name]) for name in chosen]
    return alt.concat(*panels, columns=2).resolve_scale(color="shared")


def _panel(alt: Any, name: str, records: Sequence[Record], alerts: Sequence[Alert]) -> Any:
    rows = [
        {
            "step": record["step"],
            "value": record["value"],
            "layer": record["depth"],
            "place": record["site"] + ("" if record["head"] is None else f" head {record['head']}"),
        }
        for record in records
        if record["statistic"] == name and math.isfinite(record["value"])
    ]
    title = name.replace("_", " ")
    base = alt.Chart(alt.InlineData(values=rows), title=title, width=WIDTH, height=HEIGHT)
    lines = base.mark_line(strokeWidth=1, point=len({row["step"] for row in rows}) == 1).encode(
        x=alt.X("step", type="quantitative", title="optimizer step"),
        y=alt.Y("value", type="quantitative", title=title, scale=alt.Scale(zero=False)),
        color=alt.Color("layer", type="quantitative", title="layer", scale=alt.Scale(scheme=SCHEME)),
        detail=alt.Detail("place:N"),
        tooltip=[alt.Tooltip(field) for field in ("place:N", "step:Q", "value:Q")],
    )
    if not alerts:
        return lines
    marks = [{"step": alert["step"], "alert": alert["sentence"]} for alert in alerts]
    rules = alt.Chart(alt.InlineData(values=marks)).mark_rule(color="#d55e00", strokeDash=[4, 3])
    return lines + rules.encode(x=alt.X("step", type="quantitative"), tooltip=[alt.Tooltip("alert:N")])
