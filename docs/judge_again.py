"""Judge the kept results by the current rules, without training, and list the verdicts that change.

python docs/judge_again.py            rewrite claims, differences and tables of docs/results; add to changed_verdicts.md
python docs/judge_again.py --check    list the verdicts that would change

Where every figure was kept by seed (seeds.csv), all tests are judged from these. Else a kept analysis has the
differences from the baseline by seed, and means with Student's intervals: tests of differences are judged from the
former, tests against a level from the latter, and tests of figures that were not kept (single heads, a comparison of
two outcomes) from the interval kept with the claim.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from keep_results import (
    CLAIMS,
    SEEDS,
    claims_table,
    critical_table,
    divergence_table,
    outcome_table,
    premises_table,
    trend_table,
    with_history,
    write_differences,
)
from recompute import read_seeds
from scipy import stats

from headwise.lab.comparing.claim_check import canonical_claims, canonical_premises
from headwise.lab.experiments.study import Study
from headwise.lab.studies.registry import load_study, study_names
from headwise_verdict.pages.formats import unit_named
from headwise_verdict.reporting.plain_tables import study_csv
from headwise_verdict.results.analysis import on_their_scales, scales_of
from headwise_verdict.results.analysis_record import (
    SIGNS,
    Analysis,
    ClaimsRecord,
    Interval,
    JudgedClaim,
    JudgedPremise,
    JudgedTest,
)
from headwise_verdict.results.answer import answer
from headwise_verdict.results.claim_tests import Criteria, Estimate, directed, same
from headwise_verdict.results.claims import (
    all_diverged,
    amount_in_words,
    by_amount,
    claimed,
    constant,
    judged_claims,
    judged_tests,
    premised,
)
from headwise_verdict.results.critical_rates import critical_rates
from headwise_verdict.results.differences import paired_differences
from headwise_verdict.results.diverged_runs import divergence_tests
from headwise_verdict.results.folder import RunFolder, StudyFolder, whole_of
from headwise_verdict.results.records import ClaimTest, Divergence, MetricRecord, OutcomeNames, RunResult, StudyRecord
from headwise_verdict.results.stored import checked_analysis
from headwise_verdict.results.trend import trends

RESULTS = Path(__file__).parent / "results"
CHANGED, TABLE = "changed_verdicts.md", "table.csv"
# rounding errors of a difference of two shares in double and in single precision
DOUBLE, SINGLE = 2.0**-50, 2.0**-23
# what a test compares, in which direction
JUDGED = ("margin", "refutes", "power", "seeds_needed", "verdict", "why")
ASKED = ("arm", "against", "outcome", "against_outcome", "says")


class Kept(StudyFolder):
    """A kept study. Where only differences by seed were kept, a figure is the difference plus the baseline's mean."""

    def figure(self, arm: str, seed: int, name: str) -> float | None:
        """Return a figure, or one without the baseline's own variation between seeds, which cancels in differences."""
        run = self.runs.get((arm, seed))
        if run is None or run.result is None:
            return None
        return float(run.status == "diverged") if name == OutcomeNames.DIVERGED else run.result.metrics.get(name)

    @property
    def copies(self) -> dict[str, str]:  # type: ignore[override]
        """Return which runs are copies of one run, where their figures were kept by seed."""
        return super().copies if (self.path / SEEDS).is_file() else {}


