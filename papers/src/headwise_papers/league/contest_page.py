"""The page of the league's second edition in Markdown: what transfers, by symptom, from the runs of its worlds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from headwise_papers.league.contest import MOVE, Contest
from headwise_papers.league.contest_files import PLAIN, SYMPTOMS
from headwise_papers.league.contest_tables import (
    FURTHER,
    TUNED,
    OfSymptom,
    Row,
    advised,
    of_symptom,
    rows,
    searches,
    suffices,
)
from headwise_papers.league.rate_search import AGAIN, FINAL
from headwise_papers.league.transfer import FEWEST, Gain, Pooled, pooled, turns

STATES = {"complete": "complete", "failed": "a premise fails", "under way": "not complete", "not run": "not run"}


def page(contests: Sequence[Contest]) -> str:
    """Return the page: the finding, then each symptom, the worlds with their premises, and the searches."""
    told = [one for symptom, some in advised(contests).items() if (one := of_symptom(symptom, some)) is not None]
    complete = [one for one in contests if one.state == "complete"]
    parts = [
        _finding(told, complete),
        "## Symptom by symptom",
        _symptoms(contests, told),
        *[part for one in told for part in _symptom(contests, one)],
        *_how(told, complete),
        *_single(contests),
        "## The worlds and their premises",
        PREMISES,
        _worlds(contests),
        "## Was the search enough?",
        _search(complete),
        _noted(complete),
    ]
    return "\n\n".join(part for part in parts if part)


PREMISES = (
    "A world whose premises do not all hold is shown and is not in the league: a gain in it says nothing about its "
    "symptom. They are measured on validation data, at the plain model's best rate, on six seeds that nothing else "
    "uses. *Learned*: a tenth fewer errors than a constant, and than the simplest learned predictor (the nearest class "
    "mean; for sequences the most frequent target after each token). *Symptom*: the training error against the "
    "validation error; of unstable training, the share of runs that fail. *Room*: the eased world (twice the data seen "
    "as often, twice the steps, or fewer layers) has a tenth fewer errors."
)


def _finding(told: Sequence[OfSymptom], complete: Sequence[Contest]) -> str:
    """Return the first screen: what is to be tried first, if anything is, and what tuning the rate gains."""
    if not complete:
        return "**No world was run to its end yet, so there is nothing to report.**"
    first = [(one.symptom, name) for one in told for name, word in one.words.items() if word == "try first"]
    candidates = [(one.symptom, name) for one in told for name, word in one.words.items() if word == "candidate"]
    names = ", ".join(one.symptom for one in told)
    lines = []
    if first:
        words = "; ".join(f"**{symptom}: try {name} first**" for symptom, name in first)
        lines.append(f"{words}. Each was chosen with one world left out in turn, and gained in that world.")
    elif told:
        lines.append(
            f"**Nothing was shown to transfer** ({names}). For no symptom did the choice made on all worlds but one "
            "gain every time in the world left out, over both the best plain model and the best control."
        )
    else:
        lines.append(f"**No symptom has {FEWEST} complete worlds yet, so no method is advised.**")
    if tuning := _tuning(complete):
        lines.append(tuning[0])
    if candidates:
        words = ", ".join(f"{name} ({symptom})" for symptom, name in candidates)
        lines.append(
            f"*Candidates*, whose mean over the worlds of a symptom is above 0, but which failed the test of transfer: "
            f"{words}."
        )
    missing = [symptom for symptom in SYMPTOMS if symptom not in {one.symptom for one in told}]
    if missing:
        lines.append(f"No answer yet for {', '.join(missing)}: fewer than {FEWEST} complete worlds each.")
    return "\n\n".join(lines)


def _how(told: Sequence[OfSymptom], complete: Sequence[Contest]) -> list[str]:
    """Return the section on how the answers of the first screen were found, if there are any."""
    parts = []
    if told:
        counts = sorted({len(one.means) for one in told})
        parts.append(
            "A world is a small task with one symptom. For each symptom the best of "
            f"{' or '.join(map(str, counts))} methods and controls was chosen on all of its worlds but one, and tried "
            f"on that one. {_in_single_worlds(complete, told)} In worlds left out the median interval reaches "
            f"{_reach(told)} to each side, too wide to say that nothing helps."
        )
    if tuning := _tuning(complete):
        parts.append(tuning[1])
    return ["## How the answers were found", *parts] if parts else []


def _tuning(complete: Sequence[Contest]) -> tuple[str, str] | None:
    """Return what tuning the plain model's rate gains, and how that varies; None if no world shows it."""
    # the premise of the others is that the usual rate fails
    counted = [one for one in complete if one.world.symptom != "unstable training"]
    if not counted:
        return None
    tuned = [searches(one)[TUNED] for one in counted]
    share, over = "a share", ""
    if len(tuned) >= FEWEST:
        share = _interval(pooled([row.to_plain for row in tuned]))
        over = f", on average over {len(tuned)} worlds"
    rates = " or ".join(f"{rate:g}" for rate in sorted({one.world.usual_rate for one in counted}))
    least, most = (pick(tuned, key=lambda row: row.to_plain.mean) for pick in (min, max))
    return (
        f"**Tune the learning rate of the plain model first.** The best of a grid over two decades avoids {share} of "
        f"the errors that the usual rate makes{over}: from {_interval(least.to_plain)} in "
        f"*{_title(complete, least.world)}* to {_interval(most.to_plain)} in *{_title(complete, most.world)}*.",
        f"{_by_field(complete, tuned)}The usual rate, {rates} here, is what we would take without a search: another "
        "guess gives another gain. Worlds of unstable training are not counted, because there the usual rate fails by "
        "design.",
    )


