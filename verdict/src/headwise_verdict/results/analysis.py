"""The analysis of a study: outcomes, arms, divergence, trends, claims, and the answer in words."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from headwise_verdict.files.errors import count
from headwise_verdict.results.analysis_record import (
    Analysis,
    ArmAnalysis,
    Cell,
    DamagedRun,
    Difference,
    Interval,
    RunCounts,
)
from headwise_verdict.results.answer import answer
from headwise_verdict.results.claims import judged_claims, judged_premises
from headwise_verdict.results.critical_rates import critical_rates
from headwise_verdict.results.differences import not_paired, paired_differences, without_evidence
from headwise_verdict.results.diverged_runs import diverged_runs, divergence_tests
from headwise_verdict.results.doubts import baseline_doubts
from headwise_verdict.results.folder import StudyFolder, read_study
from headwise_verdict.results.intervals import (
    ALPHA,
    BOOTSTRAP_FROM,
    EXACT_UP_TO,
    RESAMPLES,
    Scale,
    interval,
    scale_of,
    share,
)
from headwise_verdict.results.records import Outcome, OutcomeNames, environments_of
from headwise_verdict.results.trend import trends

# the baseline again under another name
CONTROL = "same"
AnyInterval = TypeVar("AnyInterval", bound=Interval)


def analyse(folder: str | Path) -> Analysis:
    """Return the whole analysis of a study folder; the errors are those of `results.folder.read_study`."""
    return analyse_study(read_study(folder))


def analyse_study(study: StudyFolder) -> Analysis:
    """Return the analysis of a study. Shares are in [0, 1], losses in nats, gaps are train − test."""
    declared = {name: study.study.outcome(name) for name in outcome_names(study)}
    outcomes = {name: _as_percents(study, one) for name, one in declared.items()}
    compared = {
        name: paired_differences(
            study, name, one.higher_is_better, study.study.margin if name == study.study.primary else None
        )
        for name, one in outcomes.items()
    }
    tests, missing = divergence_tests(study), study.missing()
    scales = scales_of(study, outcomes.values())
    arms = [on_their_scales(_arm(study, label, outcomes, compared), scales) for label in study.arms]
    results = [run.result for run in study.runs.values() if run.result]
    analysis = Analysis(
        primary=study.study.primary,
        outcomes=outcomes,
        baseline=study.baseline,
        seeds=study.seeds,
        complete=not missing,
        missing=[Cell(arm=arm, seed=seed) for arm, seed in missing],
        damaged=[
            DamagedRun(arm=run.arm, seed=run.seed, run=run.path.name, files=list(run.damage)) for run in study.damaged()
        ],
        strangers=list(study.strangers),
        failure=study.study.failure,
        margin=study.study.margin,
        arms=[arm.model_copy(update={"divergence": tests.get(arm.label)}) for arm in arms],
        trends=trends(study, outcomes),
        critical_rates=critical_rates(study),
        premises=(premises := judged_premises(study)),
        claims=judged_claims(study, premises),
        warnings=[
            *_warnings(compared[study.study.primary]),
            *_copies(study),
            *_pairing_warnings(study),
            *baseline_doubts(study),
            *_unit_warnings(outcomes, declared),
        ],
        cost_is_indicative=any(result.cost_is_indicative for result in results),
        statistics=_statistics_in_words(study),
        environments=environments_of(results),
    )
    return analysis.model_copy(update={"answer": answer(analysis)})


def outcome_names(study: StudyFolder) -> list[str]:
    """Return the names of the outcomes that any run recorded, the primary one first, without costs."""
    primary, kinds = study.study.primary, [metric.name for metric in study.study.metrics]
    recorded = dict.fromkeys(
        name
        for run in study.runs.values()
        if run.result
        for name in run.result.metrics
        if (name in kinds or not name.startswith("cost/")) and run.metric(name) is not None
    )
    if study.study.axes and any(run.status == "diverged" for run in study.runs.values()):
        # along an axis, the share of diverged runs is an outcome like others
        recorded[OutcomeNames.DIVERGED] = None
    main = study.study.parts(primary)[0]

    def place(name: str) -> tuple[int, int]:
        evaluation, kind = study.study.parts(name)
        named = (evaluation == other for other in ("validation", "train", "gap"))
        group = [evaluation == main, evaluation.startswith("test"), *named]
        rank = group.index(True) if True in group else 6 if evaluation.startswith("heads") else 5
        return rank, kinds.index(kind) if kind in kinds else len(kinds)

    return [primary, *sorted((name for name in recorded if name != primary), key=place)]


def _as_percents(study: StudyFolder, outcome: Outcome) -> Outcome:
    """Return an outcome declared as a share in percent if its figures are percents already."""
    sizes = [abs(value) for run in study.runs.values() if (value := run.metric(outcome.name)) is not None]
    if outcome.unit != "%" or not sizes:
        return outcome
    # error rates, such as those of words, can exceed 1
    size = statistics.median(sizes) if outcome.higher_is_better is False else max(sizes)
    # of rounding alone, a share of all may exceed 1
    return outcome.model_copy(update={"unit": "percent"}) if size > 1 + 1e-6 else outcome


def _unit_warnings(outcomes: dict[str, Outcome], declared: dict[str, Outcome]) -> list[str]:
    return [
        f"The unit of {one.label} is %, which is for shares in [0, 1]. Its figures are larger and shown as percents: "
        "write the unit percent."
        for name, one in outcomes.items()
        if one.unit != declared[name].unit
    ]


def _arm(
    study: StudyFolder, label: str, outcomes: dict[str, Outcome], compared: dict[str, dict[str, Difference]]
) -> ArmAnalysis:
    runs = study.of(label)
    figures = {name: [study.figure(label, seed, name) for seed in study.seeds] for name in outcomes}
    costs = dict.fromkeys(
        name for run in study.runs.values() if run.result for name in run.result.metrics if name.startswith("cost/")
    )
    return ArmAnalysis(
        label=label,
        runs=RunCounts(
            asked=len(study.seeds),
            finished=sum(run.status == "finished" for run in runs),
            diverged=diverged_runs(study, label),
            missing=[seed for arm, seed in study.missing() if arm == label],
        ),
        metrics={
            name: (share if name == OutcomeNames.DIVERGED else interval)([one for one in values if one is not None])
            for name, values in figures.items()
        },
        costs={
            name.removeprefix("cost/"): _median([one for run in runs if (one := run.metric(name)) is not None])
            for name in costs
        },
        differences={name: compared[name][label] for name in outcomes} if label != study.baseline else {},
    )


def scales_of(study: StudyFolder, outcomes: Iterable[Outcome]) -> dict[str, Scale]:
    """Return the scale of every outcome's figures, by name."""
    return {
        one.name: scale_of(one, (study.figure(arm, seed, one.name) for arm in study.arms for seed in study.seeds))
        for one in outcomes
    }