def kept_study(folder: Path, analysis: Analysis, study: Study, scale: str) -> Kept:
    """Return the study of a kept analysis, with the current claims and premises of the study."""
    figures: dict[tuple[str, int], dict[str, float | None]] = {}
    base = {name: one.mean or 0.0 for name, one in analysis.arms[0].metrics.items()}
    for arm in analysis.compared:
        for name, difference in arm.differences.items():
            exact = _exact(list(difference.by_seed.values()), analysis.outcomes[name].unit)
            for seed, value in difference.by_seed.items():
                figures.setdefault((arm.label, int(seed)), {})[name] = base[name] + exact(value)
                figures.setdefault((analysis.baseline, int(seed)), {})[name] = base[name]
    for name, by_arm in (read_seeds(folder) or {}).items():
        for label, by_seed in by_arm.items():
            for at, value in by_seed.items():
                figures.setdefault((label, int(at)), {})[name] = value
    runs = {}
    for arm in analysis.arms:
        diverged_seeds = {one.seed for one in arm.runs.diverged}
        for seed in analysis.seeds:
            if seed in arm.runs.missing:
                continue
            result = RunResult(
                status="diverged" if seed in diverged_seeds else "finished",
                arm=arm.label,
                seed=seed,
                hash="0",
                metrics=figures.get((arm.label, seed), {}),
                divergence=Divergence(step=1) if seed in diverged_seeds else None,
                format=2,
            )
            runs[arm.label, seed] = RunFolder(arm.label, seed, folder, result)
    record = StudyRecord(
        arms=[arm.label for arm in analysis.arms],
        baseline=analysis.baseline,
        seeds=analysis.seeds,
        scale=scale,
        primary=analysis.primary,
        metrics=[MetricRecord(**vars(metric)) for metric in study.task.all_metrics()],
        margin=analysis.margin,
        axes=list(study.axes),
        claims=list(canonical_claims(study)),
        premises=list(canonical_premises(study)),
    )
    return Kept(folder, record, runs)


def _exact(differences: list[float], unit: str) -> Any:
    if unit != "%" or not differences:
        return float
    # differences that are exact already stay as they are, so that a second judging changes nothing
    shares = whole_of(differences, DOUBLE) or whole_of(differences, SINGLE)
    return shares.exact if shares else float


def levelled(study: Kept, analysis: Analysis, test: JudgedTest, old: JudgedTest | None) -> JudgedTest:
    """Judge a test without kept figures by seed from a kept interval: of the arm's mean, or of the claim's old test."""
    arm = next((one for one in analysis.arms if one.label == test.arm), None)
    estimate = None
    if old is not None and old.level == test.level:
        estimate = _kept_estimate(old, old.beyond - test.beyond)
    elif test.level is not None and arm and (mean_record := arm.metrics.get(test.outcome)):
        estimate = _estimate_of(mean_record, test.level)
    if estimate is None or test.says == "inside":
        return test
    outcome, size = study.study.outcome(test.outcome), test.effect
    unit = unit_named(outcome.unit)
    margin = test.margin if test.margin is not None else None if size is None else abs(size) / 2
    criteria = Criteria(0.05, unit, size, margin)
    decision = same(estimate, criteria) if test.says == "same" else directed(estimate, SIGNS[test.says], criteria)
    if test.by is not None:
        decision = by_amount(test, decision)
    same_in_all = test.level is not None and estimate.low == estimate.high
    ours = (
        old.ours
        if old and old.ours and not same_in_all
        else f"{outcome.label} of {test.arm} {unit.number((estimate.mean or 0) + (test.level or 0))}, compared with "
        f"{unit.number(test.level)} {unit.name}".rstrip()
        + f": {unit.number(estimate.mean, signed=True)} {unit.difference}".rstrip()
        + (
            f", {constant(estimate.pairs)}"
            if same_in_all
            else f" {unit.interval(estimate.low, estimate.high, signed=True)}"
        )
    )
    if test.by is not None and (amount := amount_in_words(test, unit)) not in ours:
        ours += f", {amount}"
    figures = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high, "n": estimate.pairs, "p": estimate.p}
    figures |= {
        "inner_low": estimate.inner_low,
        "inner_high": estimate.inner_high,
        "ours": ours.strip(),
        "margin": margin,
    }
    result = {"verdict": decision.verdict, "why": decision.why, "power": decision.power, "seeds_needed": decision.seeds}
    return test.model_copy(update=figures | result | {"refutes": decision.verdict in ("contrary", "no effect")})


def _kept_estimate(test: JudgedTest, shift: float) -> Estimate | None:
    """Return the estimates that were kept with a test, by whatever method, moved by `shift`, which leaves no p."""
    if test.mean is None or test.low is None or test.high is None:
        return None
    error = (test.high - test.low) / 2 / float(stats.t.ppf(0.975, max(test.n - 1, 1)))
    middle, low, high = test.mean + shift, test.low + shift, test.high + shift
    inner = [None if end is None else end + shift for end in (test.inner_low, test.inner_high)]
    return Estimate(middle, low, high, inner[0], inner[1], error, test.n, None if shift else test.p)