def _in_single_worlds(complete: Sequence[Contest], told: Sequence[OfSymptom]) -> str:
    """Return how many gains in single worlds are shown, in which kinds of data, and how many losses are."""
    fields = {one.world.name: one.world.field for one in complete}
    gains = [(each.world, gain) for one in told for each in one.standings for gain in each.to_plain.values()]
    above = [fields[world] for world, gain in gains if gain.low > 0]
    where = f", all on {' or '.join(dict.fromkeys(above))}," if above else ""
    return (
        f"Of {len(gains)} gains in single worlds, {len(above)} have an interval above 0{where} and "
        f"{sum(gain.high < 0 for _, gain in gains)} one below. Each interval holds alone: without any effect, one in "
        "forty would lie above 0. The plain model is the best of several rates in the same test, which lowers gains."
    )


def _reach(told: Sequence[OfSymptom]) -> str:
    """Return the median half width of the intervals of gains on worlds left out."""
    gains = [turn.to_plain for one in told for turn in turns(one.standings)]
    return f"{_number(statistics.median((gain.high - gain.low) / 2 for gain in gains))} %"


def _by_field(complete: Sequence[Contest], tuned: Sequence[Row]) -> str:
    """Return the mean of tuning the rate in each kind of data, and its interval over kinds: worlds of one share it."""
    of_world = {one.world.name: one.world.field for one in complete}
    fields: dict[str, list[float]] = {}
    for row in tuned:
        fields.setdefault(of_world[row.world], []).append(row.to_plain.mean)
    if len(fields) < FEWEST or len(fields) == len(tuned):
        return ""
    means = {field: statistics.fmean(values) for field, values in fields.items()}
    over = pooled([Gain(mean, mean, mean, 0.0) for mean in means.values()])
    told = ", ".join(f"{_number(mean)} % on {field}" for field, mean in means.items())
    return (
        f"The gain from tuning the rate is {told}: worlds that share a kind of data are not independent, and with "
        f"each kind counted once the interval is {_bounds(over.low, over.high)}. "
    )


def _symptoms(contests: Sequence[Contest], told: Sequence[OfSymptom]) -> str:
    lines = ["| symptom | worlds | complete | try first | candidates |", "|---|---|---|---|---|"]
    for symptom in SYMPTOMS:
        of_it = [one for one in contests if one.world.symptom == symptom]
        done = [one for one in of_it if one.state == "complete"]
        one = next((one for one in told if one.symptom == symptom), None)
        words = one.words if one else {}
        listed = [
            ", ".join(name for name, word in words.items() if word == kind) or ("nothing" if one else "too few worlds")
            for kind in ("try first", "candidate")
        ]
        lines.append(f"| {symptom} | {len(of_it)} | {len(done)} | {' | '.join(listed)} |")
    return "\n".join(lines)


