"""The noise floor: the spread of a baseline over seeds, measured once and kept in a file of the repository."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwise_verdict.files.durable import read_json, write_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.judging.evidence import Sample, against_floor
from headwise_verdict.reporting.table_rows import figure_of
from headwise_verdict.results.digests import broken_seal, sealed

FILE = Path("headwise-floor.json")
# runs below which a spread is too uncertain to be kept
FEWEST = 5
# days after which a floor is called old
OLD = 30.0
# a candidate's spread whose probability under the floor's is below this differs from it
DIFFERS = 0.01


@dataclass(frozen=True)
class Floor:
    """The figures of the baseline's runs, and where they come from."""

    metric: str
    baseline: str
    values: tuple[float, ...]
    commit: str
    machine: str
    # seconds since 1970
    measured: float

    @property
    def mean(self) -> float:
        """Return the mean of the runs."""
        return math.fsum(self.values) / len(self.values)

    @property
    def spread(self) -> float:
        """Return their standard deviation."""
        return math.sqrt(math.fsum((x - self.mean) ** 2 for x in self.values) / (len(self.values) - 1))

    def sample(self, candidate: Sequence[float]) -> Sample:
        """Return the evidence's sample of a candidate's runs against this baseline."""
        return against_floor(candidate, self.mean, self.spread, len(self.values))

    def notes(self, candidate: Sequence[float]) -> list[str]:
        """Return what speaks against judging these runs by this floor."""
        found = []
        # figures of few digits coincide
        same = sum(x in self.values and x != round(x, 3) for x in candidate)
        if same > 1:
            found.append(f"{same} of the candidate's figures are among the floor's: are these its runs?")
        days = (time.time() - self.measured) / 86400
        if days > OLD:
            found.append(f"the floor was measured {days:.0f} days ago: measure it again with --calibrate")
        if self.machine != machine():
            found.append(f"the floor was measured on another machine ({self.machine}): spreads and means may differ")
        if len(candidate) > 2:
            mean = math.fsum(candidate) / len(candidate)
            own = math.fsum((x - mean) ** 2 for x in candidate) / (len(candidate) - 1)
            if self.spread and _rare(own / self.spread**2, len(candidate) - 1, len(self.values) - 1):
                found.append(
                    f"the candidate's spread is {math.sqrt(own):.3g} and the floor's {self.spread:.3g}: the floor does "
                    "not describe it. Give pairs of runs instead"
                )
        return found


def _rare(ratio: float, own: int, others: int) -> bool:
    from scipy.stats import f

    return 2 * min(f.cdf(ratio, own, others), f.sf(ratio, own, others)) < DIFFERS


def calibrate(path: Path, metric: str, baseline: str, values: Sequence[float]) -> Floor:
    """Keep the figures of a baseline's runs as the noise floor and return it.

    Raises:
        StudyError: if another file is there, for figures that are all the same, and for fewer than five runs. The
            fluctuation of one run's curve is no spread between runs: it lacks what initial weights and the order of the
            data change.
    """
    if len(values) < FEWEST:
        raise StudyError(
            f"a noise floor needs {FEWEST} runs of the baseline with different seeds, and there are {len(values)}. The "
            "fluctuation within one run's curve is no substitute: it lacks what initial weights and the order of the "
            "data change."
        )
    if len(set(values)) == 1:
        raise StudyError(
            f"all {len(values)} runs of {baseline} have the figure {values[0]:g}: a floor without spread accepts any "
            "change. Do the runs read their seeds? Or choose a metric with more digits."
        )
    if os.path.lexists(path) and not _is_floor(path):
        raise StudyError(f"{path} is not a noise floor, and is not overwritten. Choose another --floor.")
    floor = Floor(metric, baseline, tuple(values), commit(), machine(), time.time())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, sealed(json.loads(json.dumps(asdict(floor)))))
    return floor


def read_floor(path: Path, metric: str) -> Floor:
    """Return the kept floor.

    Raises:
        StudyError: if there is none, it is of another metric, or its figures were edited.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise StudyError(
            f"{path} holds no noise floor. Measure one: headwise judge RUNS --metric {metric} --calibrate."
        )
    if why := broken_seal(content, required=True):
        raise StudyError(f"{path} {why}: its figures were edited. Measure the floor again with --calibrate.")
    if content.get("metric") != metric:
        raise StudyError(f"{path} is the floor of {content.get('metric')}, not of {metric}.")
    return _checked(path, content)


def _is_floor(path: Path) -> bool:
    """Return whether a file has the fields of a floor, though its figures may have been edited."""
    content = None if path.is_symlink() else read_json(path)
    return isinstance(content, dict) and {field.name for field in fields(Floor)} <= content.keys()


def _checked(path: Path, content: dict[str, Any]) -> Floor:
    """Return the floor of a file whose digest is right, which anyone can compute."""
    values = content.get("values")
    figures = [figure_of(x) for x in values] if isinstance(values, list) else []
    names = ("metric", "baseline", "commit", "machine")
    measured = figure_of(content.get("measured"))
    if (
        len(figures) < FEWEST
        or None in figures
        or len(set(figures)) == 1
        or measured is None
        or not all(isinstance(content.get(name), str) for name in names)
    ):
        raise StudyError(f"{path} holds no figures of a baseline's runs. Measure the floor again with --calibrate.")
    return Floor(values=tuple(x for x in figures if x is not None), measured=measured, **{n: content[n] for n in names})


def commit() -> str:
    """Return the commit of the working folder, or ""."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> str:
    """Return the name of the processor's architecture and of the host."""
    return f"{platform.machine()}, {platform.node()}"