def on_their_scales(arm: ArmAnalysis, scales: dict[str, Scale]) -> ArmAnalysis:
    """Return an arm whose intervals, of means and of differences, end where their figures do."""
    means = {name: _on_scale(one, scales[name]) for name, one in arm.metrics.items()}
    differences = {name: _on_scale(one, scales[name].minus(scales[name])) for name, one in arm.differences.items()}
    return arm.model_copy(update={"metrics": means, "differences": differences})


def _on_scale(record: AnyInterval, scale: Scale) -> AnyInterval:
    low, high = scale.clipped(record.mean, record.low, record.high)
    ends: dict[str, float | None] = {"low": low, "high": high}
    if isinstance(record, Difference) and record.within is not None:
        ends["within"] = min(record.within, scale.high)
    return record.model_copy(update=ends)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _warnings(differences: dict[str, Difference]) -> list[str]:
    control = differences.get(CONTROL)
    if control is None or control.verdict in ("no evidence", "equivalent", "undecided"):
        return []
    return [
        f"The control arm {CONTROL!r} is the baseline under another name, and yet it is {control.verdict_text}: "
        "something besides the arms differs between these runs. Find it before you trust a verdict here."
    ]


def _copies(study: StudyFolder) -> list[str]:
    arms: dict[str, list[str]] = {}
    for arm, why in study.copies.items():
        arms.setdefault(why, []).append(arm)
    warnings = [
        f"{_and(labels)}: {why}. Copies of one run have no spread, so no verdict rests on them. Let the "
        "seed decide the first weights and the order of the data (run.seed in a script); if these runs do differ, add "
        "an outcome that shows it, such as the loss."
        for why, labels in arms.items()
    ]
    if same := [arm for arm in study.same_starts if arm not in study.copies]:
        warnings.append(
            f"All runs of {_and(same)} begin with the same weights, as runs of a pretrained model do. It is assumed "
            "that their seeds order the data differently: the script did not show its data (run.saw)."
        )
    return warnings


def _and(labels: list[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _pairing_warnings(study: StudyFolder) -> list[str]:
    warnings = [
        f"{arm} is not paired with {study.baseline} ({why}): its means are compared, which needs many more seeds. Seed "
        "the script with run.seed before the model is built and the data are shuffled."
        for arm, why in not_paired(study).items()
    ]
    if without_evidence(study):
        warnings.append(
            "It is assumed that runs of a seed are pairs: the script showed neither its initial weights "
            "(run.regularize) nor its data (run.saw)."
        )
    return warnings


def _statistics_in_words(study: StudyFolder) -> dict[str, str]:
    arms, several = count(len(study.arms) - 1, "arm"), len(study.arms) > 2
    failure = study.study.failure
    diverged = "diverged and missing runs make no pair and are listed"
    if failure is not None:
        diverged = (
            f"a diverged run counts as {failure:g} in {study.study.outcome(study.study.primary).label}, as the task "
            "declares, and makes no pair in other outcomes; missing runs make no pair and are listed"
        )
    return {
        "difference": f"arm − baseline within a seed; {diverged}",
        "interval": f"95 %, {f'valid for {arms} jointly, ' if several else ''}by sign flips; of a mean, Student's t "
        f"with fewer than {BOOTSTRAP_FROM} seeds and the BCa bootstrap with more; of the share of diverged runs, "
        "Clopper and Pearson's",
        "p": f"two-sided sign-flip test, exact with up to {EXACT_UP_TO} pairs and by {RESAMPLES:,} random flips with "
        f"more; it is below {ALPHA} exactly where the interval excludes 0",
        "correction": f"max-T for each outcome: the signs of a seed are flipped in {arms} together, and the largest "
        "|t| is the reference"
        if several
        else "none, as there is one arm",
        "verdict": f"better or worse when the corrected p < {ALPHA}; equivalent only within a declared margin, by two "
        "one-sided tests",
        "power": "the difference that four of five such studies would detect",
        "divergence": "McNemar's exact test on pairs, corrected by joint flips of all arms' runs",
    }
