"""How good each alarm was found to be: its lead and its false alarms, from the file that the study of the alarms
writes."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

# What the study writes as alarms.json, beside this file once its results are kept.
FILE = "measured_alarms.json"
UNKNOWN = "how early and how often wrong this alarm is was not measured"
PAGE = "docs/results/alarms"


@cache
def measured() -> dict[str, Any]:
    """Return what was measured of each alarm; empty until the results of the study are kept."""
    found = files("headwise.watching").joinpath(FILE)
    return json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}


def in_words(alert: str) -> str:
    """Return the share of faults that an alert caught, its median lead and its false alarms; that it was not measured,
    else."""
    found = measured().get(alert)
    if not found or not found["healthy_steps"]:
        return UNKNOWN
    rate, low, high = found["per_1000"]
    false = f"{rate:.3g} [{low:.3g}, {high:.3g}] false alarms in 1,000 healthy steps"
    caught = f"caught {found['caught']} of {found['faults']} faults"
    lead = "" if found["lead"] is None else f", {found['lead']:.0f} steps before the loss at the median"
    return f"{caught}{lead}, {false} ({PAGE})"
