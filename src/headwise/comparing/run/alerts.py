"""Alerts of a watched run as outcomes: when the first of each kind came, and how long before a divergence."""

from __future__ import annotations

from pathlib import Path

from headwise.comparing.results.records import Divergence
from headwise.files.durable import read_lines


def alert_outcomes(stream: Path, divergence: Divergence | None) -> dict[str, float]:
    """Give alerts/<kind>/step, and alerts/<kind>/lead (divergence step − alert step) in a run that diverged."""
    first: dict[str, int] = {}
    for record in read_lines(stream):
        kind = record.get("alert")
        if kind and (divergence is None or record["step"] <= divergence.step):
            first[kind] = min(record["step"], first.get(kind, record["step"]))
    found = {f"alerts/{kind}/step": float(step) for kind, step in first.items()}
    if divergence is None:
        return found
    return found | {f"alerts/{kind}/lead": float(divergence.step - step) for kind, step in first.items()}
