"""The command `headwise audit`: audit, print, write the report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from headwise.auditing.audit import audit
from headwise.auditing.page import Audit, files_of, lead, most_worrying
from headwise.auditing.records import place_of
from headwise.auditing.result import SCORE, AuditResult
from headwise.files.optional_imports import load
from headwise.files.ownership import claim

ALERTS = 10


def show(audit: AuditResult, console: Any) -> None:
    """Print an audit on a rich console."""
    text = load("rich.text", "study").Text
    console.print()
    console.print(text.assemble((audit.checkpoint, "bold"), f"  {audit.kind}, {audit.model}"))
    console.print(lead(audit))
    if audit.records:
        console.print(_worst(audit))
        console.print(text(SCORE, style="dim"))
        console.print(_overview(audit))
        console.print(text("Statistics without a worrying side are in the report.", style="dim"))
    for alert in audit.alerts[:ALERTS]:
        console.print(
            text.assemble(
                (f"{alert['alert']}: ", "bold red"), f"{alert['sentence']}. {alert['remedy']} ({alert['source']})."
            )
        )
    if len(audit.alerts) > ALERTS:
        console.print(f"{len(audit.alerts) - ALERTS} more alerts are in the report.")
    for note in audit.notes():
        console.print(text(f"note: {note}", style="dim"))


def _worst(audit: AuditResult) -> Any:
    table = _table("The worst heads", "head", "score", "why")
    for head in audit.worst():
        table.add_row(place_of(head), f"{head['score']:g}", "; ".join(head["reasons"]) or "nothing stands out")
    return table


def _overview(audit: AuditResult) -> Any:
    table = _table("All heads", "statistic", "worst", "at", "median")
    for row in most_worrying(audit):
        table.add_row(row["statistic"], f"{row['worst']:.4g}", row["at"], f"{row['median']:.4g}")
    return table


def _table(title: str, *columns: str) -> Any:
    rich = load("rich.table", "study")
    table = rich.Table(title=title, title_justify="left", box=load("rich.box", "study").SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in ("score", "worst", "median") else "left")
    return table


def run(checkpoint: str, text: Path | None = None, images: Path | None = None, out: Path | None = None) -> Audit:
    """Audit a checkpoint, print the result, write the report to `out`, and return the audit.

    Raises:
        StudyError: if the report's files exist and were not written by headwise.
        CheckpointError: if the checkpoint cannot be read; the message has the remedy.
    """
    if out is not None:
        # before the audit, which takes minutes
        page, json_file = files_of(out)
        claim(page.parent, (page.name, json_file.name), shared=True)
    console = load("rich.console", "study").Console()
    bars = load("rich.progress", "study")
    columns = (
        bars.TextColumn("reading layers"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    arguments = ["headwise", "audit", str(checkpoint)]
    for name, value in (("--text", text), ("--images", images), ("--out", out)):
        arguments += [name, str(value)] if value is not None else []
    console_of_bars = load("rich.console", "study").Console(file=sys.stderr)
    # a notebook asks for colours without being a terminal; there each state of a bar would be a new line
    quiet = not sys.stderr.isatty()
    with bars.Progress(*columns, console=console_of_bars, transient=True, disable=quiet) as bar:
        task = bar.add_task("layers", total=None)
        result = audit(
            checkpoint,
            text,
            images,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
            command=shlex.join(arguments),
        )
    show(result, console)
    if out is not None:
        for path in result.write(out):
            console.print(f"written: {path}", soft_wrap=True)
    return result