def _symptom(contests: Sequence[Contest], one: OfSymptom) -> list[str]:
    """Return the section of a symptom: each world left out in turn, then the means over worlds."""
    titles = {each.world: _title(contests, each.world) for each in one.standings}
    count, has_words = len(titles), any(one.words.values())
    last = " |" if has_words else ""
    lines = [
        f"| | mean [95 %] | in a new world [95 %] | {' | '.join(titles.values())} |{last}",
        f"|---|---|---|{'---|' * count}{'---|' if has_words else ''}",
    ]
    for name, mean in one.means.items():
        own = [_interval(each.to_plain[name]) for each in one.standings]
        word = f" {one.words.get(name, '')} |" if has_words else ""
        lines.append(f"| {name} | {_interval(mean)} | {_new(mean)} | {' | '.join(own)} |{word}")
    for_tuning = [
        f"| **{name}** | {_interval(mean)} | {_new(mean)} | {' | '.join(['see below'] * count)} |{last}"
        for name, mean in ((TUNED, one.tuned), (FURTHER, one.further))
    ]
    lines[2:2] = for_tuning
    left = [
        "| left out | chosen on the others | gain there [95 %] | against its best control [95 %] | carried over |",
        "|---|---|---|---|---|",
    ]
    for turn in turns(one.standings):
        against = "is the best control" if turn.to_control is None else _interval(turn.to_control)
        left.append(
            f"| {titles[turn.left_out]} | {turn.chosen} | {_interval(turn.to_plain)} | {against} | "
            f"{'yes' if turn.carried else 'no'} |"
        )
    text = (
        f"Share of the errors of the best plain model that are avoided, on {len(FINAL)} final seeds, as a mean "
        f"over {count} worlds that counts each once; *in a new world* is the prediction interval. With {count} worlds "
        "it is wide, and it should be. Negative: more errors. The best control is that with the fewest validation "
        "errors; a gain against it is a share of that control's errors. (Until 28 November 2026 worlds were weighted "
        "by their precision; one in which the usual rate was the best gained 0 ± 0 and stood for all. No advice "
        "changed.)"
    )
    title = one.symptom[0].upper() + one.symptom[1:]
    folded = f"<details>\n<summary>All contestants: {one.symptom}</summary>"
    return [
        f"### {title}",
        "Each world left out in turn:",
        "\n".join(left),
        folded,
        text,
        "\n".join(lines),
        "</details>",
    ]


