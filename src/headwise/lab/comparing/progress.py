"""Progress of a study: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from headwise.lab.experiments.configuration import RATES
from headwise.lab.training.job import Order, is_first_process
from headwise_verdict.results import OutcomeNames, RunResult

if TYPE_CHECKING:
    from rich.console import Console

# columns of a run's name and of its bar; of 80, 40 are left for its state
NAMED, BAR = 28, 10
# seconds between two plain lines about running runs
QUIET = 30.0


class PlainLines:
    """A display that prints a line for each finished run, and now and then one for a long run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._finished = self._total = self._before = self._after = 0
        self._printed = self._began = self._told = time.monotonic()

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def plan(self, total: int, finished: int, after: int = 0) -> None:
        """Print the number of runs and of finished ones, or of trials, which are followed by `after` runs."""
        self._finished, self._total, self._before, self._after = finished, total, finished, after
        self._began, self._told = time.monotonic(), -QUIET
        known = f", {finished} finished already" if finished else ""
        self.say(state(finished, total, after) if after else f"{total} runs{known}")

    def hear(self, order: Order, event: dict[str, Any]) -> None:
        """Print a line for an event if it is worth one."""
        if event["event"] == "note":
            self.say(f"note: {event['text']}")
        elif event["event"] == "output":
            self.say(event["text"])
        elif event["event"] == "done":
            self._finished += 1
            count = f"[{self._finished:>{len(str(self._total))}}/{self._total}]"
            self.say(f"{count} {title(order)}: {describe_end(event['result'])}")
            self._print_remaining()
        elif time.monotonic() - self._printed > QUIET:
            self.say(f"{title(order)}: {describe_progress(event)}")

    def _print_remaining(self) -> None:
        """Print the estimated remaining time after the first run and then at intervals, unless it is short."""
        now = time.monotonic()
        remaining = (now - self._began) / (self._finished - self._before) * (self._total - self._finished)
        if remaining >= QUIET and now - self._told >= QUIET:
            self._told = now
            self.say(f"{state(self._finished, self._total, self._after)}, about {clock(remaining)} left")

    def say(self, text: str) -> None:
        """Print one line at once."""
        print(text, file=self._stream, flush=True)
        self._printed = time.monotonic()


class Bars:
    """A display with an overall bar and one line for each running run: epoch, loss, accuracy, time left."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        times = (TimeElapsedColumn(), TextColumn("gone,"), TimeRemainingColumn(), TextColumn("left"))
        columns = (text, BarColumn(bar_width=20), *times)
        self._all = Progress(*columns, console=console)
        self._each = Progress(
            text, BarColumn(bar_width=BAR), TextColumn("{task.fields[state]}", markup=False), console=console
        )
        self._overall: Any = None
        self._finished = self._total = self._after = 0
        self._lines: dict[str, Any] = {}
        self._console = console

    def __enter__(self) -> Bars:
        from rich.console import Group
        from rich.live import Live

        self._live = Live(Group(self._all, self._each), console=self._console, refresh_per_second=4)
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines.values():
            self._each.remove_task(line)
        self._live.__exit__(kind, error, trace)

    def plan(self, total: int, finished: int, after: int = 0) -> None:
        """Start the overall bar, with runs finished earlier included."""
        if self._overall is not None:
            self._all.remove_task(self._overall)
        self._finished, self._total, self._after = finished, total, after
        self._overall = self._all.add_task(state(finished, total, after), total=total, completed=finished)

    def hear(self, order: Order, event: dict[str, Any]) -> None:
        """Update the display for an event."""
        run = order.identity
        if event["event"] == "note":
            self.say(f"note: {event['text']}")
        elif event["event"] == "output":
            self.say(event["text"])
        elif event["event"] == "done":
            self._finished += 1
            words = state(self._finished, self._total, self._after)
            self._all.update(self._overall, advance=1, description=words)
            if run in self._lines:
                self._each.remove_task(self._lines.pop(run))
        else:
            if run not in self._lines:
                self._lines[run] = self._each.add_task(short(title(order)), total=1.0, state="")
            progress = fitting(describe_progress(event), self._console.width - NAMED - BAR - 2)
            self._each.update(self._lines[run], completed=event["done"], state=progress)

    def say(self, text: str) -> None:
        """Print one line above the bars."""
        self._console.print(text, markup=False, highlight=False)


def choose_display() -> PlainLines | Bars:
    """Return bars in a terminal and plain lines in a pipe, a file or a log; only the first process prints."""
    if not is_first_process():
        return PlainLines(io.StringIO())
    if not sys.stdout.isatty():
        return PlainLines()
    from rich.console import Console

    return Bars(Console())


# outcomes that do not come from an evaluation
NOT_MEASURED = ("cost/", "heads/", "watched/")


def state(finished: int, total: int, after: int) -> str:
    """Return the count of finished runs, or that of finished trials and of the runs that follow."""
    return f"trials {finished}/{total} · runs 0/{after}" if after else f"runs {finished}/{total}"


def title(order: Order) -> str:
    """Return a readable name of a run."""
    configuration = order.configuration
    if configuration.purpose == "trial":
        known = (configuration.settings.get(name) for name in RATES)
        rate = next((value for value in known if isinstance(value, (int, float))), None)
        return f"trial of {configuration.arm}" + (f", learning rate {rate:g}" if rate is not None else "")
    return f"{configuration.arm}, seed {configuration.seed}"


def short(name: str) -> str:
    """Return the name of a run, shortened to fit next to its bar; the seed is preserved."""
    if len(name) <= NAMED:
        return name
    head, _, tail = name.rpartition(", ")
    return f"{head[: max(1, NAMED - len(tail) - 3)]}…, {tail}"


def fitting(state: str, width: int) -> str:
    """Return a state shortened from its end to `width`."""
    while len(state) > width and "  " in state:
        state = state.rpartition("  ")[0]
    return state


def describe_progress(event: dict[str, Any]) -> str:
    """Return the state of a run in words; for a script, whose length is unknown, the last logged figures."""
    if "step" in event:
        return "  ".join(
            [f"step {event['step']}", *(f"{name} {value:.3f}" for name, value in list(event["figures"].items())[:2])]
        )
    metric = f"  {event['name']} {event['metric']:.3f}" if math.isfinite(event["metric"]) else ""
    # the time is first because the end is cut at 80 columns
    return f"epoch {event['epoch']}/{event['epochs']}  {clock(event['left'])} left  loss {event['loss']:.3f}{metric}"


def describe_end(result: RunResult) -> str:
    """Return how a run ended: its held-out metric and loss, or its divergence."""
    if result.divergence is not None:
        return f"diverged at step {result.divergence.step}"
    known = {name: value for name, value in result.metrics.items() if value is not None}
    measured = [name for name in known if not name.startswith(NOT_MEASURED)]
    splits = [name.rpartition("/")[0] for name in measured]
    # without a test or validation split, take the last one: a study with other names puts its summary last
    reported = next((split for split in ("test", "validation") if split in splits), splits[-1] if splits else "")
    figures = sorted((n for n, split in zip(measured, splits) if split == reported), key=lambda n: n.endswith("/loss"))
    figures_text = [
        f"{OutcomeNames.in_words(name)} {known[name]:.4f}" for name in dict.fromkeys((*figures[:1], *figures[-1:]))
    ]
    time = known.get("cost/seconds_per_step")
    return ", ".join([*figures_text, *([] if time is None else [clock(time * result.steps)])])


def clock(seconds: float) -> str:
    """Return a readable duration."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
