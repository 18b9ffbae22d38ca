"""Typed records of a study's analysis, the only source of analysis.json, the report and the terminal output."""

from __future__ import annotations

from typing import Any, Literal

from headwise_verdict.results.records import (
    ClaimKind,
    ClaimTest,
    EarlierVerdict,
    EnvironmentRecord,
    Outcome,
    OutcomeNames,
    StoredRecord,
)

Verdict = Literal[
    "as published",
    "same direction, smaller",
    "same direction, larger",
    "contrary",
    "no effect",
    # the interval lies within a margin, or an allowance, that is wider than an effect reported in the same outcome:
    # no number of seeds can show the claim
    "margin too wide",
    "undecided",
    "not testable here",
]
# of the difference that each prediction expects
SIGNS = {"higher": 1, "lower": -1, "rises": 1, "falls": -1}
# verdicts that confirm the published direction
HELD = ("as published", "same direction, smaller", "same direction, larger")
# verdicts that speak against it
AGAINST: tuple[Verdict, ...] = ("contrary", "no effect")
# if more seeds are needed, a change of the setting is advised instead
MOST_SEEDS = 100


class JudgedTest(ClaimTest):
    """One test of a claim with its result: the mean difference, its interval, p, power and verdict.

    Differences are `arm` − `against`, less the amount to exceed with `by`; along an axis, the mean change from one
    value to the next, or for "inside" the smaller of the best inner value's gains over the two ends. Interval, p and
    verdict come from one test at 5 %, uncorrected for the claim's other tests.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    # the 90 % interval, which is within a margin if two one-sided tests at 5 % show it
    inner_low: float | None = None
    inner_high: float | None = None
    n: int = 0
    # of the hypothesis of no difference; for "same", of a difference as large as the margin
    p: float | None = None
    # whether a verdict against the claim also holds in the joint intervals of all the claim's tests
    refutes: bool = False
    # to see the published effect; for "same", to show the margin if there is no difference
    power: float | None = None
    # for a power of 80 %
    seeds_needed: int | None = None
    verdict: Verdict = "undecided"
    why: str = ""
    # the figures in words
    ours: str = ""

    @property
    def by_share(self) -> bool:
        """Return whether it is a statement about these runs only, whose share that diverged decides without a test."""
        return self.outcome == OutcomeNames.DIVERGED and self.level is not None

    @property
    def shown(self) -> bool:
        """Return whether the figures show what a premise asks for."""
        if self.by_share and self.mean is not None:
            return self.mean * SIGNS[self.says] >= 0
        return self.verdict in HELD

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Return effect, lower end and upper end as multiples of the published effect; None if one is unknown."""
        if not self.effect or self.mean is None or self.low is None or self.high is None:
            return None
        published = abs(self.effect) if self.says in ("higher", "rises") else -abs(self.effect)
        low, high = sorted((self.low / published, self.high / published))
        return self.mean / published, low, high


class JudgedPremise(StoredRecord):
    """A premise of a study's claims, and whether it holds."""

    name: str
    text: str = ""
    # None: the runs did not record the figures
    holds: bool | None = None
    ours: str = ""
    tests: list[JudgedTest] = []

    @property
    def state(self) -> str:
        """Return "holds", "fails", "not shown" where more seeds might show it, or "not recorded"."""
        if self.holds is None:
            return "not recorded"
        if self.holds:
            return "holds"
        unshown = [test for test in self.tests if not test.shown]
        return "not shown" if all(test.verdict == "undecided" and not test.by_share for test in unshown) else "fails"


