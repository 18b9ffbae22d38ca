"""Checks of a study's claims before anything trains: their arms, axes and outcomes exist."""

from __future__ import annotations

from headwise.files.errors import suggest
from headwise.lab.experiments.evaluation import Evaluation
from headwise.lab.experiments.study import Study, read_sweep
from headwise.lab.experiments.task import Task
from headwise.lab.training.heads import watched_kinds
from headwise.lab.training.preflight import evaluations_of
from headwise_verdict import StudyError
from headwise_verdict.results import AxisRecord, Claim, ClaimTest, OutcomeNames, Premise


def canonical_claims(study: Study) -> tuple[Claim, ...]:
    """Return a study's claims with arms in their canonical form and axes as the study writes them.

    Raises:
        StudyError: naming the claim and its arm, axis, margin or outcome that the study does not have.
    """
    names = [premise.name for premise in study.premises]
    claims = []
    for claim in study.claims:
        try:
            tests = tuple(_canonical(test, study) for test in claim.tests)
            for name in claim.needs or ():
                if name not in names:
                    raise StudyError(
                        f"it needs the premise {name!r}, which the study does not state.{suggest(name, names)}"
                    )
        except StudyError as error:
            raise StudyError(f"the claim {claim.text!r} of {study.name}: {error}") from error
        claims.append(claim.model_copy(update={"tests": tests}))
    _refuse_wide_margins(study)
    return tuple(claims)


def canonical_premises(study: Study) -> tuple[Premise, ...]:
    """Return a study's premises with arms in their canonical form; raises as `canonical_claims`, naming the premise."""
    premises = []
    for premise in study.premises:
        try:
            tests = tuple(_canonical(test, study) for test in premise.tests)
        except StudyError as error:
            raise StudyError(f"the premise {premise.name!r} of {study.name}: {error}") from error
        premises.append(premise.model_copy(update={"tests": tests}))
    return tuple(premises)


def _refuse_wide_margins(study: Study) -> None:
    """Refuse a margin larger than a published effect in the same outcome, which would count as none."""
    tests = [test for claim in study.claims for test in claim.tests if test.level is None and not test.along_axis]
    effects = {
        test.outcome: abs(test.effect) for test in sorted(tests, key=lambda test: -abs(test.effect or 0)) if test.effect
    }
    for test in tests:
        effect = effects.get(test.outcome)
        margin = test.margin if test.by is None else -test.by
        if margin is not None and effect is not None and margin > effect:
            raise StudyError(
                f"{study.name}: the margin {margin:g} of {test.arm} in {test.outcome} exceeds the published effect "
                f"{effect:g}, which would count as none. Give a margin of {effect / 2:g} or less."
            )


def _canonical(test: ClaimTest, study: Study) -> ClaimTest:
    for outcome in filter(None, (test.outcome, test.against_outcome)):
        _check_outcome(outcome, study)
    if test.along_axis:
        return test.model_copy(update={"arm": _axis(test.arm, study, least=3 if test.says == "inside" else 2).text})
    if test.outcome == OutcomeNames.CRITICAL_RATE:
        return _of_rates(test, study)
    names = {"arm": study.arm(test.arm).text, "against": study.arm(test.against).text}
    if test.scale and test.scale not in study.scales:
        raise StudyError(f"{test.arm} is judged at the scale {test.scale!r} alone, which the study does not have.")
    for name in names.values():
        if name not in study.arms:
            raise StudyError(
                f"it has no arm {name}.{suggest(name, list(study.arms))} Its arms: {'; '.join(study.arms)}."
            )
    alike = test.outcome.rpartition("/")[2] == study.task.primary().rpartition("/")[2]
    if test.says == "same" and test.margin is None and (study.margin is None or not alike):
        raise StudyError(
            f"{test.arm} is claimed to be the same in {test.outcome}, without a margin. Give the test a margin."
        )
    return test.model_copy(update=names)


