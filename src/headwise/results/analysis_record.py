"""What the analysis of a study says, as typed records: analysis.json, the report and the terminal hold nothing else."""

from __future__ import annotations

from typing import Literal

from headwise.results.claim_record import JudgedClaim, JudgedPremise
from headwise.results.records import EnvironmentRecord, Outcome, Record

Verdict = Literal["better", "worse", "higher", "lower", "equivalent", "no evidence", "undecided"]


class Interval(Record):
    """Hold a mean over seeds with its 95 % interval and how that was found; None where there are too few values."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    how: str | None = None


class Difference(Interval):
    """Hold the paired difference of an arm to the baseline in one outcome, its joint interval, its tests and its
    verdict."""

    # arm − baseline, by seed
    by_seed: dict[str, float] = {}
    # seeds without a pair, and seeds in which a diverged run counts as the declared failure
    excluded: list[int] = []
    failed: list[int] = []
    p: float | None = None
    p_corrected: float | None = None
    smallest_p: float = 1.0
    exact: bool = True
    # the mean difference that would have been seen with 80 % power
    detectable: float | None = None
    # the margin within which the arm is shown to lie, and the p that it lies within the declared one
    within: float | None = None
    p_equivalent: float | None = None
    # how many times the seeds an unpaired comparison would have needed
    pairing: float | None = None
    # False where the evidence shows other initial weights or data than the baseline's: then the means alone are
    # compared
    paired: bool = True
    verdict: Verdict = "undecided"
    verdict_text: str = ""


class DivergedRun(Record):
    """Name a run that diverged, its step and how it was seen."""

    seed: int
    step: int | None = None
    why: str = ""
    run: str


class DivergenceTest(Record):
    """Hold McNemar's exact test of an arm against the baseline: seeds in which only the one or only the other
    diverged."""

    only_arm: int
    only_baseline: int
    p: float
    p_corrected: float
    verdict: Literal["more often", "less often", "no evidence"]


class RunCounts(Record):
    """Count the runs of an arm; `missing` holds the seeds without a result."""

    asked: int
    finished: int
    diverged: list[DivergedRun] = []
    missing: list[int] = []


class ArmAnalysis(Record):
    """Hold what is known of one arm: its runs, every outcome over seeds, its costs, and its differences to the
    baseline."""

    label: str
    runs: RunCounts
    metrics: dict[str, Interval]
    # medians over seeds, by what is counted: seconds_per_step, peak_memory_bytes, parameters, …
    costs: dict[str, float | None]
    differences: dict[str, Difference] = {}
    divergence: DivergenceTest | None = None

    @property
    def all_diverged(self) -> bool:
        """Return whether the arm has no figures because all of its runs that ended have diverged."""
        return bool(self.runs.diverged) and not self.runs.finished


class TrendRecord(Record):
    """Hold how an outcome changes along an axis of arms, per seed: the mean change from one value to the next, with its
    tests."""

    axis: str
    outcome: str
    values: list[float]
    arms: list[str]
    step: float | None = None
    p: float | None = None
    page: float | None = None
    seeds: int = 0
    # the value with the best mean, and whether it lies inside the axis
    best: float | None = None
    inside: bool = False
    text: str = ""


class CriticalRate(Interval):
    """Hold log10 of the learning rate at which runs begin to diverge along one axis of rates, over seeds, and how many
    decades it lies from that of the first such axis."""

    axis: str
    rates: list[float]
    by_seed: dict[str, float] = {}
    # the axis that it is compared with; "" for the first
    against: str = ""
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    # that the difference is 0, corrected for all axes
    p: float | None = None
    pairs: int = 0


class Cell(Record):
    """Name an arm and a seed."""

    arm: str
    seed: int


class DamagedRun(Record):
    """Name a finished run whose files are no longer what it wrote, and what became of each."""

    arm: str
    seed: int
    run: str
    files: list[str]

    @property
    def words(self) -> str:
        """Return which run it is and what became of its files."""
        return f"{self.arm}, seed {self.seed}, is damaged and left out: in runs/{self.run}, {', '.join(self.files)}"


def stranger_words(name: str) -> str:
    """Return the sentence on a folder among the runs that the study did not order."""
    return f"runs/{name} is no run of this study and is left out"


class Analysis(Record):
    """Hold the whole analysis of a study: its answer, every arm, its trends, and in which words the statistics are
    said."""

    format: Literal[2] = 2
    primary: str
    # every outcome that was recorded, the primary one first
    outcomes: dict[str, Outcome]
    baseline: str
    seeds: list[int]
    complete: bool
    missing: list[Cell] = []
    damaged: list[DamagedRun] = []
    # the names of folders among the runs that the study did not order
    strangers: list[str] = []
    failure: float | None = None
    margin: float | None = None
    arms: list[ArmAnalysis]
    trends: list[TrendRecord] = []
    # where a learning rate is swept and runs diverged
    critical_rates: list[CriticalRate] = []
    premises: list[JudgedPremise] = []
    claims: list[JudgedClaim] = []
    # what makes the whole study doubtful, such as a control arm with a verdict
    warnings: list[str] = []
    cost_is_indicative: bool = False
    statistics: dict[str, str]
    environments: list[EnvironmentRecord] = []
    answer: str = ""

    @property
    def metric(self) -> Outcome:
        """Return the outcome that decides."""
        return self.outcomes[self.primary]

    @property
    def compared(self) -> list[ArmAnalysis]:
        """Return the arms other than the baseline."""
        return [arm for arm in self.arms if arm.label != self.baseline]
