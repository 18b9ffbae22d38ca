"""The command `headwise judge`: one decision, as a line, as JSON or as Markdown, and as the exit code."""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from headwise_verdict.files import argument, option
from headwise_verdict.files.errors import StudyError, is_for_users
from headwise_verdict.files.foreign_text import printable
from headwise_verdict.judging.curves import Target
from headwise_verdict.judging.decision import EQUIVALENT, GO_ON, UNDECIDED, Decision, Rule, decide, of_differences
from headwise_verdict.judging.pairs import Paired, check_budget, judge_pairs
from headwise_verdict.judging.runs import Pairs, read_pairs

# increased when a field of the JSON changes its meaning or goes
SCHEMA = "headwise.judge/1"
# the exit code of a command that could not be carried out; 1 and 2, as elsewhere, would be answers
FAILED = 5
# the entry points of packages that run training scripts in pairs
SCRIPTS = "headwise_verdict.scripts"


@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    table: Path | None = argument(None, help="Read runs from this table, one per row: CSV, TSV, JSON or JSONL.")
    # as written: name:lower or name:higher
    metric: str = option(..., help="Judge this column, or figure of the script: val_loss:lower, accuracy:higher.")
    candidate: str = option("candidate", help="Judge this arm.")
    baseline: str = option("baseline", help="Compare with this arm.")
    against: Path | None = option(
        None, help="Read the baseline's runs from this table; all runs of TABLE are the candidate's."
    )
    margin: float = option(0.0, min=0, help="Count differences up to this size as none.")
    alpha: float = option(0.05, help="Allow a wrong answer with this probability, over all looks together.")
    budget: int | None = option(None, min=1, help="Stop after this many pairs of runs.")
    script: str | None = option(None, help="Run this training command pair by pair until there is an answer.")
    change: str = option("", help="Judge this change of --script: lr=3e-4, or a method.")
    arguments: str = option(
        "argparse", help="Pass changes to --script in this form: argparse, hydra, environment, yaml:PATH."
    )
    out: Path | None = option(None, help="Keep the runs of --script in this folder. Default: results/judge/NAME.")
    timeout: float | None = option(None, help="Kill a run of --script after this many silent seconds.")
    first_seed: int = option(0, min=0, help="Start --script with this seed. Fresh seeds confirm an accepted change.")
    arm: str = option("", help="Read arms from this column. Default: arm, method or group.")
    seed: str = option("", "--seed-column", help="Read seeds from this column. Default: seed.")
    target: float | None = option(
        None, help="Judge the steps until a run reaches this value of the metric, from a table of curves."
    )
    step: str = option("", help="Read the steps for --target from this column. Default: step.")
    calibrate: bool = option(False, "--calibrate", help="Keep the baseline's spread over seeds as the noise floor.")
    floor: Path | None = option(
        None, help="Judge unpaired runs against the noise floor in this file; with --calibrate, save it there."
    )
    ledger: Path | None = option(
        None, help="Record all candidates in this file, and hold their false discovery rate at alpha."
    )
    diverged: float | None = option(
        None, help="Count a diverged run as this value: that of a model that has learned nothing."
    )
    bound: float | None = option(
        None, help="Assume that no two runs differ by more than this, instead of normal noise."
    )
    as_json: bool = option(False, "--json", help="Print one JSON object.")
    markdown: bool = option(False, "--markdown", help="Print a block for a pull request.")
    # what trains the pairs; None: the runs of a table
    paired: Paired | None = None

    @property
    def goal(self) -> Target | None:
        """Return the target whose steps are judged, if any."""
        return None if self.target is None else Target(self.target, self.outcome[1], self.step)

    @property
    def higher(self) -> bool:
        """Return whether a higher figure is better: of steps to a target, a lower one always is."""
        return self.target is None and self.outcome[1]

    @property
    def figure(self) -> str:
        """Return what is judged: the metric, or the steps to its target."""
        return self.outcome[0] if self.target is None else f"steps to {self.outcome[0]} {self.target:g}"

    @property
    def outcome(self) -> tuple[str, bool]:
        """Return the metric's column, and whether higher is better."""
        name, mark, direction = self.metric.rpartition(":")
        if not mark or direction not in ("lower", "higher"):
            raise StudyError(f"--metric {self.metric}: say whether lower or higher is better, such as val_loss:lower.")
        return name, direction == "higher"

    def rule(self) -> Rule:
        """Return what is asked."""
        try:
            return Rule(margin=self.margin, alpha=self.alpha, budget=self.budget, higher=self.higher, bound=self.bound)
        except ValueError as error:
            raise StudyError(f"--{error}") from None


def run(request: Request) -> int:
    """Print the decision and return its exit code."""
    request.rule()
    _check(request)
    request = _named(request)
    if request.calibrate:
        return _calibrate(request)
    if request.candidate == request.baseline:
        raise StudyError(f"--candidate and --baseline are both {request.baseline}. Name two arms.")
    if request.floor is not None:
        request = _of_floor(request, request.floor)
    decision = _judged(request, request.rule()) if request.ledger is None else _by_ledger(request, request.ledger)
    print((as_json if request.as_json else markdown if request.markdown else line)(decision, request))
    return decision.code


