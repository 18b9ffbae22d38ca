"""Draw the README's four pictures from kept results, light and dark, into docs/pictures.

    python docs/pictures.py            draw them
    python docs/pictures.py --check    check that they are those of the kept results
    python docs/pictures.py --heads results/entropy-collapse    keep the heads of a finished study, then draw

Each SVG begins with a digest of what it draws, so that a check does not depend on the fonts of a machine. heads.csv is
of one seed of `headwise compare entropy-collapse --seeds 1`; the other pictures are of docs/results.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from headwise.files.optional_imports import load
from headwise_verdict.pages.charts import heat_map
from headwise_verdict.reporting.difference_section import forest
from headwise_verdict.reporting.outcome_texts import forest_row, short_names, titled
from headwise_verdict.results.folder import read_study
from headwise_verdict.results.stored import checked_analysis

DOCS = Path(__file__).resolve().parent
RESULTS, OUT = DOCS / "results", DOCS / "pictures"
HEADS = OUT / "heads.csv"
WIDTH, HEIGHT = 440, 230
# alerts of the picture, in words; others caught nothing
ALERTS = {
    "any rule": "all alerts together",
    "loss_spike": "spike of the loss",
    "entropy_collapse": "entropy collapse",
    "logit_growth": "large logits",
    "over_smoothing": "over-smoothing",
    "rank_collapse": "rank collapse",
}
ARMS = {"baseline": "plain", 'SigmaReparam(init="one")': "with SigmaReparam"}


def forest_plot() -> dict[str, Any]:
    """Return the paired differences of the blog's methods on CIFAR-10."""
    analysis = checked_analysis(RESULTS / "blog-cifar10" / "analysis.json")
    names, metric = short_names(analysis), analysis.metric
    found = [(names[arm.label], arm.differences[metric.name]) for arm in analysis.compared]
    rows = [forest_row(name, entry, metric, name) for name, entry in found if entry.mean is not None]
    rows.sort(key=lambda row: -row["mean"])
    spec = forest([row | {"seeds": []} for row in rows], title=titled(metric, difference=True))
    return spec | {"height": HEIGHT}


def heads_over_training() -> dict[str, Any]:
    """Return the entropy of every head over training, without and with SigmaReparam."""
    with HEADS.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    data = [
        {"arm": ARMS[row["arm"]], "head": f"{row['layer']}.{row['head']}", "step": int(row["step"])}
        | {"share": float(row["entropy_share"])}
        for row in rows
    ]
    last = {arm: max(row["step"] for row in data if row["arm"] == arm) for arm in ARMS.values()}
    shortest = min(last, key=lambda arm: last[arm])
    ends = [row for row in data if row["arm"] == shortest and row["step"] == last[shortest]]
    colour = {
        "field": "arm",
        "type": "nominal",
        "scale": {"domain": list(ARMS.values()), "range": ["var(--vermillion)", "var(--blue)"]},
        "legend": {"title": None, "orient": "top"},
    }
    x = {"field": "step", "type": "quantitative", "title": "training step", "axis": {"grid": False, "tickCount": 5}}
    x |= {"scale": {"nice": False}}
    y = {"field": "share", "type": "quantitative", "title": "entropy of a head (share of its range)"}
    line = {"mark": {"type": "line", "strokeWidth": 1.3, "opacity": 0.75}, "data": {"values": data}}
    line["encoding"] = {"x": x, "y": y, "color": colour, "detail": {"field": "head", "type": "nominal"}}
    cross = {"mark": {"type": "point", "shape": "cross", "angle": 45, "filled": True, "size": 60}}
    cross |= {"data": {"values": ends}, "encoding": {"x": x, "y": y, "color": colour}}
    return {"layer": [line, cross], "height": HEIGHT}


def audited_heads() -> dict[str, Any]:
    """Return the entropy of every head of a public checkpoint, as an audit shows it."""
    audit = json.loads((RESULTS / "audit" / "all-MiniLM-L6-v2.json").read_text(encoding="utf-8"))
    values = audit["figures"]["attention_entropy"]["values"]
    depths = {layer["site"]: layer["depth"] for layer in audit["layers"]}
    rows = [
        {"layer": depths[site], "head": head, "value": value}
        for site, figures in values.items()
        for head, value in enumerate(figures)
    ]
    return heat_map(rows, value_title="attention entropy (nats)") | {"height": HEIGHT - 30}