class JudgedClaim(StoredRecord):
    """A claim, its published figures, the figures measured here, and the verdict that compares them."""

    text: str
    source: str = ""
    published: dict[str, str] = {}
    ours: str = ""
    verdict: Verdict
    kind: ClaimKind = "measured"
    before: list[EarlierVerdict] = []
    # for "no effect" and "margin too wide": the margin in words
    within: str = ""
    why: str = ""
    seeds_needed: int | None = None
    tests: list[JudgedTest] = []

    @property
    def published_words(self) -> str:
        """Return the published figures in one line."""
        return "; ".join(f"{name} {value}".strip() for name, value in self.published.items())

    @property
    def verdict_words(self) -> str:
        """Return the verdict with its margin or the number of seeds needed."""
        if self.verdict == "no effect" and self.within:
            return f"no effect within {self.within}"
        if self.verdict == "margin too wide" and self.within:
            return f"margin too wide: {self.within}"
        if self.verdict != "undecided" or self.seeds_needed is None:
            return self.verdict
        if self.seeds_needed > MOST_SEEDS:
            return "undecided: change the setting"
        return f"undecided ({self.seeds_needed} seeds would do)"

    @property
    def history_words(self) -> str:
        """Return the earlier verdicts with their dates and reasons, and what the claim is if not measured; or ""."""
        kind = "" if self.kind == "measured" else KINDS_IN_WORDS[self.kind]
        earlier = (f"{one.verdict} until {one.until}: {one.why}" for one in self.before)
        return "; ".join(filter(None, [kind, *earlier]))

    @property
    def once_contrary(self) -> bool:
        """Return whether it stood contrary before a premise, a margin or a setting was stated after its runs."""
        return self.verdict != "contrary" and any(one.verdict == "contrary" for one in self.before)


# what a claim that is not measured is, and how many of them are counted
KINDS_IN_WORDS: dict[str, str] = {
    "calculation": "a calculation",
    "by construction": "true by construction",
    "figures known": "stated when its figures were known",
}
KINDS_COUNTED: dict[str, str] = {
    "calculation": "calculations",
    "by construction": "true by construction",
    "figures known": "stated when figures were known",
}


class ClaimsRecord(StoredRecord):
    """The judged claims of one study, as stored with its results."""

    study: str
    scale: str = ""
    seeds: int | None = None
    premises: list[JudgedPremise] = []
    claims: list[JudgedClaim]


class TableRecord(StoredRecord):
    """One table of findings."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


class ChartRecord(StoredRecord):
    """One chart of findings: its rows, the fields of its axes, and its style."""

    title: str
    x: str
    y: str
    data: list[dict[str, Any]]
    series: str | None = None
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    points: bool = False


class FindingsRecord(StoredRecord):
    """The content of findings.json; the first paragraph is the answer."""

    name: str = ""
    scale: str = ""
    title: str = ""
    question: str = ""
    paragraphs: list[str] = []
    tables: list[TableRecord] = []
    charts: list[ChartRecord] = []
    # judged by the study itself, from its own figures
    claims: list[JudgedClaim] = []
    settings: dict[str, Any] = {}
    command: str | list[str] = ""
    commit: str | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    notes: list[str] = []
    # duration of the whole study, from training to drawing figures
    seconds: float | None = None


ArmVerdict = Literal["better", "worse", "higher", "lower", "equivalent", "no evidence", "undecided"]


class Interval(StoredRecord):
    """A mean over seeds with its 95 % interval and the interval's method; None where there are too few values."""

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    how: str | None = None


class Difference(Interval):
    """The paired difference of an arm from the baseline in one outcome, with its joint interval, tests and verdict."""

    # arm − baseline, by seed
    by_seed: dict[str, float] = {}
    # seeds without a pair, and seeds in which a diverged run counts as the declared failure
    excluded: list[int] = []
    failed: list[int] = []
    p: float | None = None
    p_corrected: float | None = None
    smallest_p: float = 1.0
    exact: bool = True
    # the mean difference that would have been detected with a power of 80 %
    detectable: float | None = None
    # the smallest margin within which the arm is shown to lie, and the p for the declared margin
    within: float | None = None
    p_equivalent: float | None = None
    # factor by which an unpaired comparison would have needed more seeds
    pairing: float | None = None
    # False if the evidence shows that initial weights or data differ from the baseline's; only means are then compared
    paired: bool = True
    # why there is no verdict: which seeds of the arm or of the baseline are copies of one run; "" if none are
    copies: str = ""
    verdict: ArmVerdict = "undecided"
    verdict_text: str = ""