def _check(request: Request) -> None:
    if request.as_json and request.markdown:
        raise StudyError("Give either --json or --markdown.")
    trains = request.script is not None or request.paired is not None
    if (request.table is None) != trains:
        raise StudyError("Give either a table with one row per run, or --script and --change.")
    of_script = {
        "--change": request.change,
        "--out": request.out,
        "--timeout": request.timeout,
        "--first-seed": request.first_seed,
    }
    if not trains and (strange := [name for name, value in of_script.items() if value]):
        raise StudyError(f"{strange[0]} belongs to --script.")
    of_tables = {
        "--baseline": request.baseline != "baseline",
        "--target": request.target is not None,
        "--against": request.against,
        "--floor": request.floor,
        "--calibrate": request.calibrate,
        "--arm": request.arm,
        "--seed-column": request.seed,
    }
    given = [name for name, value in of_tables.items() if value]
    answers = {
        "--ledger": request.ledger,
        "--margin": request.margin,
        "--budget": request.budget,
        "--bound": request.bound,
        "--json": request.as_json,
        "--markdown": request.markdown,
    }
    answered = [name for name, value in answers.items() if value]
    if request.calibrate and not trains and answered:
        raise StudyError(f"--calibrate measures the baseline and gives no answer: leave {answered[0]} out.")
    if request.against is not None and (request.floor is not None or request.calibrate or request.arm):
        raise StudyError("--against is the table of the baseline: leave --floor, --calibrate and --arm out.")
    if request.bound is not None and request.floor is not None:
        raise StudyError("--bound needs pairs of runs, and --floor has none. Leave one of them out.")
    if request.diverged is not None and request.target is not None:
        raise StudyError("--diverged is a figure of the metric, and --target judges steps. Leave one of them out.")
    if trains and given:
        raise StudyError(f"{given[0]} belongs to a table. Judge the table that --script leaves in its --out.")


def _named(request: Request) -> Request:
    """Return the request with the names of its arms, and with what trains the pairs of its script."""
    if request.script is not None:
        change = f"{request.change}, seeds from {request.first_seed}" if request.first_seed else request.change
        return replace(request, candidate=change, paired=_of_script(request, request.script))
    if request.against is None or request.table is None:
        return request
    # the names that are given, else those of the two tables
    tables = request.table, request.against
    names = [table.stem if tables[0].stem != tables[1].stem else str(table) for table in tables]
    candidate = names[0] if request.candidate == "candidate" else request.candidate
    baseline = names[1] if request.baseline == "baseline" else request.baseline
    return replace(request, candidate=candidate, baseline=baseline)


def _of_script(request: Request, command: str) -> Paired:
    """Return what trains the pairs of a script, by the package that runs scripts."""
    found = tuple(entry_points(group=SCRIPTS))
    if not found:
        raise StudyError("--script needs headwise, which is not installed: pip install 'headwise[study]'")
    settings = (request.change, request.metric, request.arguments, request.out, request.timeout)
    paired: Paired = found[0].load()(command, *settings, request.diverged, request.first_seed)
    return paired


def _of_floor(request: Request, path: Path) -> Request:
    """Return the request with the baseline's name of the floor."""
    from headwise_verdict.judging.floor import read_floor

    known = read_floor(path, request.figure).baseline
    if request.baseline not in ("baseline", known):
        raise StudyError(f"{path} is the floor of {known}, not of {request.baseline}. Leave --baseline out.")
    return replace(request, baseline=known)


def _by_ledger(request: Request, path: Path) -> Decision:
    from headwise_verdict.judging.ledger import Ledger

    metric = request.metric if request.target is None else request.figure
    ledger = Ledger(path, metric, request.baseline, "" if request.paired is None else request.paired.command)
    if request.paired is not None:
        check_budget(request.paired, request.rule())
    return ledger.judged(
        request.candidate, request.rule(), lambda rule: _judged(request, rule), trains=request.paired is not None
    )


def _judged(request: Request, rule: Rule) -> Decision:
    """Return the decision about a script's runs or a table's."""
    if request.paired is not None:
        return judge_pairs(request.paired, rule)
    pairs = _read(request, request.candidate, needs_both=request.floor is None)
    return decided(request, pairs, rule).noted(*pairs.notes)


def _read(request: Request, candidate: str, *, needs_both: bool = True) -> Pairs:
    assert request.table is not None
    # by a floor, the baseline's runs are not those of the table
    baseline = request.baseline if needs_both else candidate
    names = candidate, baseline, request.arm, request.seed
    of_diverged = None if request.diverged is None else (request.diverged, request.higher)
    return read_pairs(
        request.table,
        request.outcome[0],
        *names,
        needs_both=needs_both,
        target=request.goal,
        diverged=of_diverged,
        against=request.against,
    )


