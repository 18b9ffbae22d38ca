"""The findings of the study of alarms: sentences, tables and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise.health.watching.rules import OF_STEPS, RULES, Thresholds
from headwise_papers.alarms.faults import BETAS, DECAY, HEALTHY, RATES, SLOW, SLOWLY, STEPS, UNLISTED, WARMUP
from headwise_papers.alarms.models import HELD_OUT
from headwise_papers.alarms.one_run import EVALUATE, READ
from headwise_papers.alarms.scoring import (
    ABOVE,
    TARGET,
    Pair,
    Point,
    Scored,
    best_pair,
    curve,
    false_interval,
    halves,
    lead_interval,
    measured,
    quoted,
    scored,
    sure_threshold,
    thresholds,
    write_csv,
    write_curves,
)
from headwise_papers.alarms.signals import DEVIATION, JUDGED, SLOPE
from headwise_verdict.files.durable import write_json
from headwise_verdict.results.intervals import share

# candidates for rules, of different kinds, each in the form that is available earliest or catches most
CANDIDATES = (JUDGED, "update ratio" + DEVIATION, "gradient spike", "largest logit")
# number of signals that are combined into pairs, and of columns in the table of faults
PAIRED, COLUMNS = 8, 7
EVERYBODYS = ("loss spike", "gradient spike", "gradient norm")
CHARTS = {
    "Loss and gradient": (
        "loss spike",
        "loss spike of 50",
        "gradient spike",
        "gradient spike of 50",
        "gradient norm",
        "gradient norm by layer",
    ),
    "Logits and entropy": ("largest logit", "least entropy", "mean entropy", "entropy of the sharpest row"),
    "Norms of q, k and v": ("query norm", "key norm", "value norm"),
    "Updates and weights": ("update entropy", "update ratio", "spectral norm of QK", "effective rank of QK"),
    "Tokens and heads": ("token cosine", "massive activations", "head redundancy"),
}


def findings(runs: Sequence[dict[str, Any]], out: Path, seeds: int) -> dict[str, Any]:
    """Return the findings of scored runs, and write the tables and the file of measured alarms into `out`."""
    from headwise_papers.alarms import QUESTION, TITLE

    every = scored([run for run in runs if run["kind"] != SLOWLY])
    slow = scored([run for run in runs if run["kind"] == SLOWLY])
    held_out_runs = [run for run in every if run.family == HELD_OUT.name and run.kind != UNLISTED]
    fixing, reported = halves([run for run in every if run.family != HELD_OUT.name])
    fixed = thresholds(fixing)
    points = {
        name: (measured(fixing, name, at), measured(reported, name, at), measured(held_out_runs, name, at))
        for name, at in fixed.items()
    }
    order = sorted(points, key=lambda name: _goodness(points[name][0]), reverse=True)
    leading = _one_form_each(order)
    pair = best_pair(fixing, leading[:PAIRED])
    shipped = sorted({f"rule: {rule.alert}" for rule in (*RULES, *OF_STEPS)} | {"rule: any rule"})
    rule_points = {
        name: (measured(reported, name, math.nan), measured(held_out_runs, name, math.nan)) for name in shipped
    }
    curves = {name: curve(fixing, reported, name) for name in order}
    write_csv(out / "signals.csv", points)
    write_curves(out / "curves.csv", curves)
    write_json(out / "alarms.json", quoted(fixed, reported + held_out_runs, shipped))
    chosen = _columns(leading)
    surprise = [run for run in every if run.kind == UNLISTED]
    candidates = {
        name: Candidate(
            at := sure_threshold(fixing, name),
            measured(fixing, name, at),
            measured(reported, name, at),
            measured(held_out_runs, name, at),
            sum(bool(len(run.alarms(name, at))) for run in slow),
            len(slow),
        )
        for name in CANDIDATES
        if every and name in every[0].series
    }
    return {
        "kind": "findings",
        "name": "alarms",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": [
            *paragraphs(every, points, leading, rule_points, pair, reported, fixed, surprise, chosen),
            candidate_words(candidates),
        ],
        "claims": [],
        "tables": [
            signal_table(points, leading),
            rule_table(rule_points),
            candidate_table(candidates),
            fault_table([run for run in every if run.kind != UNLISTED], chosen, fixed),
            surprise_table(surprise, chosen, fixed),
        ],
        "charts": charts(curves),
        "settings": settings(runs, seeds),
        # of the runs, not of this call, before which most runs may have been finished
        "seconds": sum(run["seconds"] for run in runs),
    }


def _goodness(point: Point) -> tuple[float, float]:
    return (0.0 if math.isnan(point.caught) else point.caught, float(np.median(point.leads)) if point.leads else -1.0)


def base(name: str) -> str:
    """Return the signal of a slope or deviation."""
    return name.removesuffix(SLOPE).removesuffix(DEVIATION)


def _one_form_each(order: Sequence[str]) -> list[str]:
    """Return each signal in the form that caught most on the half for setting thresholds, the best first."""
    best: dict[str, str] = {}
    for name in order:
        best.setdefault(base(name), name)
    return list(best.values())


def _columns(leading: Sequence[str]) -> list[str]:
    """Return the best signals and the two in general use."""
    usual = [name for name in leading if base(name) in ("loss spike", "gradient spike")]
    return [*[name for name in leading if name not in usual][: COLUMNS - len(usual)], *usual]


# Figures in words


def caught_words(point: Point) -> str:
    """Return how many of the faults were caught, with the exact interval of the share, as text."""
    if not point.faults:
        return "–"
    interval = share([1.0] * len(point.leads) + [0.0] * (point.faults - len(point.leads)))
    return (
        f"{len(point.leads)} of {point.faults}, {100 * point.caught:.0f} % [{100 * (interval.low or 0):.0f}, "
        f"{100 * (interval.high or 0):.0f}]"
    )


def lead_words(point: Point) -> str:
    """Return the median lead as text, with its interval if there are enough leads."""
    if not point.leads:
        return "–"
    interval = lead_interval(point.leads)
    return f"{np.median(point.leads):.0f}" + (f" [{interval[1]:.0f}, {interval[2]:.0f}]" if interval else "")


def false_words(point: Point) -> str:
    """Return the false alarms per 1,000 healthy steps, with their interval, as text."""
    if not point.healthy:
        return "–"
    low, high = false_interval(point)
    return f"{point.rate:.3f} [{low:.3f}, {high:.3f}]"


# Tables


def signal_table(points: dict[str, tuple[Point, Point, Point]], leading: Sequence[str]) -> dict[str, Any]:
    """Return the table of each signal in its best form at the operating point, on the test half and held-out family."""
    rows = []
    for name in leading:
        _, other, held_out = points[name]
        rows.append(
            [name, _threshold(name, other.threshold), caught_words(other), lead_words(other), false_words(other)]
            + [caught_words(held_out), lead_words(held_out), false_words(held_out)]
        )
    columns = ["signal", "alarm where", "caught", "lead in steps", "false alarms in 1,000 steps"]
    columns += ["held-out family: caught", "lead", "false alarms"]
    return {"title": "Signals at one false alarm in 10,000 healthy steps", "columns": columns, "rows": rows}


def _threshold(name: str, value: float) -> str:
    if not math.isfinite(value):
        return "never: healthy runs reach what faults do"
    from headwise_papers.alarms.signals import FALLS

    return f"below {-value:.4g}" if name in FALLS else f"above {value:.4g}"


def rule_table(ruled: dict[str, tuple[Point, Point]]) -> dict[str, Any]:
    """Return the table of the rules of `headwise.watch` as shipped."""
    rows = []
    for name, (other, held_out) in ruled.items():
        rows.append([name.removeprefix("rule: "), caught_words(other), lead_words(other), false_words(other)])
        rows[-1] += [caught_words(held_out), lead_words(held_out), false_words(held_out)]
    columns = ["rule", "caught", "lead in steps", "false alarms in 1,000 steps"]
    columns += ["held-out family: caught", "lead", "false alarms"]
    return {"title": "The rules of headwise.watch as shipped", "columns": columns, "rows": rows}


@dataclass(frozen=True)
class Candidate:
    """A candidate for a rule, with a threshold that is safe by the interval on the half for setting thresholds.

    Attributes:
        slow: healthy runs with a long warm-up in which it warned, of `slow_runs`.
    """

    threshold: float
    fixing: Point
    other: Point
    held: Point
    slow: int
    slow_runs: int

    @property
    def holds(self) -> bool:
        """Return whether its false alarms are few enough on the held-out family (upper end of the interval) and on the
        test half, and none occur while a learning rate rises."""
        if not (self.held.healthy and self.other.healthy):
            return False
        return false_interval(self.held)[1] <= 1000 * TARGET >= self.other.rate and not self.slow


def candidate_table(candidates: dict[str, Candidate]) -> dict[str, Any]:
    """Return the table of candidates for rules at their safe thresholds."""
    rows = []
    for name, one in candidates.items():
        rows.append([name, _threshold(name, one.threshold), false_words(one.fixing)])
        for point in (one.other, one.held):
            rows[-1] += [caught_words(point), lead_words(point), false_words(point)]
        rows[-1] += [f"{one.slow} of {one.slow_runs}", "yes" if one.holds else "no"]
    columns = ["signal", "alarm where", "false alarms on the half it was fixed by"]
    columns += ["other half: caught", "lead", "false alarms", "held-out family: caught", "lead", "false alarms"]
    columns += ["warned in healthy runs with a long warm-up", "holds"]
    return {
        "title": "What may be a rule: sure of one false alarm in 10,000 healthy steps",
        "columns": columns,
        "rows": rows,
    }


def fault_table(runs: Sequence[Scored], columns: Sequence[str], fixed: dict[str, float]) -> dict[str, Any]:
    """Return the table of faults: how often each showed, which signals caught it how early, and the best signal."""
    rows = []
    for label in dict.fromkeys(run.label for run in runs if not run.healthy):
        like = [run for run in runs if run.label == label]
        failing = [run for run in like if run.shows is not None]
        cells, medians = [], {}
        for name in columns:
            leads = [lead for run in failing if (lead := run.lead(run.alarms(name, fixed[name]))) is not None]
            if leads:
                medians[name] = len(leads), float(np.median(leads))
            cells.append(f"{len(leads)} · {np.median(leads):.0f}" if leads else "never" if failing else "–")
        after = [run.shows - run.onset for run in failing if run.shows is not None]
        first = max(medians, key=lambda name: medians[name]) if medians else "none" if failing else "–"
        rows.append(
            [label, f"{len(failing)} of {len(like)}", f"{np.median(after):.0f}" if after else "–", *cells, first]
        )
    head = ["fault", "showed in the loss", "steps until it did", *columns, "warns most, then first"]
    return {"title": "Faults and signals: caught · median lead", "columns": head, "rows": rows}


def surprise_table(runs: Sequence[Scored], columns: Sequence[str], fixed: dict[str, float]) -> dict[str, Any]:
    """Return the table of the signals' alarms for a fault that is not on the list."""
    rows = []
    for run in runs:
        cells = []
        for name in columns:
            alarms = run.alarms(name, fixed[name])
            lead, late = run.lead(alarms), alarms[alarms >= run.onset]
            cells.append(f"{lead} before" if lead is not None else "late" if len(late) else "silent")
        shows = "never" if run.shows is None else f"{run.shows - run.onset}"
        alerts = sorted(kind for kind, steps in run.rules.items() if kind != "any rule" and (steps >= run.onset).any())
        rows.append([run.family, run.seed, shows, *cells, ", ".join(alerts) or "silent"])
    head = ["family", "seed", "steps until the loss shows it", *columns, "rules as shipped"]
    return {"title": "A fault that is not on the list: gradients that are never cleared", "columns": head, "rows": rows}


