"""The result of a study in its folder: its table, its plots, its verdicts and its page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise_verdict.reporting.export import figures
from headwise_verdict.reporting.rebuild import rebuild
from headwise_verdict.results.analysis_record import Analysis
from headwise_verdict.results.stored import checked_analysis

if TYPE_CHECKING:
    import altair
    import pandas

# the report's name of the figure of differences
FOREST = "paired-differences"


class StudyReport:
    """The page of a study, which a notebook shows in place; `path` is its file.

    Example:
        >>> from headwise_verdict.reporting.study_result import StudyReport
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
    """The result of a finished study; `folder` has all its files.

    Example:
        >>> import headwise, tempfile
        >>> from headwise.lab.studies.digits import Digits
        >>> task = Digits(epochs=1, train_size=50, test_size=50)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = headwise.compare(task, methods=["DropHead(p=0.2)"], seeds=1, out=folder, silent=True)
        >>> result.verdicts
        {'DropHead(p=0.2)': 'undecided'}
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.report = StudyReport(rebuild(self.folder))
        # all outcomes, intervals, tests and premises
        self.analysis: Analysis = checked_analysis(self.folder / "analysis.json")

    @property
    def answer(self) -> str:
        """Return the result in one to three sentences."""
        return self.analysis.answer

    @property
    def verdicts(self) -> dict[str, str]:
        """Return the verdict on the primary outcome for each arm except the baseline."""
        primary = self.analysis.primary
        return {arm.label: arm.differences[primary].verdict for arm in self.analysis.compared}

    def table(self) -> pandas.DataFrame:
        """Return one row per arm and outcome: mean, difference with its interval, p and verdict.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError(
                f"A table needs {error.name}, which is not installed: pip install 'headwise[study]'."
            ) from error
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
        """Return a figure of the report as an Altair chart, by default the paired differences.

        Raises:
            ValueError: if the report has no figure of that name.
        """
        import altair

        charts = figures(self.folder)
        match = next((key for key in charts if key == name or (not name and key.startswith(FOREST))), None)
        if match is None:
            raise ValueError(f"the report has no figure {name or FOREST!r}. Figures: {', '.join(charts) or 'none'}.")
        return altair.Chart.from_dict(charts[match])

    def __repr__(self) -> str:
        return f"StudyResult({str(self.folder)!r}: {self.answer})"
