"""Audit: what was read of a checkpoint, and the files it can be written to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headwise.auditing.judging import worst_heads

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The health of a checkpoint's heads.

    Attributes:
        checkpoint: its name; `kind` and `model` say what it is.
        records: dicts of site, depth, head (None for a layer or a group), statistic, value.
        alerts: records that passed a limit, with a sentence, a remedy and its source.
        layers: per attention layer its heads, layout, notes, and which figures do not apply and why.
        spectra: singular values, "site|head|qk" or "site|head|vo" to a list, largest first.
        unused: weights of attention layers that the files hold and the model has no place for.
        data: what the activations were read on; None where weights alone were read.
        command, versions, commit, hardware, seconds: how it was made.
    """

    checkpoint: str
    kind: str
    model: str
    records: list[Record]
    alerts: list[Record]
    layers: list[Record]
    spectra: dict[str, list[float]]
    unused: list[str] = field(default_factory=list)
    data: str | None = None
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def worst(self, most: int = 5) -> list[Record]:
        """Give the worst heads first: site, depth, head, score and the reasons in words."""
        return worst_heads(self.records, self.alerts, most)

    def notes(self) -> list[str]:
        """Give what is to be known of the products, each note once with the layers it is about."""
        about: dict[str, list[str]] = {}
        for layer in self.layers:
            for note in [*layer["notes"], *dict.fromkeys(layer["missing"].values())]:
                about.setdefault(note.replace(f"{layer['site']} ", "a layer "), []).append(layer["site"])
        total = len(self.layers)
        said = [
            f"the files hold {len(self.unused)} weights of attention layers that the model of this config has not: {_few(self.unused)}"
        ]
        return (said if self.unused else []) + [
            note if len(sites) == total else f"{note} ({_few(sites)})" for note, sites in about.items()
        ]

    def figures(self) -> dict[str, dict[str, Any]]:
        """Give the records in short form: per statistic whether it is per "head", "group" or "layer", and per site its values in order."""
        made: dict[str, dict[str, Any]] = {}
        for record in self.records:
            per = "group" if "group" in record else "layer" if record["head"] is None else "head"
            found = made.setdefault(record["statistic"], {"per": per, "values": {}})
            found["values"].setdefault(record["site"], []).append(_short(record["value"], 7))
        return made

    def to_json(self) -> str:
        """Give everything as JSON, records in the short form of `figures`; a number that is not finite becomes null."""
        content = {field: value for field, value in asdict(self).items() if field not in ("records", "spectra")}
        content |= {"worst": self.worst(), "notes": self.notes(), "figures": self.figures()}
        content["spectra"] = {place: [_short(x, 4) for x in values] for place, values in self.spectra.items()}
        rows = [
            f" {json.dumps(key)}: {json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)}"
            for key, value in content.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n}\n"

    def write(self, out: str | Path) -> tuple[Path, Path]:
        """Write the report to `out` and the JSON beside it; give both paths. HTML, or Markdown where `out` ends in .md."""
        page = Path(out)
        page = page if page.suffix in (".html", ".md") else page.with_name(page.name + ".html")
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(self._report(page.suffix), encoding="utf-8")
        beside = page.with_suffix(".json")
        beside.write_text(self.to_json(), encoding="utf-8")
        return page, beside

    def _report(self, suffix: str) -> str:
        if suffix == ".md":
            from headwise.auditing.summary import markdown

            return markdown(self)
        from headwise.auditing.page import audit_page

        return audit_page(self)


def _few(sites: list[str], most: int = 3) -> str:
    return ", ".join(sites[:most]) + (f" and {len(sites) - most} more" if len(sites) > most else "")


def _short(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