def charts(curves: dict[str, list[Point]]) -> list[dict[str, Any]]:
    """Return the charts of operating curves, one per kind of signal."""
    x, y = "false alarms in 1,000 healthy steps", "share of faults caught"
    charts_ = []
    for title, names in CHARTS.items():
        # no false alarm is drawn as half of one, because the axis is logarithmic
        data = [
            {x: max(point.rate, 500 / point.healthy), y: point.caught, "signal": name}
            for name, points in curves.items()
            if base(name) in names
            for point in points
            if point.healthy and point.faults
        ]
        chart = {"title": f"Operating curves: {title.lower()}", "x": x, "y": y, "series": "signal", "log_x": True}
        charts_.append({**chart, "data": data})
    return charts_


# Sentences


def paragraphs(
    every: Sequence[Scored],
    points: dict[str, tuple[Point, Point, Point]],
    leading: Sequence[str],
    ruled: dict[str, tuple[Point, Point]],
    pair: Pair | None,
    reported: Sequence[Scored],
    fixed: dict[str, float],
    surprise: Sequence[Scored],
    columns: Sequence[str],
) -> list[str]:
    """Return the paragraphs of the findings, the answer first."""
    best = leading[0]
    _, other, held_out = points[best]
    usual = [f"{name} {caught_words(points[name][1])}" for name in EVERYBODYS if name in points]
    faults = [run for run in every if not run.healthy]
    shows = sum(run.shows is not None for run in faults)
    any_rule, rule_held = ruled["rule: any rule"]
    texts = [
        f"At one false alarm in 10,000 healthy steps the signal that catches most is {best}: {caught_words(other)} of "
        f"the faults that showed, before or as the loss did, {lead_words(other)} steps ahead at the median, with "
        f"{false_words(other)} false alarms in 1,000 healthy steps; on the family held out {caught_words(held_out)}, "
        f"{lead_words(held_out)} steps, {false_words(held_out)}. What everybody has: {'; '.join(usual)}.",
        f"The rules of headwise.watch as shipped, all together: {caught_words(any_rule)}, {lead_words(any_rule)} "
        f"steps ahead, {false_words(any_rule)} false "
        f"alarms in 1,000 healthy steps; on the family held out {caught_words(rule_held)}, {false_words(rule_held)}.",
        f"{len(faults)} runs with a fault, of which {shows} showed it: the loss on a batch that is never trained on "
        f"lay {100 * (ABOVE - 1):.0f} % above the healthy twin's at two evaluations in a row. The others are harmless "
        "here, and count neither as caught nor as missed. An alarm is a step at which a signal comes to lie above its "
        "threshold; a fault is caught by an alarm after it began and not after the loss shows it.",
        pair_words(pair, points[best][1], reported, best, fixed),
        "Thresholds are fixed on the runs of even seeds of both families and reported on those of odd seeds. The "
        "family held out (a Llama on German captions) had no part in any threshold; two limits of the rules as shipped "
        "were raised after the rules had been scored on it once. Intervals of shares are Clopper and Pearson's, of "
        "false alarms Garwood's, of the median lead those between order statistics; runs are counted as independent "
        "of each other.",
        blind_words(every, columns, fixed),
    ]
    if surprise:
        silent = [name for name in columns if all(run.lead(run.alarms(name, fixed[name])) is None for run in surprise)]
        texts.append(
            "A fault that is not on the list was tried once, after everything was chosen: gradients of former steps "
            f"that are never cleared. It showed in {sum(run.shows is not None for run in surprise)} of {len(surprise)} "
            f"runs. Without a warning in any of them: {', '.join(silent) or 'none of the signals shown'}."
        )
    return texts


