"""A study from Python: `compare` carries it out, and gives its table, its plot, its verdicts and its page."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import headwise.comparing.compare  # noqa: F401  # what a study needs is missed at once, not when it runs
from headwise.comparing.command import carry_out, start_engine
from headwise.comparing.request import Request, check
from headwise.engines.in_process import HereEngine
from headwise.experiments.subject import Subject
from headwise.files.errors import StudyError
from headwise.files.optional_imports import needing
from headwise.reporting import write
from headwise.reporting.export import figures
from headwise.results.analysis_record import Analysis
from headwise.results.stored import checked_analysis
from headwise.studies.registry import Installed

if TYPE_CHECKING:
    import altair
    import pandas

    from headwise.core.method import Method

# how the report names its figure of differences
FOREST = "paired-differences"


class StudyReport:
    """Hold the page of a study: a notebook shows it in place, `path` opens it elsewhere.

    Example:
        >>> from headwise import StudyReport
        >>> StudyReport("results/digits/report.html").path.name
        'report.html'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="800" style="border:0"></iframe>'

    def __repr__(self) -> str:
        return f"StudyReport({str(self.path)!r})"


class StudyResult:
    """Hold what a finished study found; `folder` holds everything that it wrote.

    Example:
        >>> import headwise, tempfile
        >>> from headwise.studies.digits import Digits
        >>> task = Digits(epochs=1, train_size=50, test_size=50)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = headwise.compare(task, methods=["DropHead(p=0.2)"], seeds=1, out=folder, silent=True)
        >>> result.verdicts
        {'DropHead(p=0.2)': 'undecided'}
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.report = StudyReport(write(self.folder))
        # every outcome, interval, test and premise
        self.analysis: Analysis = checked_analysis(self.folder / "analysis.json")

    @property
    def answer(self) -> str:
        """Return the result in one to three sentences."""
        return self.analysis.answer

    @property
    def verdicts(self) -> dict[str, str]:
        """Return the verdict of each arm but the baseline in the outcome that decides."""
        primary = self.analysis.primary
        return {arm.label: arm.differences[primary].verdict for arm in self.analysis.compared}

    def table(self) -> pandas.DataFrame:
        """Return one row an arm and outcome: mean, difference with its interval, p and verdict.

        Raises:
            ImportError: if pandas is not installed.
        """
        with needing("A table", "study"):
            import pandas
        rows = []
        for arm in self.analysis.arms:
            for name, mean in arm.metrics.items():
                entry = arm.differences.get(name)
                row: dict[str, Any] = {"arm": arm.label, "outcome": name, "mean": mean.mean, "seeds": mean.n}
                if entry is not None:
                    row |= {"difference": entry.mean, "low": entry.low, "high": entry.high}
                    row |= {
                        "p": entry.p_corrected,
                        "pairs": entry.n if entry.paired else 0,
                        "verdict": entry.verdict_text,
                    }
                rows.append(row)
        columns = ("arm", "outcome", "mean", "seeds", "difference", "low", "high", "p", "pairs", "verdict")
        return pandas.DataFrame(rows, columns=list(columns))

    def plot(self, name: str = "") -> altair.TopLevelMixin:
        """Return a figure of the report as an Altair chart: the paired differences, or the one of the name given.

        Raises:
            ValueError: for a name that the report has not.
        """
        with needing("A plot", "study"):
            import altair
        known = figures(self.folder)
        found = next((key for key in known if key == name or (not name and key.startswith(FOREST))), None)
        if found is None:
            raise ValueError(f"the report has no figure {name or FOREST!r}. Figures: {', '.join(known) or 'none'}.")
        return altair.Chart.from_dict(known[found])

    def __repr__(self) -> str:
        return f"StudyResult({str(self.folder)!r}: {self.answer})"


def compare(
    subject: str | type[Subject] | Subject,
    methods: Sequence[str | Method | Sequence[Method]] = (),
    *,
    seeds: int | None = None,
    out: str | Path | None = None,
    outcome: str | Sequence[str] = (),
    sweeps: Sequence[str] = (),
    settings: Sequence[str] = (),
    trials: int = 0,
    jobs: int = 1,
    engine: str = "local",
    watch: bool = False,
    data: str | Path | None = None,
    device: str | None = None,
    arguments: str | None = None,
    timeout: float | None = None,
    require_pairs: bool = False,
    silent: bool = False,
) -> StudyResult:
    """Carry out a study as `headwise compare` does, and give what it found; called again, it goes on where it was
    stopped.

    Args:
        subject: a task (class or object of an importable file), "file.py:Class", the name of an installed study, or the
            command of a
            training script: "python train.py --epochs 3".
        methods: the arms besides the baseline: methods, sequences of methods that act together, or texts of arms.
        seeds: None: as many as the study has, 10 otherwise.
        out: the folder of the results; None: `results/NAME`.
        outcome: of a script: what it records, "accuracy:higher"; the first decides.
        sweeps, settings, trials, engine, watch, data, device, arguments, timeout, require_pairs: as on the command
            line.
        jobs: runs at a time. One is carried out in this process; more take processes, which import the file of this
            program: there the call stands under `if __name__ == "__main__"`.
        silent: print nothing.

    Raises:
        StudyError: with the remedy, as the command line prints it.

    Example:
        >>> import headwise, tempfile
        >>> from headwise.studies.digits import Digits
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     task = Digits(epochs=1, train_size=50, test_size=50)
        ...     result = headwise.compare(task, methods=[headwise.DropHead(p=0.2)], seeds=2, out=folder, silent=True)
        >>> result.analysis.seeds
        [0, 1]
    """
    named = _named(subject)
    request = Request(
        **named,
        studies=Installed(),
        methods=tuple(map(_text, methods)),
        sweeps=tuple(sweeps),
        settings=(*_settings(subject), *settings),
        seeds=seeds,
        trials=trials,
        jobs=jobs,
        engine=engine,
        device=device,
        data=None if data is None else Path(data),
        watch=watch,
        out=None if out is None else Path(out),
        outcomes=(outcome,) if isinstance(outcome, str) else tuple(outcome),
        arguments=arguments,
        timeout=timeout,
        require_pairs=require_pairs,
        command="headwise.compare(...)",
    )
    check(request)
    chosen = HereEngine() if engine == "local" and jobs == 1 else start_engine(request)
    threads = torch.get_num_threads()
    try:
        return StudyResult(carry_out(request, chosen, silent=silent))
    finally:
        chosen.close()
        # a run in this process takes as many as its study says
        torch.set_num_threads(threads)


def _named(subject: str | type[Subject] | Subject) -> dict[str, Any]:
    if not isinstance(subject, str):
        return {"task": _place(subject if isinstance(subject, type) else type(subject))}
    if subject in Installed().names:
        return {"study": subject}
    # a command has words, or is a program; a task has its class behind a colon
    name = subject.rpartition(":")[2]
    is_task = " " not in subject and ":" in subject and name.isidentifier()
    return {"task": subject} if is_task else {"script": subject}


def _place(kind: type[Subject]) -> str:
    """Name the file or module from which a run builds a task again."""
    module = sys.modules.get(kind.__module__)
    if "." in kind.__qualname__:
        raise StudyError(f"{kind.__qualname__} is defined inside a function or class. Define it at the top of a file.")
    if kind.__module__ != "__main__" and module is not None and not kind.__module__.startswith("headwise_task_"):
        return f"{kind.__module__}:{kind.__name__}"
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        file = None
    if (
        file is None
        or not Path(file).is_file()
        or f"class {kind.__name__}" not in Path(file).read_text(encoding="utf-8")
    ):
        raise StudyError(
            f"{kind.__name__} stands in no file, from which a run could build it again. Write it into one: my_task.py."
        )
    return f"{file}:{kind.__name__}"


def _settings(subject: Any) -> list[str]:
    """Return what an object of a task has set, as the command line takes it."""
    if not isinstance(subject, Subject):
        return []
    from headwise.experiments.arm_settings import write_setting

    plain = type(subject)().model_dump()
    return [write_setting(name, value, subject) for name, value in subject.model_dump().items() if plain[name] != value]


def _text(arm: Any) -> str:
    if isinstance(arm, str):
        return arm
    return " + ".join(map(repr, arm)) if isinstance(arm, (list, tuple)) else repr(arm)
