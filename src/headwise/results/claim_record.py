"""What is said of a claim once its tests are done, as typed records."""

from __future__ import annotations

from typing import Literal

from headwise.results.records import ClaimTest, Record

Verdict = Literal["agrees", "does not agree", "cannot be told"]


class JudgedTest(ClaimTest):
    """Hold one test of a claim with what was seen: a mean difference with its interval, power, and the verdict.

    Differences are `arm` − `against`; along an axis the mean change from one value to the next, or for "inside" the smaller
    of the best inner value's gains over both ends. The intervals of all tests of a claim hold together with 95 %.
    """

    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    # of McNemar's exact test, where the outcome is divergence
    p: float | None = None
    # to see the published effect, or to show the margin where there is no difference
    power: float | None = None
    # for 80 % power
    seeds_needed: int | None = None
    verdict: Verdict = "cannot be told"
    why: str = ""
    # the figures in words
    ours: str = ""


class JudgedClaim(Record):
    """Hold a claim, what was published, what was seen here, and whether both agree; a study of findings writes it itself."""

    text: str
    source: str = ""
    published: dict[str, str] = {}
    ours: str = ""
    verdict: Verdict
    why: str = ""
    seeds_needed: int | None = None
    tests: list[JudgedTest] = []

    @property
    def published_words(self) -> str:
        """Give the published figures in one line."""
        return "; ".join(f"{name} {value}".strip() for name, value in self.published.items())


class ClaimsRecord(Record):
    """Hold the judged claims of one study as they are kept beside its results."""

    study: str
    scale: str = ""
    seeds: int | None = None
    claims: list[JudgedClaim]
