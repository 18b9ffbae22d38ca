"""Alerts of a watched run as outcomes: when the first of each kind came, and how long before a divergence."""

from __future__ import annotations

from pathlib import Path

from headwise.files.durable import read_lines
from headwise.results.records import Divergence


def alert_outcomes(stream: Path, divergence: Divergence | None) -> dict[str, float]:
    """Give alerts/<kind>/step, and alerts/<kind>/lead in a run that diverged: the steps from the alert to the divergence.

    Readings count steps from 0, the divergence from 1: a reading of step s saw the weights whose loss is the (s + 1)th.
    """
    first: dict[str, int] = {}
    last = None if divergence is None else divergence.step - 1
    for record in read_lines(stream):
        kind = record.get("alert")
        if kind and (last is None or record["step"] <= last):
            first[kind] = min(record["step"], first.get(kind, record["step"]))
    found = {f"alerts/{kind}/step": float(step) for kind, step in first.items()}
    if last is None:
        return found
    return found | {f"alerts/{kind}/lead": float(last - step) for kind, step in first.items()}