def decided(request: Request, pairs: Pairs, rule: Rule) -> Decision:
    """Return the decision about pairs, or about a candidate alone by the noise floor.

    Raises:
        StudyError: if there is no pair and no floor.
    """
    differences = pairs.differences()
    if request.floor is None:
        if not differences:
            raise StudyError(
                f"{request.candidate} and {request.baseline} have no seed in common. Run both with the same seeds, or "
                "judge by a noise floor: --floor headwise-floor.json."
            )
        return of_differences(differences, rule)
    from headwise_verdict.judging.floor import read_floor

    floor, runs = read_floor(request.floor, request.figure), list(pairs.candidate.values())
    samples = [floor.sample(runs[:count]) for count in range(1, len(runs) + 1)]
    return decide(samples, len(runs), rule).noted(f"by the noise floor of {len(floor.values)} runs", *floor.notes(runs))


def _calibrate(request: Request) -> int:
    from headwise_verdict.judging.floor import FILE, calibrate

    metric = request.figure
    runs = _read(request, request.baseline)
    path = request.floor or FILE
    for note in dict.fromkeys(runs.notes):
        print(f"note: {note}")
    floor = calibrate(path, metric, request.baseline, list(runs.baseline.values()))
    print(
        f"{request.baseline}: {metric} {floor.mean:.6g}, spread {floor.spread:.3g} over {len(floor.values)} runs; "
        f"kept in {path}"
    )
    return 0


def line(decision: Decision, request: Request) -> str:
    """Return the decision in one line, and its notes in one each."""
    return "\n".join([f"{decision.answer}: {sentence(decision, request)}", *(f"note: {n}" for n in decision.notes)])


def sentence(decision: Decision, request: Request) -> str:
    """Return what was found, in words."""
    metric = request.figure
    change = f"{number(decision.mean)} {interval(decision)} in {metric}"
    told = f"{request.candidate} against {request.baseline}: {change}, {decision.pairs} {_pairs(decision, request)}"
    if decision.answer == EQUIVALENT:
        told += f", within ±{decision.rule.margin:g}"
    if decision.answer == GO_ON:
        told += (
            f"; about {decision.more} more would decide" if decision.more else "; no number of seeds in sight decides"
        )
    if decision.answer == UNDECIDED:
        told += f"; the budget of {decision.rule.budget} is spent"
    return told


def _pairs(decision: Decision, request: Request) -> str:
    noun = "run" if request.floor is not None else "pair"
    return noun if decision.pairs == 1 else f"{noun}s"


def number(value: float) -> str:
    """Return a signed number with four digits, or ±∞."""
    if math.isinf(value):
        return "+∞" if value > 0 else "−∞"
    return f"{value:+.4g}".replace("-", "−")


def interval(decision: Decision) -> str:
    """Return the confidence sequence as text."""
    return f"[{number(decision.low)}, {number(decision.high)}]"


def record(decision: Decision, request: Request) -> dict[str, Any]:
    """Return the decision as plain values; None where a number is infinite."""
    metric, higher = request.figure, request.higher

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "schema": SCHEMA,
        "answer": decision.answer,
        "exit_code": decision.code,
        "metric": metric,
        "better": "higher" if higher else "lower",
        "candidate": request.candidate,
        "baseline": request.baseline,
        "pairs": decision.pairs,
        "difference": decision.mean,
        "low": plain(decision.low),
        "high": plain(decision.high),
        "e_value": plain(decision.evidence),
        "alpha": decision.rule.alpha,
        "margin": decision.rule.margin,
        "budget": decision.rule.budget,
        "bound": decision.rule.bound,
        "more": decision.more,
        "notes": list(decision.notes),
    }


def as_json(decision: Decision, request: Request) -> str:
    """Return the decision as one line of JSON."""
    return json.dumps(record(decision, request))


def markdown(decision: Decision, request: Request) -> str:
    """Return a block for a pull request."""
    metric, higher = request.figure, request.higher
    confidence = f"{100 * (1 - decision.rule.alpha):.4g} %"
    change, base, name = (text.replace("|", r"\|") for text in (request.candidate, request.baseline, metric))
    rows = [
        ("change", f"`{change}` against `{base}`"),
        ("metric", f"`{name}`, {'higher' if higher else 'lower'} is better"),
        (f"difference [{confidence}, valid at every look]", f"{number(decision.mean)} {interval(decision)}"),
        (_pairs(decision, request), str(decision.pairs)),
    ]
    table = [f"| {name} | {value} |" for name, value in rows]
    notes = [f"- {note}" for note in decision.notes]
    return "\n".join([f"### headwise judge: {decision.answer}", "", "| | |", "|---|---|", *table, "", *notes]).rstrip()


def main(request: Request) -> None:
    """Print the decision and end with its exit code; an error ends with 5, which is no answer."""
    try:
        code = run(request)
    except OSError as error:
        place = "standard output" if error.filename is None else error.filename
        print(f"error: {printable(str(place))}: {error.strerror or error}. Choose another place.", file=sys.stderr)
        code = FAILED
    except Exception as error:
        if is_for_users(error):
            print(f"error: {printable(str(error))}", file=sys.stderr)
        else:
            traceback.print_exc()
        code = FAILED
    sys.exit(code)