def candidate_words(candidates: dict[str, Candidate]) -> str:
    """Return the paragraph on which candidates qualify as rules, and why others do not."""
    holding = [name for name, one in candidates.items() if one.holds]
    failing = []
    for name, one in candidates.items():
        why = [f"warned in {one.slow} of {one.slow_runs} healthy runs with a long warm-up"] * bool(one.slow)
        if one.held.healthy and false_interval(one.held)[1] > 1000 * TARGET:
            why.append(f"on the family held out {false_words(one.held)} false alarms in 1,000 steps")
        if one.other.healthy and one.other.rate > 1000 * TARGET:
            why.append(f"on the other half {false_words(one.other)}")
        if why:
            failing.append(f"{name} ({'; '.join(why)})")
    return (
        "A signal may be a rule where its threshold stands so high that even the upper end of the interval of its "
        "false alarms, on the half by which it is fixed, is one in 10,000 steps, and it then keeps to one in 10,000 on "
        "the other half, on the family held out with its interval, and is silent in healthy runs whose rate rises for "
        f"{SLOW.severity:.0f} of the {STEPS} steps. This holds for: {', '.join(holding) or 'none'}. It does not for: "
        f"{', '.join(failing) or 'none'}. The first is shipped as `loss_spike`, its threshold rounded up to "
        f"{Thresholds().loss_spike:g}, and judges every step whose loss is given; its form (fifty losses, all of them "
        "there) was chosen after the first score, on the half by which thresholds are fixed."
    )


