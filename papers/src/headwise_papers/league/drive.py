"""Execution of a league: the missing runs, the most informative first, in as many cells at a time as there are jobs."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack

from headwise.lab.comparing.compare import locked
from headwise.lab.comparing.comparison import Engine, Listener
from headwise.lab.training.job import Order
from headwise_papers.league.cell import Cell
from headwise_papers.league.world_folder import FILE
from headwise_verdict.files.errors import StudyError, explain
from headwise_verdict.results.answer import count
from headwise_verdict.results.joint_flips import seeds_for_a_verdict

BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)?$")
# the reason that `carry_out` returns when all runs are finished
COMPLETE = "nothing is missing"
SECONDS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}


def read_budget(text: str) -> float:
    """Return the seconds of "90s", "30min", "2h" or "1d"; raise StudyError for anything else."""
    match = BUDGET.match(text.strip())
    if match is None or float(match[1]) <= 0:
        raise StudyError(f"--budget {text!r} is not a duration. Write for example 90s, 30min, 2h or 1d.")
    return float(match[1]) * SECONDS[match[2]]


def needed(seeds: int) -> int:
    """Return the number of final seeds that gives a cell a verdict: the smallest that can, or all `seeds` if fewer."""
    return min(seeds, seeds_for_a_verdict())


@dataclasses.dataclass(frozen=True)
class Left:
    """The remaining work of a cell: trials, final runs, and an estimate of their core-seconds."""

    cell: Cell
    trials: int
    finals: int
    seconds: float

    @property
    def runs(self) -> int:
        """Return the number of trials and final runs together."""
        return self.trials + self.finals


def left_of(cell: Cell) -> Left:
    """Return the remaining work of a cell; a cell that was refused or has failed has none."""
    if cell.record.over:
        return Left(cell, 0, 0, 0.0)
    trials = 0 if cell.choice else cell.place.comparison.trials - cell.trials_done()
    finals = cell.place.study.seeds - len(cell.finals())
    return Left(cell, trials, finals, (trials + finals) * cell.place.world.seconds)


def informative_first(cells: Iterable[Cell]) -> list[tuple[Cell, int]]:
    """Return cells with their target numbers of final seeds: first as many as a verdict needs, then all seeds.

    In the first pass, the plain model of each world precedes all, because every comparison needs it; then cells already
    begun; then entry after entry over all worlds, so that a spent budget leaves complete rows.
    """
    waiting = [(cell, left_of(cell)) for cell in cells]
    waiting = [(cell, left) for cell, left in waiting if left.runs]
    if not waiting:
        return []
    seeds = waiting[0][0].place.study.seeds
    without_verdict = [cell for cell, left in waiting if seeds - left.finals < needed(seeds)]
    begun = [bool(cell.record.tried) for cell in without_verdict]
    order = sorted(
        range(len(without_verdict)), key=lambda at: (without_verdict[at].entry.kind != "plain", not begun[at], at)
    )
    first = [(without_verdict[at], needed(seeds)) for at in order]
    return [*first, *((cell, seeds) for cell, _ in waiting if needed(seeds) < seeds or cell not in without_verdict)]


def carry_out(
    cells: Sequence[Cell],
    engine: Engine,
    listener: Listener,
    *,
    jobs: int,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Run the missing runs of cells until `deadline` (in seconds of `clock`), and return why it ended.

    A run that fails marks its cell as failed; the others continue. Raises StudyError if the engine cannot continue,
    for example because the disk is full, or if another process uses one of the folders.
    """
    places = list({cell.place.folder: cell.place for cell in cells}.values())
    with ExitStack() as locks:
        for place in places:
            try:
                place.claim()
                locks.enter_context(locked(place.folder))
            except OSError as error:
                raise explain(error, place.folder) from error
        lanes = _Lanes(informative_first(cells), lambda: deadline is not None and clock() >= deadline)
        total = sum(left_of(cell).runs for cell in cells)
        listener.plan(total, 0)
        try:
            for order in lanes.begin(jobs):
                engine.submit(order)
            for event in engine.events():
                order = lanes.known[event["run"]]
                if event["event"] not in ("failed", "done"):
                    listener.hear(order, event)
                    continue
                if event.get("fatal"):
                    raise StudyError(event["reason"])
                following = lanes.ended(order, event, listener)
                if following is not None:
                    engine.submit(following)
        finally:
            for place in places:
                place.write_study()
    return "the budget is spent" if lanes.stopped else COMPLETE