def measured_alerts() -> dict[str, Any]:
    """Return the share of faults that each alert caught, with its interval and its median lead."""
    rules = json.loads((RESULTS / "alarms" / "alarms.json").read_text(encoding="utf-8"))
    rows = [
        {"alert": words, "share": 100 * rules[name]["share"][0]}
        | {"low": 100 * rules[name]["share"][1], "high": 100 * rules[name]["share"][2]}
        | {"text": f"{rules[name]['caught']} of {rules[name]['faults']}, {rules[name]['lead']:.0f} steps ahead"}
        for name, words in ALERTS.items()
    ]
    texts = json.dumps({row["alert"]: row["text"] for row in rows})
    plain = {"domain": False, "ticks": False, "grid": False, "labelLimit": 0, "labelPadding": 8}
    plain |= {"labelColor": "var(--ink)", "labelFontSize": 11.5}
    y = {"field": "alert", "type": "nominal", "sort": [row["alert"] for row in rows], "title": None}
    x = {"field": "share", "type": "quantitative", "title": "faults caught (%), with 95 % interval"}
    x |= {"scale": {"domain": [0, 100]}}
    bars = {"mark": {"type": "rule", "strokeWidth": 2.5, "color": "var(--blue)"}}
    bars["encoding"] = {"x": x | {"field": "low"}, "x2": {"field": "high"}, "y": y | {"axis": plain}}
    dots = {"mark": {"type": "point", "filled": True, "size": 90, "opacity": 1, "color": "var(--blue)"}}
    right = plain | {"orient": "right", "labelExpr": f"({texts})[datum.value]"}
    dots["encoding"] = {"x": x, "y": y | {"axis": right}}
    spec = {"data": {"values": rows}, "layer": [bars, dots], "height": HEIGHT - 30}
    return spec | {"resolve": {"axis": {"y": "independent"}}}


PICTURES = {"forest": forest_plot, "heads": heads_over_training, "audit": audited_heads, "alerts": measured_alerts}


def colours(scheme: str) -> dict[str, str]:
    """Return the colours of the pages' style sheet in "light" or "dark", by variable."""
    blocks = (files("headwise_verdict.pages") / "shell.css").read_text(encoding="utf-8").split("}")[:2]
    light, dark = (dict(re.findall(r"(--[a-z]+): (#[0-9a-f]+);", block)) for block in blocks)
    return light if scheme == "light" else light | dark


def drawn(spec: dict[str, Any], scheme: str) -> str:
    """Return a picture as SVG in the colours of a scheme, on a transparent ground, with the digest of its content."""
    inks = colours(scheme)
    text = json.dumps(spec | {"width": WIDTH, "background": None, "autosize": {"type": "fit-x", "contains": "padding"}})
    text = re.sub(r"var\((--[a-z]+)\)", lambda match: inks[match[1]], text)
    muted, line = inks["--muted"], inks["--line"]
    axis = {"labelColor": muted, "titleColor": muted, "gridColor": line, "domainColor": line, "tickColor": line}
    axis |= {"titleFontWeight": "normal", "labelFontSize": 11, "titleFontSize": 11.5}
    legend = {"labelColor": muted, "titleColor": muted, "titleFontWeight": "normal"}
    config = {"axis": axis, "legend": legend, "view": {"stroke": None}}
    version = ".".join(load("altair", "study").SCHEMA_VERSION.lstrip("v").split(".")[:2])
    svg = load("vl_convert", "study").vegalite_to_svg(text, vl_version=version, config=config)
    return svg.replace("<svg ", f"<!-- {digest(spec)} -->\n<svg ", 1) + "\n"


def digest(spec: dict[str, Any]) -> str:
    """Return the digest of a picture's content."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def keep_heads(folder: Path) -> None:
    """Write the entropy of every head at every reading of the first seed of a study, by arm."""
    study = read_study(folder)
    with HEADS.open("w", encoding="utf-8", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["arm", "step", "layer", "head", "entropy_share"])
        for arm in ARMS:
            for record in study.runs[arm, study.seeds[0]].health():
                if record.get("statistic") == "entropy_share" and "alert" not in record:
                    place = [record[name] for name in ("step", "depth", "head")]
                    lines.writerow([arm, *place, f"{record['value']:.4g}"])


def stale() -> Iterator[str]:
    """Yield the names of pictures that are missing or not of the kept results."""
    for name, build in PICTURES.items():
        mark = f"<!-- {digest(build())} -->"
        for scheme in ("light", "dark"):
            path = OUT / f"{name}-{scheme}.svg"
            if not path.is_file() or not path.read_text(encoding="utf-8").startswith(mark):
                yield path.name


def main() -> None:
    """Read the command line; draw or check the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a picture is old")
    parser.add_argument("--heads", type=Path, help="the folder of a finished entropy-collapse study to keep")
    options = parser.parse_args()
    if options.check:
        if old := list(stale()):
            sys.exit(f"docs/pictures: {', '.join(old)} are not of the kept results: run python docs/pictures.py")
        return
    if options.heads:
        keep_heads(options.heads)
    for name, build in PICTURES.items():
        for scheme in ("light", "dark"):
            (OUT / f"{name}-{scheme}.svg").write_text(drawn(build(), scheme), encoding="utf-8")


if __name__ == "__main__":
    main()