def _axis(text: str, study: Study, least: int = 2) -> AxisRecord:
    requested, _ = read_sweep(text, study.task)
    for axis in study.axes:
        if axis.arms == requested.arms:
            if len(axis.arms) < least:
                raise StudyError(
                    f"the axis {axis.text} has {len(axis.arms)} values, and a best value inside needs 3. Add values."
                )
            return axis
    have = "; ".join(axis.text for axis in study.axes) or "none"
    raise StudyError(f"it has no axis {text}. Its axes: {have}.")


def _of_rates(test: ClaimTest, study: Study) -> ClaimTest:
    """Return a test of critical rates with its sweeps as the study writes them."""
    axes = [_axis(text, study) for text in test.arms]
    for axis in axes:
        if not axis.of_rates:
            raise StudyError(
                f"the axis {axis.text} varies {axis.name}, but a critical rate needs an axis of learning_rate."
            )
    if test.says == "same" and test.margin is None:
        raise StudyError(
            f"{test.arm} is claimed to be the same in {test.outcome}, without a margin. Give the test a margin."
        )
    return test.model_copy(update=dict(zip(("arm", "against"), [axis.text for axis in axes])))


def _check_outcome(name: str, study: Study) -> None:
    if name in (OutcomeNames.DIVERGED, OutcomeNames.CRITICAL_RATE):
        return
    task, kind = study.task, name.partition("/")[0]
    if not isinstance(task, Task):
        raise StudyError(f"a study of a script cannot have claims. Remove the one on {name}.")
    if kind == "cost":
        _refuse_unless(name, [f"cost/{cost}" for cost in OutcomeNames.COSTS])
    elif kind == "alerts":
        if not study.watch:
            raise StudyError(f"only watched runs have the outcome {name}. Set watch=True.")
    elif kind == "rates":
        if not study.watch:
            raise StudyError(f"only watched runs have the outcome {name}. Set watch=True.")
        _refuse_unless(name, [f"rates/{rate}/{figure}" for rate in task.head_rates for figure in ("rate", "fit")])
    elif kind == "training":
        if task.loss_goal is None:
            raise StudyError(f"the outcome {name} needs a goal. Set the task's loss_goal.")
        _refuse_unless(name, [OutcomeNames.STEPS_TO_GOAL, OutcomeNames.SPIKES])
    elif kind == "watched":
        known = [f"watched/{one}/{which}" for one in task.watch_statistics for which in watched_kinds(one)]
        _refuse_unless(name, known)
        if not study.watch:
            raise StudyError(f"only watched runs have the outcome {name}. Set watch=True.")
    elif kind == "methods":
        _refuse_unless(name, [OutcomeNames.MOVED, OutcomeNames.MOVED_RELATIVE])
    elif kind == "heads":
        _refuse_unless("/".join(name.split("/")[:2]), [f"heads/{one}" for one in task.head_statistics])
    elif type(task).summary is Task.summary:
        _check_metric(name, task)


def _check_metric(name: str, task: Task) -> None:
    """Refuse a metric that no evaluation gives; the metrics of a task's own count or finish cannot be known."""
    evaluations, metric = evaluations_of(task), name.rpartition("/")[2]
    metrics = [metric.name for metric in task.all_metrics()]
    own = type(task).count is not Task.count or type(task).finish is not Task.finish
    if own or any(evaluation.count or evaluation.finish for evaluation in evaluations):
        metrics = list(dict.fromkeys([*metrics, metric]))
    _refuse_unless(name, [f"{place}/{metric}" for place in _places(task, evaluations) for metric in metrics])


def _places(task: Task, evaluations: list[Evaluation]) -> list[str]:
    names = [evaluation.name for evaluation in evaluations]
    by_phase = [evaluation.name for evaluation in evaluations if evaluation.when in ("phase", "epoch")]
    return [*names, "gap", *(f"{phase.name}/{name}" for phase in task.phases() for name in by_phase)]


def _refuse_unless(name: str, known: list[str]) -> None:
    if name not in known:
        have = f" Outcomes like it: {', '.join(known[:12])}." if known else ""
        raise StudyError(f"no run records the outcome {name}.{suggest(name, known)}{have}")
