"""The tables of a league's worlds and symptoms, from their runs alone: what the page and its CSV files are made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwise_papers.league.contest import MOVE, Contest
from headwise_papers.league.contest_files import PLAIN, SYMPTOMS
from headwise_papers.league.rate_search import Chosen, finals
from headwise_papers.league.transfer import FEWEST, Gain, Pooled, Standing, advice, common, gain_of, pooled, turns

# the two entries that are searches of the plain model: from the usual rate to the best of the grid, and beyond it
TUNED, FURTHER = "tune the learning rate", "tune it further"


@dataclass(frozen=True)
class Row:
    """One contestant in one complete world; the gain of the two searches is against the plain model before them."""

    world: str
    contestant: str
    kind: str
    arm: str
    rate: float
    is_inside: bool
    validation: float
    test: float
    diverged: int
    to_plain: Gain
    to_control: Gain | None


def standing(contest: Contest) -> Standing:
    """Return the gains of a complete world's contestants against its best plain model and best control.

    The best control is that with the fewest validation errors, so that test data have no part in the choice.
    """
    plain = contest.final_errors("baseline", contest.best_plain())
    chosen = {name: one for name, one in contest.chosen().items() if name != PLAIN}
    controls = {name: one.error for name, one in chosen.items() if contest.contestants[name].kind == "control"}
    control = min(controls, key=lambda name: controls[name]) if controls else ""
    errors = {name: contest.final_errors(one.arm, one.rate) for name, one in chosen.items()}
    return Standing(
        contest.world.name,
        {name: gain_of(own, plain) for name, own in errors.items()},
        {name: gain_of(own, errors[control]) for name, own in errors.items() if control and name != control},
        control,
    )


def searches(contest: Contest) -> dict[str, Row]:
    """Return the gains of tuning the plain model: from the usual rate to the grid's best, and by twice the search."""
    plain = contest.plain()
    if plain is None or not contest.again():
        raise ValueError(f"{contest.world.name} is not complete")
    again = contest.again()[0]
    usual, own, further = (
        contest.final_errors("baseline", rate) for rate in (contest.world.usual_rate, plain.rate, again.rate)
    )
    return {
        TUNED: _row(contest, TUNED, plain, own, gain_of(own, usual), None),
        FURTHER: _row(contest, FURTHER, again, further, gain_of(further, own), None),
    }


def rows(contest: Contest) -> list[Row]:
    """Return a complete world's rows: the two searches of the plain model first, then contestants by falling gain."""
    found = standing(contest)
    others = []
    for name, gain in sorted(found.to_plain.items(), key=lambda pair: -pair[1].mean):
        one = contest.chosen()[name]
        errors = contest.final_errors(one.arm, one.rate)
        others.append(_row(contest, name, one, errors, gain, found.to_control.get(name)))
    return [*searches(contest).values(), *others]


def suffices(contest: Contest) -> bool:
    """Return whether the last repetition of the search moved the best plain model by at most `MOVE` of its spread."""
    return contest.move() <= MOVE


def advised(contests: Sequence[Contest]) -> dict[str, list[Contest]]:
    """Return the worlds of each symptom from which advice may come: complete, and their search shown to suffice."""
    return {
        symptom: [one for one in contests if one.world.symptom == symptom and one.state == "complete" and suffices(one)]
        for symptom in SYMPTOMS
    }


@dataclass(frozen=True)
class OfSymptom:
    """What is told of one symptom with three worlds or more: means over worlds, transfer, and words of advice."""

    symptom: str
    standings: list[Standing]
    means: dict[str, Pooled]
    tuned: Pooled
    further: Pooled
    words: dict[str, str]


def of_symptom(symptom: str, contests: Sequence[Contest]) -> OfSymptom | None:
    """Return what is told of a symptom; None below three worlds."""
    if len(contests) < FEWEST:
        return None
    standings = [standing(one) for one in contests]
    told = [searches(one) for one in contests]
    means = {name: pooled([one.to_plain[name] for one in standings]) for name in common(standings)}
    return OfSymptom(
        symptom,
        standings,
        dict(sorted(means.items(), key=lambda pair: -pair[1].mean)),
        pooled([one[TUNED].to_plain for one in told]),
        pooled([one[FURTHER].to_plain for one in told]),
        advice(standings),
    )


def tables(contests: Sequence[Contest]) -> dict[str, list[dict[str, object]]]:
    """Return every table by name, as lists of rows: premises, gains, symptoms and transfer."""
    complete = [one for one in contests if one.state == "complete"]
    found: dict[str, list[dict[str, object]]] = {"premises": [], "gains": [], "symptoms": [], "transfer": []}
    for one in contests:
        for premise in one.premises():
            record = {"premise": premise.name, "says": premise.says, "figure": premise.figure, "level": premise.level}
            found["premises"].append({"world": one.world.name, **record, "holds": int(premise.holds)})
    for one in complete:
        found["gains"] += [_record(row) for row in rows(one)]
    for symptom, some in advised(contests).items():
        told = of_symptom(symptom, some)
        if told is None:
            continue
        every: Mapping[str, Pooled] = {TUNED: told.tuned, FURTHER: told.further, **told.means}
        for name, mean in every.items():
            record = {"symptom": symptom, "contestant": name, "worlds": mean.worlds, "mean": mean.mean}
            ends = {end: getattr(mean, end) for end in ("low", "high", "new_low", "new_high", "tau2")}
            found["symptoms"].append({**record, **ends, "advice": told.words.get(name, "")})
        for turn in turns(told.standings):
            against = turn.to_control
            found["transfer"].append(
                {
                    "symptom": symptom,
                    "left_out": turn.left_out,
                    "chosen": turn.chosen,
                    **{end: getattr(turn.to_plain, end) for end in ("mean", "low", "high")},
                    **{f"control_{end}": getattr(against, end) if against else "" for end in ("mean", "low", "high")},
                    "carried": int(turn.carried),
                }
            )
    return found


def _row(contest: Contest, name: str, one: Chosen, errors: Sequence[float], gain: Gain, to_control: Gain | None) -> Row:
    diverged = sum(contest.ledger.runs[run].diverged for run in finals(one) if run in contest.ledger.runs)
    kind = contest.contestants[name].kind if name in contest.contestants else "search"
    test = statistics.fmean(errors)
    return Row(
        contest.world.name, name, kind, one.arm, one.rate, one.is_inside, one.error, test, diverged, gain, to_control
    )


def _record(row: Row) -> dict[str, object]:
    control = row.to_control
    return {
        "world": row.world,
        "contestant": row.contestant,
        "kind": row.kind,
        "arm": row.arm,
        "rate": row.rate,
        "inside": int(row.is_inside),
        "validation_error": row.validation,
        "test_error": row.test,
        "diverged": row.diverged,
        **{end: getattr(row.to_plain, end) for end in ("mean", "low", "high")},
        **{f"control_{end}": getattr(control, end) if control else "" for end in ("mean", "low", "high")},
    }
