"""The environments in which results were made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any


def distinct_environments(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the distinct commits, versions and hardware of results with their number of runs, most frequent first."""
    distinct: dict[str, dict[str, Any]] = {}
    for result in results:
        environment = {name: result.get(name) for name in ("commit", "versions", "hardware")}
        distinct.setdefault(json.dumps(environment, sort_keys=True), {"runs": 0, **environment})["runs"] += 1
    return sorted(distinct.values(), key=lambda environment: -environment["runs"])