class DivergedRun(StoredRecord):
    """A run that diverged, with its step and the reason."""

    seed: int
    step: int | None = None
    why: str = ""
    run: str


class DivergenceTest(StoredRecord):
    """McNemar's exact test of an arm against the baseline, from the seeds in which only one of both diverged."""

    only_arm: int
    only_baseline: int
    p: float
    p_corrected: float
    verdict: Literal["more often", "less often", "no evidence"]


class RunCounts(StoredRecord):
    """The numbers of an arm's runs; `missing` lists the seeds without a result."""

    asked: int
    finished: int
    diverged: list[DivergedRun] = []
    missing: list[int] = []


class ArmAnalysis(StoredRecord):
    """The analysis of one arm: its runs, every outcome over seeds, its costs, and its differences from the baseline."""

    label: str
    runs: RunCounts
    metrics: dict[str, Interval]
    # medians over seeds, by cost: seconds_per_step, peak_memory_bytes, parameters, …
    costs: dict[str, float | None]
    differences: dict[str, Difference] = {}
    divergence: DivergenceTest | None = None

    @property
    def all_diverged(self) -> bool:
        """Return whether all of the arm's runs that ended diverged, so that it has no figures."""
        return bool(self.runs.diverged) and not self.runs.finished


class TrendRecord(StoredRecord):
    """The change of an outcome along an axis: the mean over seeds from one value to the next, with its tests."""

    axis: str
    outcome: str
    values: list[float]
    arms: list[str]
    step: float | None = None
    p: float | None = None
    page: float | None = None
    seeds: int = 0
    # the value with the best mean, and whether it is neither the first nor the last
    best: float | None = None
    inside: bool = False
    text: str = ""


class CriticalRate(Interval):
    """Log10 of the learning rate at which runs begin to diverge along an axis, over seeds.

    The difference, in decades, is from the first axis of learning rates.
    """

    axis: str
    rates: list[float]
    by_seed: dict[str, float] = {}
    # the axis that this one is compared with; "" for the first axis
    against: str = ""
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    # of the hypothesis that the difference is 0, corrected for all axes
    p: float | None = None
    pairs: int = 0


class Cell(StoredRecord):
    """An arm and a seed."""

    arm: str
    seed: int


class DamagedRun(StoredRecord):
    """A finished run whose files were changed afterwards, with a phrase about each such file."""

    arm: str
    seed: int
    run: str
    files: list[str]

    @property
    def words(self) -> str:
        """Return the sentence on this run and its damaged files."""
        return f"{self.arm}, seed {self.seed}, is damaged and left out: in runs/{self.run}, {', '.join(self.files)}"


def stranger_words(name: str) -> str:
    """Return the sentence on a folder in runs/ that is not part of the study."""
    return f"runs/{name} is not a run of this study and is omitted"


class Analysis(StoredRecord):
    """The whole analysis of a study: its answer, arms, trends and claims, and descriptions of its statistics."""

    format: Literal[2] = 2
    primary: str
    # every recorded outcome, the primary one first
    outcomes: dict[str, Outcome]
    baseline: str
    seeds: list[int]
    complete: bool
    missing: list[Cell] = []
    damaged: list[DamagedRun] = []
    # names of the folders in runs/ that are not part of the study
    strangers: list[str] = []
    failure: float | None = None
    margin: float | None = None
    arms: list[ArmAnalysis]
    trends: list[TrendRecord] = []
    # empty unless a learning rate is swept and runs diverged
    critical_rates: list[CriticalRate] = []
    premises: list[JudgedPremise] = []
    claims: list[JudgedClaim] = []
    # reasons to doubt the whole study, such as a control arm with a verdict
    warnings: list[str] = []
    cost_is_indicative: bool = False
    statistics: dict[str, str]
    environments: list[EnvironmentRecord] = []
    answer: str = ""

    @property
    def metric(self) -> Outcome:
        """Return the primary outcome, which decides the verdicts."""
        return self.outcomes[self.primary]

    @property
    def compared(self) -> list[ArmAnalysis]:
        """Return the arms other than the baseline."""
        return [arm for arm in self.arms if arm.label != self.baseline]