def pair_words(pair: Pair | None, single: Point, reported: Sequence[Scored], best: str, fixed: dict[str, float]) -> str:
    """Return the paragraph on whether two signals together beat the best one, on the test half."""
    from scipy import stats

    if pair is None:
        return "No pair of signals keeps to the false alarms of one."
    point = pair.measured(reported)
    failing = [run for run in reported if run.shows is not None]
    by_single = [run.lead(run.alarms(best, fixed[best])) is not None for run in failing]
    by_pair = [run.lead(pair.alarms(run)) is not None for run in failing]
    gained, lost = (
        sum(b and not a for a, b in zip(by_single, by_pair, strict=True)),
        sum(a and not b for a, b in zip(by_single, by_pair, strict=True)),
    )
    p = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    verdict = "beats" if gained > lost and p < 0.05 else "does not beat"
    return (
        f"The best pair, {pair.name} (either alarm, each at half of the false alarms), {verdict} the best single "
        f"signal on the other half: {caught_words(point)} against {caught_words(single)}, {gained} faults gained and "
        f"{lost} lost (McNemar's exact p = {p:.2g}), {false_words(point)} false alarms in 1,000 steps."
    )


def blind_words(every: Sequence[Scored], columns: Sequence[str], fixed: dict[str, float]) -> str:
    """Return the paragraph on faults that no listed signal caught, and on faults that never showed."""
    never, harmless = [], []
    for label in dict.fromkeys(run.label for run in every if not run.healthy and run.kind != UNLISTED):
        failing = [run for run in every if run.label == label and run.shows is not None]
        if not failing:
            harmless.append(label)
        elif all(run.lead(run.alarms(name, fixed[name])) is None for run in failing for name in columns):
            never.append(label)
    return (
        "Faults that showed and that none of the signals of the table caught in any run: "
        f"{'; '.join(never) or 'none'}. Faults that never showed: {'; '.join(harmless) or 'none'}."
    )


def settings(runs: Sequence[dict[str, Any]], seeds: int) -> dict[str, Any]:
    """Return the settings of the study."""
    healthy = [run for run in runs if run["kind"] == HEALTHY]
    return {
        "seeds": seeds,
        "runs": len(runs),
        "healthy runs": len(healthy),
        "healthy steps": sum(run["steps"] for run in healthy),
        "families": sorted({run["family"] for run in runs}),
        "sizes": sorted({run["size"] for run in runs}),
        "steps": STEPS,
        "warm-up": WARMUP,
        "warm-up of the slow runs": int(SLOW.severity),
        "readings every": READ,
        "evaluations every": EVALUATE,
        "rates of healthy runs": list(RATES),
        "AdamW": f"betas {BETAS}, weight decay {DECAY}",
        "operating point": TARGET,
        "processor seconds": round(sum(run["seconds"] for run in runs)),
    }
