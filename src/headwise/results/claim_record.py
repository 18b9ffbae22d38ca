"""What is said of a claim once its tests are done, as typed records."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from headwise.results.records import ClaimTest, Record

Verdict = Literal[
    "as published",
    "same direction, smaller",
    "same direction, larger",
    "contrary",
    "no effect",
    "undecided",
    "not testable here",
]
# the published direction was seen
HELD = ("as published", "same direction, smaller", "same direction, larger")
# more seeds than these are no remedy: another setting is
MOST_SEEDS = 100
EARLIER = {"agrees": "as published", "does not agree": "contrary", "cannot be told": "undecided"}


def _renamed(found: Any) -> Any:
    """Read the three verdicts of earlier versions."""
    if isinstance(found, dict) and found.get("verdict") in EARLIER:
        return found | {"verdict": EARLIER[found["verdict"]]}
    return found


class JudgedTest(ClaimTest):
    """Hold one test of a claim with what was seen: a mean difference with its interval, its p, power, and the verdict.

    Differences are `arm` − `against`; along an axis the mean change from one value to the next, or for "inside" the
    smaller of the best inner value's gains over both ends. Interval, p and verdict are one test, at 5 % by itself.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    # of confidence 90 %: within a margin where two one-sided tests at 5 % show it
    inner_low: float | None = None
    inner_high: float | None = None
    n: int = 0
    # that there is no difference; of "same", that it is as large as the margin
    p: float | None = None
    # whether a verdict against the claim holds beside the claim's other tests too
    refutes: bool = False
    # to see the published effect, or to show the margin where there is no difference
    power: float | None = None
    # for 80 % power
    seeds_needed: int | None = None
    verdict: Verdict = "undecided"
    why: str = ""
    # the figures in words
    ours: str = ""

    _of_earlier_versions = model_validator(mode="before")(_renamed)

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Return the effect with its interval as multiples of the published one, the lower end first; None without
        one."""
        if not self.effect or self.mean is None or self.low is None or self.high is None:
            return None
        published = abs(self.effect) if self.says in ("higher", "rises") else -abs(self.effect)
        low, high = sorted((self.low / published, self.high / published))
        return self.mean / published, low, high


class JudgedPremise(Record):
    """Hold what must be true for a study's claims to mean anything, and whether it was seen."""

    name: str
    text: str = ""
    # None: the runs did not record it
    holds: bool | None = None
    ours: str = ""
    tests: list[JudgedTest] = []


class JudgedClaim(Record):
    """Hold a claim, what was published, what was seen here, and how both compare; a study of findings writes it
    itself."""

    text: str
    source: str = ""
    published: dict[str, str] = {}
    ours: str = ""
    verdict: Verdict
    # of "no effect": the margin in words
    within: str = ""
    why: str = ""
    seeds_needed: int | None = None
    tests: list[JudgedTest] = []

    _of_earlier_versions = model_validator(mode="before")(_renamed)

    @property
    def published_words(self) -> str:
        """Return the published figures in one line."""
        return "; ".join(f"{name} {value}".strip() for name, value in self.published.items())

    @property
    def verdict_words(self) -> str:
        """Return the verdict with the margin or the seeds that belong to it."""
        if self.verdict == "no effect" and self.within:
            return f"no effect within {self.within}"
        if self.verdict != "undecided" or self.seeds_needed is None:
            return self.verdict
        if self.seeds_needed > MOST_SEEDS:
            return "undecided: change the setting"
        return f"undecided ({self.seeds_needed} seeds would do)"


class ClaimsRecord(Record):
    """Hold the judged claims of one study as they are kept beside its results."""

    study: str
    scale: str = ""
    seeds: int | None = None
    premises: list[JudgedPremise] = []
    claims: list[JudgedClaim]
