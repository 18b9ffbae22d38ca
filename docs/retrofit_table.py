"""Write the results of the study `retrofit` for each method into its page and, in short, into docs/shipping.md.

python docs/retrofit_table.py            write both, each between its two marks
python docs/retrofit_table.py --check    check whether they are current
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from headwise_papers.retrofit import END, KEPT, MARGIN, METHODS, START, STUDY, TRAVEL, WARMED

from headwise.attend import methods
from headwise.attend.core.method import REGISTRY, Method
from headwise.lab.experiments.configuration import BASELINE
from headwise_verdict.results.intervals import Interval, interval

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "results" / STUDY.name
PAGE, SHORT = FOLDER / "README.md", DOCS / "shipping.md"
MARKS = "<!-- retrofit: begin (python docs/retrofit_table.py) -->", "<!-- retrofit: end -->"
YES, LATER, WARM, NO, OPEN = "yes", "yes, once fine-tuned", "with warm-up", "no", "undecided"
# verdicts on methods that were not switched on
TRAINS = "yes: evaluation is unchanged; the end of fine-tuning was measured only with DropHead"
STEPS = "yes: nothing changes before the first step; fine-tuning was not run"
STARTS = "yes: at its start the model is unchanged; fine-tuning was not run"
UNKNOWN = "not known: it changes the model's output, and was not run"
STORIES, MOVED, WORTH, RISE = "stories/loss", "own/moved", "reset/worth", "int8/rise"
HEAD = (
    "method",
    "stories, switched on",
    "plays, fine-tuned [95 %]",
    "after a warm-up [95 %]",
    "stories, fine-tuned",
    "moved",
    "put back",
    "8 bits",
    "may enter",
)

Figures = dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True)
class Row:
    """The differences of one method from the plain model, switched on at once and, if run, with a warm-up."""

    arm: str
    figures: Figures

    def beside(self, outcome: str, arm: str | None = None) -> Interval:
        """Return the paired difference of an outcome from the plain model's."""
        own, plain = self.figures[outcome, arm or self.arm], self.figures[outcome, BASELINE]
        return interval([own[seed] - plain[seed] for seed in plain if seed in own])

    @property
    def warmed(self) -> Interval | None:
        """Return the difference after fine-tuning with a warm-up, or None if it was not run."""
        return self.beside(END, WARMED[self.arm]) if self.arm in WARMED else None

    @property
    def verdict(self) -> str:
        """Return whether the method can be added to a trained model."""
        at_once, warmed = self.beside(END), self.warmed
        if _fine(at_once):
            return YES if abs(self.beside(START).mean) <= KEPT else LATER
        if warmed is not None and _fine(warmed):
            return WARM
        worse = [one for one in (at_once, warmed) if one is not None]
        return NO if all(one.low is not None and one.low > MARGIN for one in worse) else OPEN

    def cells(self) -> list[str]:
        """Return the cells of the row."""
        moves = self.figures[MOVED, self.arm].values()
        # a larger move than the learning rates allow means that the start was random and is unknown after training
        learns = any(moves) and max(moves) <= TRAVEL
        own = {name: interval(list(self.figures[name, self.arm].values())).mean for name in (MOVED, WORTH)}
        return [
            f"`{self.arm}`",
            f"{self.beside(START).mean:+.3f}",
            _with_interval(self.beside(END)),
            "–" if self.warmed is None else _with_interval(self.warmed),
            f"{self.beside(STORIES).mean:+.3f}",
            f"{own[MOVED]:.4f}" if learns else "–",
            f"{own[WORTH]:+.4f}" if learns else "–",
            f"{self.beside(RISE).mean:+.4f}",
            self.verdict,
        ]


def _fine(difference: Interval) -> bool:
    return difference.high is not None and difference.high < MARGIN


def _with_interval(difference: Interval) -> str:
    span = (
        "" if difference.low is None or difference.high is None else f" [{difference.low:+.3f}, {difference.high:+.3f}]"
    )
    return f"{difference.mean:+.3f}{span}"


def rows() -> list[Row]:
    """Return a row for every method that was switched on; empty if the study was not run."""
    if not (FOLDER / "seeds.csv").is_file():
        return []
    figures: Figures = defaultdict(dict)
    with (FOLDER / "seeds.csv").open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            figures[line["outcome"], line["arm"]][int(line["seed"])] = float(line["value"])
    return [Row(arm, figures) for arm in METHODS]


def left() -> dict[str, list[str]]:
    """Return the methods that were not switched on, grouped by what their classes declare about evaluation."""
    tried = {arm.partition("(")[0] for arm in METHODS}
    by_verdict: dict[str, list[str]] = {TRAINS: [], STEPS: [], STARTS: [], UNKNOWN: []}
    for name in sorted({*methods.__all__} - tried):
        by_verdict[_by_construction(REGISTRY[name])].append(name)
    return by_verdict


def _by_construction(cls: type[Method]) -> str:
    if cls.acts == "train":
        return STEPS if cls.overrides("after_step") else TRAINS
    neutral = cls.neutral is not None and cls() == cls(**cls.neutral)
    return STARTS if neutral else UNKNOWN


def whole(table_rows: list[Row]) -> str:
    """Return the section of the study's page."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in table_rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    explanation = (
        "Differences to the plain model in nats per token, paired by seed. *Stories* are the model's own. "
        "*Moved*: root mean square move of the method's own parameters; *put back*: how much worse the model is with "
        "them reset to their start. "
        f"*Yes*: its loss on stories changes by at most {KEPT:g} when it is switched on, and "
        f"fine-tuning ends less than {MARGIN:g} above the plain model's. *{LATER.capitalize()}*: only the second. "
        f"*{WARM.capitalize()}*: that holds only with a strength that grows. *{NO.capitalize()}*: it ends more than "
        f"{MARGIN:g} above. Thirty steps are few: a method that is behind after them may catch up. The "
        f"sum of their learning rates is {TRAVEL:g}, about as far as AdamW moves a parameter at most; "
        "DifferentialAttention draws its start, so that its move is not known."
    )
    others = "Not switched on here, with the promises of their classes, which the tests check:"
    rest = "\n".join(f"- {label}: {_code(names)}." for label, names in left().items())
    return f"## May it enter a trained model?\n\n{explanation}\n\n{table}\n\n{others}\n\n{rest}"


def short(table_rows: list[Row]) -> str:
    """Return the section of docs/shipping.md."""
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for row in table_rows:
        by_verdict[row.verdict].append(row.arm)
    by_verdict.update(left())
    order = (YES, LATER, WARM, NO, OPEN, TRAINS, STEPS, STARTS, UNKNOWN)
    lines = [f"| {verdict} | {_code(by_verdict[verdict])} |" for verdict in order if by_verdict[verdict]]
    return "\n".join(["| may it enter? | methods |", "|---|---|", *lines])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def written(text: str, section: str) -> str:
    """Return a page with the section between its marks, or at its end if it has no marks."""
    begin, end = MARKS
    block = f"{begin}\n{section}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    before, _, rest = text.partition(begin)
    return before + block + rest.partition(end)[2]


def main() -> None:
    """Write both pages, or check them."""
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--check", action="store_true")
    check, table_rows = reader.parse_args().check, rows()
    if not table_rows:
        return
    for path, section in ((PAGE, whole(table_rows)), (SHORT, short(table_rows))):
        old = path.read_text(encoding="utf-8")
        new = written(old, section)
        if check and new != old:
            raise SystemExit(f"{path} is not current: run python docs/retrofit_table.py")
        if not check:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
