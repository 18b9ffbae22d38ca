"""Outcomes as users declare them: a name of any text, the direction that is better, and a unit."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.records import MetricRecord

# the name is any text, such as W&B's "eval/loss" or "val acc (top-1)"
OUTCOME = re.compile(r"\s*(?P<name>\S.*?)\s*:(?P<direction>higher|lower)(?::(?P<unit>.*))?", re.DOTALL)


def declared_outcomes(texts: Sequence[str]) -> list[MetricRecord]:
    """Return the metrics in `accuracy:higher`, `eval/loss:lower:nats` or `accuracy:higher:%` (shares in [0, 1]).

    Raises:
        StudyError: if a text has no name or direction, or two have the same name.
    """
    metrics: dict[str, MetricRecord] = {}
    for text in texts:
        match = OUTCOME.fullmatch(text)
        if match is None:
            raise StudyError(
                f"--outcome {text!r} does not say which direction is good. Write NAME:higher or NAME:lower, such as "
                "accuracy:higher; a third part is the unit: accuracy:higher:% for shares in [0, 1]."
            )
        name, higher = match["name"], match["direction"] == "higher"
        if name in metrics:
            both = ", as higher and as lower" if metrics[name].higher_is_better != higher else ""
            raise StudyError(f"--outcome {name} is given twice{both}. Give it once.")
        metrics[name] = MetricRecord(
            name=name, label=name.replace("_", " "), higher_is_better=higher, unit=(match["unit"] or "").strip()
        )
    return list(metrics.values())