def _estimate_of(mean: Interval, level: float) -> Estimate | None:
    """Return the estimates of a mean's 95 % interval, taken as Student's t, compared with a level."""
    if mean.mean is None or mean.low is None or mean.high is None:
        return None
    degrees, middle = max(mean.n - 1, 1), mean.mean - level
    # an interval that was cut off at an end of its scale has its full length on the other side
    error = max(mean.high - mean.mean, mean.mean - mean.low) / float(stats.t.ppf(0.975, degrees))
    half = float(stats.t.ppf(0.95, degrees)) * error
    p = float(2 * stats.t.sf(abs(middle) / error, degrees)) if error else float(middle == 0)
    ends = (mean.low - level, mean.high - level, middle - half, middle + half)
    return Estimate(middle, *ends, error, mean.n, p)


def _needs_values(test: ClaimTest) -> bool:
    """Return whether a test cannot be judged from differences from the baseline; of every run it is kept whether it
    diverged."""
    return test.outcome != OutcomeNames.DIVERGED and (test.level is not None or bool(test.against_outcome))


def judged_again(
    study: Kept, analysis: Analysis, before: list[JudgedClaim]
) -> tuple[list[JudgedPremise], list[JudgedClaim]]:
    """Return premises and claims with their verdicts by the current rules."""
    old = {(claim.text, at): test for claim in before for at, test in enumerate(claim.tests)}
    by_seed = (study.path / SEEDS).is_file()

    def settled(tests: list[JudgedTest], text: str) -> list[JudgedTest]:
        settled_tests = []
        for at, test in enumerate(tests):
            old_test = old.get((text, at))
            same_test = old_test is not None and all(getattr(old_test, name) == getattr(test, name) for name in ASKED)
            other_scale = test.scale not in ("", study.study.scale)
            lost = (not by_seed and _needs_values(test)) or "was not recorded" in test.why
            if lost:
                kept = levelled(study, analysis, test, old_test if same_test and not other_scale else None)
                # a test of another scale has its figures, and no verdict on them
                test = kept.model_copy(update={name: getattr(test, name) for name in JUDGED}) if other_scale else kept
            settled_tests.append(test)
        return settled_tests

    lost = all_diverged(study)
    premises = [premised(one, settled(judged_tests(study, one.tests, {}), ""), lost) for one in study.study.premises]
    claims = []
    for record, claim in zip(study.study.claims, judged_claims(study, premises), strict=True):
        failed = [one for one in premises if one.holds is False and (record.needs is None or one.name in record.needs)]
        claims.append(claimed(record, settled(claim.tests, claim.text), failed))
    return premises, claims


def as_kept(premises: list[JudgedPremise], before: list[JudgedPremise]) -> list[JudgedPremise]:
    """Return the premises; one that is as before, by the same tests, has its kept figures, which are of runs."""

    def asked(premise: JudgedPremise) -> Any:
        fields = (*ASKED, "level", "by", "margin", "effect", "scale")
        tests = [tuple(getattr(test, name) for name in fields) for test in premise.tests]
        return premise.name, premise.text, premise.holds, tests

    known = [(asked(one), one) for one in before if all(_needs_values(test) for test in one.tests)]
    return [next((old for what, old in known if what == asked(one)), one) for one in premises]


def compared_again(study: Kept, analysis: Analysis) -> Analysis:
    """Return the analysis with differences and divergences judged by the current tests; the gain from pairing stays."""
    tests, arms = divergence_tests(study), []
    differences = {
        name: paired_differences(
            study, name, one.higher_is_better, analysis.margin if name == analysis.primary else None
        )
        for name, one in analysis.outcomes.items()
        if name != OutcomeNames.DIVERGED
    }
    for arm in analysis.arms:
        judged = {
            name: differences[name][arm.label].model_copy(
                update={
                    "pairing": one.pairing,
                    "failed": one.failed,
                    "mean": one.mean if name not in differences else differences[name][arm.label].mean,
                }
            )
            if name in differences
            else one
            for name, one in arm.differences.items()
        }
        arms.append(arm.model_copy(update={"differences": judged, "divergence": tests.get(arm.label, arm.divergence)}))
    again = {(one.axis, one.outcome): one for one in trends(study, analysis.outcomes)}
    all_trends = [again.get((one.axis, one.outcome), one) if one.step is not None else one for one in analysis.trends]
    rates, scales = critical_rates(study), scales_of(study, analysis.outcomes.values())
    arms = [on_their_scales(arm, scales) for arm in arms]
    judged_analysis = analysis.model_copy(update={"arms": arms, "trends": all_trends, "critical_rates": rates})
    return judged_analysis.model_copy(update={"answer": answer(judged_analysis)})