def _single(contests: Sequence[Contest]) -> list[str]:
    """Return the tables of all complete worlds."""
    parts = []
    for one in contests:
        if one.state != "complete":
            continue
        lines = [
            "| | chosen arm | rate | test error | errors avoided [95 %] | against the best control [95 %] |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(row) for row in rows(one)]
        best = one.best_plain()
        error = _percent(_average(one.final_errors("baseline", best)))
        intro = (
            f"{one.world.field.capitalize()}, {one.world.architecture}; {one.world.symptom}. {one.world.reason} The "
            f"best plain model there is, at {best:g}: {error} test errors. The first two lines are searches of the "
            "plain model, each against the plain model before it."
        )
        folded = f"<details>\n<summary>All contestants in {one.world.title}</summary>"
        parts += [f"### {one.world.title}", intro, folded, "\n".join(lines), "</details>"]
    return ["## World by world", *parts] if parts else []


def _row(row: Row) -> str:
    name = f"**{row.contestant}**" if row.kind == "search" else row.contestant
    control = "" if row.kind == "search" else "it is the best control"
    against = control if row.to_control is None else _interval(row.to_control)
    edge = "" if row.is_inside else " (at the end of its grid)"
    diverged = f", {row.diverged} of {len(FINAL)} diverged" if row.diverged else ""
    arm = row.arm.replace("|", "\\|")
    return (
        f"| {name} | `{arm}` | {row.rate:g}{edge} | {_percent(row.test)}{diverged} | {_interval(row.to_plain)} | "
        f"{against} |"
    )


def _worlds(contests: Sequence[Contest]) -> str:
    lines = [
        "| world | symptom | data, model | needs | state | premises: figure (must be) |",
        "|---|---|---|---|---|---|",
    ]
    for one in contests:
        told = [
            f"{'✓' if premise.holds else '✗'} {premise.name}: {premise.says}: {premise.figure:.3f} "
            f"({'below' if _is_below(premise.says) else 'at least'} {premise.level:.3f})"
            for premise in one.premises()
        ]
        lines.append(
            f"| {one.world.title} (`{one.world.name}`) | {one.world.symptom} | {one.world.field}, "
            f"{one.world.architecture} | {one.world.needs or 'nothing'} | {STATES[one.state]} | "
            f"{'<br>'.join(told) or 'not tested'} |"
        )
    return "\n".join(lines)


def _is_below(says: str) -> bool:
    return not says.startswith(("training error above", "share of runs"))


def _search(complete: Sequence[Contest]) -> str:
    if not complete:
        return ""
    lines = [
        "| world | rates of the grid | plain chose | inside | repetitions chose | each moved it (spreads) | enough |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in complete:
        plain = one.plain()
        assert plain is not None
        moves = ", ".join(f"{one.move(at):.3f}" for at in range(len(one.again())))
        grid = sorted({run.rate for run in one.ledger.runs if run.arm == "baseline" and run.seed == 1000})
        lines.append(
            f"| {one.world.title} | {len(grid)}, {grid[0]:g} to {grid[-1]:g} | {plain.rate:g} | "
            f"{'yes' if plain.is_inside else 'no'} | {', '.join(f'{each.rate:g}' for each in one.again())} | {moves} | "
            f"{'yes' if suffices(one) else 'no'} |"
        )
    return (
        "Twice the search (half the steps between rates, other tuning seeds) may better the best plain model "
        f"there is by {MOVE:g} of its spread between final seeds. If it does more, the better model takes its place "
        f"and the search is repeated, at most {len(AGAIN)} times; a world in which the last repetition does more gives "
        "no advice. (Until 28 November 2026 one repetition decided. *Fifty steps of digits* missed that by 0.003 of a "
        "spread; the rule for repetitions is from after that.)\n\n" + "\n".join(lines)
    )


def _noted(complete: Sequence[Contest]) -> str:
    notes = [f"{name} in {one.world.title}: {why}" for one in complete for name, why in one.ledger.notes.items()]
    edges = [
        f"{row.contestant} in {one.world.title}"
        for one in complete
        for row in rows(one)
        if not row.is_inside and row.contestant not in (TUNED, FURTHER, PLAIN)
    ]
    parts = []
    if notes:
        parts.append("Left out: " + "; ".join(one.rstrip(".") for one in notes) + ".")
    if idle := [f"{name} in {one.world.title}" for one in complete for name in one.contestants if one.is_idle(name)]:
        parts.append(
            f"No run of the search differs from the plain model's, so these change nothing: {', '.join(idle)}."
        )
    if edges:
        parts.append(f"Best rate at an end of the searched ones, three beyond the grid: {', '.join(edges)}.")
    return "\n\n".join(parts)


def _title(contests: Sequence[Contest], name: str) -> str:
    return next(one.world.title for one in contests if one.world.name == name)


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %".replace("-", "−")


def _number(value: float) -> str:
    # a small negative share would read "−0"
    return f"{round(100 * value) or 0:d}".replace("-", "−")


def _interval(gain: Gain | Pooled) -> str:
    return f"{_number(gain.mean)} % {_bounds(gain.low, gain.high)}"


def _new(mean: Pooled) -> str:
    return _bounds(mean.new_low, mean.new_high)


def _bounds(low: float, high: float) -> str:
    # a table must not break a line inside an interval
    return f"[{_number(low)},\u00a0{_number(high)}]"
