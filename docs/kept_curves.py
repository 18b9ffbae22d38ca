"""Draw the learning curves of a finished study: one panel for each arm, training and test, with the baseline.

python docs/kept_curves.py results/blog-cifar10 docs/results/blog-cifar10

Writes `curves.csv` (mean over seeds and its 95 % interval, by arm, split and epoch) and `curves-METRIC.svg`.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

import altair as alt

from headwise_verdict.files.errors import StudyError
from headwise_verdict.pages.charts import specification
from headwise_verdict.reporting.export import svg
from headwise_verdict.reporting.outcome_texts import unit_of
from headwise_verdict.results.folder import StudyFolder, read_study
from headwise_verdict.results.intervals import interval

CURVES = "curves.csv"
SPLITS = ("train", "test")
COLUMNS = 3
# smallest number of epochs for which a curve shows more than the table
LEAST_EPOCHS = 3
FIELDS = ["metric", "arm", "split", "epoch", "seeds", "mean", "low", "high"]


def curve_rows(study: StudyFolder, metric: str) -> list[dict[str, Any]]:
    """Return a row for each arm, split and epoch: the mean of `metric` over finished seeds and its 95 % interval."""
    rows = []
    for arm in study.arms:
        finished = [run for run in study.of(arm) if run.status == "finished"]
        for split in SPLITS:
            by_epoch: dict[int, list[float]] = {}
            for run in finished:
                for line in run.epochs:
                    value = line.metrics.get(f"{split}/{metric}")
                    if value is not None and math.isfinite(value):
                        by_epoch.setdefault(line.epoch, []).append(value)
            for epoch, values in sorted(by_epoch.items()):
                mean = interval(values, bootstrap_from=math.inf)
                row = {"metric": metric, "arm": arm, "split": split, "epoch": epoch, "seeds": len(values)}
                rows.append(row | {"mean": mean.mean, "low": mean.low, "high": mean.high})
    return rows


@specification
def panels(rows: list[dict[str, Any]], baseline: str, title: str) -> Any:
    """Return one panel for each arm: the arm in blue and the baseline in grey, training dashed and test solid."""
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if arm != baseline] or [baseline]
    panel_rows = [
        row | {"panel": arm, "role": "baseline" if row["arm"] == baseline else "arm"}
        for arm in arms
        for row in rows
        if row["arm"] in (arm, baseline)
    ]
    base = alt.Chart().encode(
        x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(grid=False, tickCount=5, tickMinStep=1)),
        color=alt.Color(
            "role:N",
            title=None,
            scale=alt.Scale(domain=["baseline", "arm"], range=["var(--grey)", "var(--blue)"]),
            legend=alt.Legend(symbolType="stroke", symbolOpacity=1, symbolStrokeWidth=2),
        ),
        detail="split:N",
    )
    line = base.mark_line(strokeWidth=1.6).encode(
        y=alt.Y("mean:Q", title=title, scale=alt.Scale(zero=False)),
        strokeDash=alt.StrokeDash(
            "split:N", title=None, scale=alt.Scale(domain=["test", "train"], range=[[1, 0], [4, 3]])
        ),
    )
    band = base.mark_area(opacity=0.18).encode(y="low:Q", y2="high:Q").transform_filter("datum.low != null")
    return (
        alt.layer(band, line, data=alt.InlineData(values=panel_rows))
        .properties(width=190, height=130)
        .facet(facet=alt.Facet("panel:N", title=None, sort=arms, header=alt.Header(labelLimit=190)), columns=COLUMNS)
    )


def keep_curves(folder: Path, kept: Path) -> list[str]:
    """Write the curves of a finished study into `kept`, and return the names of the figures.

    Nothing is written for a study whose runs did not measure the test split after every epoch.
    """
    study = read_study(folder)
    kinds = dict.fromkeys([study.study.primary.rpartition("/")[2], "loss"])
    rows_by_metric = {metric: curve_rows(study, metric) for metric in kinds}
    rows_by_metric = {metric: rows for metric, rows in rows_by_metric.items() if _is_curve(rows)}
    if not rows_by_metric:
        return []
    with (kept / CURVES).open("w", encoding="utf-8", newline="") as stream:
        table = csv.DictWriter(stream, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(row for rows in rows_by_metric.values() for row in rows)
    for metric, rows in rows_by_metric.items():
        unit = unit_of(study.study.outcome(f"test/{metric}"))
        scaled = [row | {key: _times(row[key], unit.factor) for key in ("mean", "low", "high")} for row in rows]
        words = metric.replace("_", " ")
        chart = panels(scaled, study.baseline, f"{words} ({unit.name})" if unit.name else words)
        (kept / f"curves-{metric}.svg").write_text(svg(chart), encoding="utf-8")
    return [f"curves-{metric}" for metric in rows_by_metric]


def _is_curve(rows: list[dict[str, Any]]) -> bool:
    return len({row["epoch"] for row in rows if row["split"] == "test"}) >= LEAST_EPOCHS


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def main() -> None:
    """Read the command line and keep the curves that it names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a finished study")
    parser.add_argument("kept", type=Path, help="where to keep its curves")
    options = parser.parse_args()
    try:
        names = keep_curves(options.folder, options.kept)
    except StudyError as error:
        parser.exit(1, f"{error}\n")
    print(f"wrote {', '.join(names)}" if names else "no run measured the test split after every epoch")


if __name__ == "__main__":
    main()