def renewed_page(
    page: str, before: Analysis, after: Analysis, premises: list[JudgedPremise], claims: list[JudgedClaim]
) -> str:
    """Return a page with the new answer, premises, claims and tables of differences."""
    page = page.replace(before.answer, after.answer, 1)
    parts = [
        part
        for part in re.split(r"(?m)^(?=## )", page)
        if not part.startswith(("## Premises", "## Critical learning rate"))
    ]
    sections = []
    for part in parts:
        title = part.partition("\n")[0]
        if title == "## Claims":
            lines = [*premises_table(premises), *claims_table(claims)]
            part = "\n".join(lines) + "\n"
        for lines in [
            trend_table(after) or [""],
            divergence_table(after),
            *(outcome_table(after, name) for name in after.outcomes),
        ]:
            if title == lines[0]:
                rest = part.partition("\n\n")[2].partition("\n\n")[2]
                part = "\n".join(lines) + "\n" + rest
                break
        if title == "## Along the axes" and (rates := critical_table(after)):
            part += "\n".join(rates) + "\n"
        sections.append(part)
    return "".join(sections)


def renew(folder: Path, *, write: bool, why: str = "judged again") -> list[list[str]]:
    """Judge a kept study again; return a row per changed verdict: study, claim, old and new verdict, and reason."""
    path = folder / "analysis.json"
    analysis, claims_path = checked_analysis(path), folder / CLAIMS
    record = (
        ClaimsRecord.model_validate_json(claims_path.read_text(encoding="utf-8")) if claims_path.is_file() else None
    )
    stored_claims = json.loads(claims_path.read_text(encoding="utf-8"))["claims"] if record else []
    study = kept_study(folder, analysis, load_study(folder.name).STUDY, record.scale if record else "")
    after = compared_again(study, analysis)
    premises, claims = judged_again(study, analysis, record.claims if record else [])
    if not (folder / SEEDS).is_file():
        premises = as_kept(premises, record.premises if record else [])
    claims = with_history(claims, record.claims if record else [], why)
    old_verdicts = {claim["text"]: claim["verdict"] for claim in stored_claims}
    if write:
        page = (folder / "README.md").read_text(encoding="utf-8")
        (folder / "README.md").write_text(renewed_page(page, analysis, after, premises, claims), encoding="utf-8")
        after = after.model_copy(update={"premises": premises, "claims": claims})
        path.write_text(_json(after.model_dump(mode="json")), encoding="utf-8")
        write_differences(folder, after)
        (folder / TABLE).write_text(study_csv(after), encoding="utf-8")
        if record:
            record = record.model_copy(update={"premises": premises, "claims": claims})
            claims_path.write_text(_json(record.model_dump(mode="json")), encoding="utf-8")
    return [
        [
            f"[{folder.name}]({folder.name}/README.md)",
            claim.text,
            old_verdicts.get(claim.text, "–"),
            claim.verdict_words,
            claim.why or "–",
        ]
        for claim in claims
        if old_verdicts.get(claim.text) != claim.verdict
    ]


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def main() -> None:
    """Judge every kept study again, and write or print the changed verdicts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; print the verdicts that would change")
    parser.add_argument("--why", default="judged again", help="why verdicts change; kept with the earlier ones")
    parser.add_argument("studies", nargs="*", help="names of kept studies; none: all")
    options = parser.parse_args()
    rows = []
    for folder in sorted(path.parent for path in RESULTS.glob("*/analysis.json")):
        if folder.name in study_names() and (not options.studies or folder.name in options.studies):
            rows += renew(folder, write=not options.check, why=options.why)
            print(folder.name, flush=True)
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    if options.check:
        print("\n".join(lines))
    elif lines:
        with (RESULTS / CHANGED).open("a", encoding="utf-8") as stream:
            stream.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
