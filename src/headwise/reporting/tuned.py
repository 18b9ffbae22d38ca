"""Say beside each arm of a tuned study how many trials chose it, and at which learning rate."""

from __future__ import annotations

import re
from collections.abc import Sequence

NOTE = re.compile(
    r"(?P<text>.+): (?P<all>all of )?(?P<trials>\d+) trials? on validation (?:chose|diverged; it stays) (?P<label>.+) "
    r"with learning rate (?P<rate>[^ ]+)\."
)


def chosen_by_trials(notes: Sequence[str]) -> dict[str, str]:
    """Return of every tuned arm, by its label, what its trials chose; empty for a study that was not tuned."""
    found = {}
    for note in notes:
        if told := NOTE.fullmatch(note):
            trials = f"{told['trials']} trials" if int(told["trials"]) != 1 else "1 trial"
            start = f"all of {trials} diverged" if told["all"] else f"chosen by {trials}"
            before = f", from {told['text']}" if told["text"] != told["label"] else ""
            found[told["label"]] = f"{start}{before}; learning rate {told['rate']}"
    return found