class _Lanes:
    """The cells of all running orders; each lane completes one cell after the other."""

    def __init__(self, cells: list[tuple[Cell, int]], is_over: Callable[[], bool]) -> None:
        self.known: dict[str, Order] = {}
        self.stopped = False
        self._owner: dict[str, tuple[Cell, int]] = {}
        self._waiting, self._is_over = list(cells), is_over

    def begin(self, jobs: int) -> Iterator[Order]:
        """Yield the first order of each lane, one lane per job."""
        for _ in range(jobs):
            order = self._from_next_cell()
            if order is not None:
                yield order

    def ended(self, order: Order, event: dict, listener: Listener) -> Order | None:  # type: ignore[type-arg]
        """Record the end of a run, and return the next order of its lane."""
        cell, upto = self._owner.pop(order.identity)
        if event["event"] == "failed":
            cell.fail(event["reason"])
            listener.say(
                f"{cell.name} failed: {cell.record.why}; this is its result in {FILE}, and the other entries continue"
            )
        else:
            listener.hear(order, event)
            cell.tell(order, event["result"])
        return self._of_cell(cell, upto) or self._from_next_cell()

    def _of_cell(self, cell: Cell, upto: int) -> Order | None:
        if self._is_over():
            self.stopped = True
            return None
        order = cell.next_order(upto)
        if order is None:
            cell.place.write_study()
            return None
        self.known[order.identity], self._owner[order.identity] = order, (cell, upto)
        return order

    def _from_next_cell(self) -> Order | None:
        while not self.stopped:
            running = [cell for cell, _ in self._owner.values()]
            # a second pass over a cell waits until its first one has ended
            at = next((at for at, (cell, _) in enumerate(self._waiting) if cell not in running), None)
            if at is None:
                return None
            order = self._of_cell(*self._waiting.pop(at))
            if order is not None:
                return order
        return None


def plan_lines(cells: Sequence[Cell], jobs: int) -> list[str]:
    """Return lines on each world: the remaining runs, their estimated time, and the entries without an interval."""
    by_world: dict[str, list[Left]] = {}
    for cell in cells:
        by_world.setdefault(cell.place.world.name, []).append(left_of(cell))
    width = max(map(len, by_world), default=5)
    lines = [f"{'world':<{width}}  entries  whole  runs left  core-minutes"]
    for world, left in by_world.items():
        runs, minutes = sum(one.runs for one in left), sum(one.seconds for one in left) / 60
        complete = sum(not one.runs for one in left)
        lines.append(f"{world:<{width}}  {len(left):>7}  {complete:>5}  {runs:>9}  {minutes:>12.0f}")
    all_left = [one for left in by_world.values() for one in left]
    minutes = sum(one.seconds for one in all_left) / 60
    lines.append(
        f"{'all':<{width}}  {len(all_left):>7}  {sum(not one.runs for one in all_left):>5}  "
        f"{sum(one.runs for one in all_left):>9}  {minutes:>12.0f}"
    )
    lines.append(
        f"about {minutes / 60 / jobs:.1f} h with {count(jobs, 'run')} at a time, by the seconds that the worlds' "
        "files say of a run"
    )
    for world, left in by_world.items():
        seeds = left[0].cell.place.study.seeds
        names = [one.cell.entry.name for one in left if one.runs and seeds - one.finals < needed(seeds)]
        if names:
            entries = f"all {len(left)}" if len(names) == len(left) else ", ".join(names)
            lines.append(f"without an interval in {world}: {entries}")
        lines += [
            f"{one.cell.record.status} in {world}: {one.cell.entry.name} ({one.cell.record.why})"
            for one in left
            if one.cell.record.over
        ]
    return lines
