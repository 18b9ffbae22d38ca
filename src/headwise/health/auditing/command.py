"""The command `headwise audit`: audit, print, write the report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.files.optional_imports import load
from headwise.files.ownership import claim
from headwise.health.auditing.alert_texts import capital, count, harmless, kinds, reason_of, serious, short_place
from headwise.health.auditing.audit import audit
from headwise.health.auditing.audited import Audit
from headwise.health.auditing.result import SCORE, AuditResult
from headwise.health.auditing.summary import files_of, lead, most_worrying
from headwise.health.statistics.alert_remedies import REMEDIES

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
        console.print(text("The report has the other statistics too.", style="dim"))
    found = serious(audit.alerts)
    for alert in found[:ALERTS]:
        console.print(text.assemble((f"{alert['alert']}: ", "bold red"), f"{capital(alert['sentence'])}."))
    if len(found) > ALERTS:
        console.print(f"{len(found) - ALERTS} more alerts are in the report.")
    for kind in kinds(found):
        console.print(text.assemble((f"{kind.title}: ", "bold"), f"{kind.remedy} ({kind.source})"))
    if quiet := harmless(audit.alerts):
        console.print(f"No action needed: {count(len(quiet), 'sharp head')}, in the report.")
    for note in audit.notes():
        console.print(text(f"note: {note}", style="dim"))


# the exit code of an audit that found an alert of --fail-on
ALERTED = 3
ANY = "any"


def command(
    checkpoint: str,
    text: Path | None,
    images: Path | None,
    out: Path | None,
    *,
    as_json: bool = False,
    fail_on: Sequence[str] = (),
) -> None:
    """Audit as `run` does, print text or JSON, and exit with 3 if there is an alert of these names, or any.

    Raises:
        ValueError: if there is no alert of a name.
    """
    named = [name for part in fail_on for name in part.split(",") if name]
    # a remedy is of an alert, or of an alert "of a checkpoint" or "of weights"
    known = [*dict.fromkeys(remedy.partition(" of ")[0] for remedy in REMEDIES), ANY]
    unknown = [name for name in named if name not in known]
    if unknown:
        raise ValueError(f"--fail-on {unknown[0]}: there is no such alert. Alerts: {', '.join(known)}.")
    found = run(checkpoint, text=text, images=images, out=out, quiet=as_json)
    if as_json:
        print(found.to_json())
    # an alert that needs no action fails a pipeline only by its name
    if any(alert["alert"] in named for alert in found.alerts) or (ANY in named and serious(found.alerts)):
        sys.exit(ALERTED)


def _worst(audit: AuditResult) -> Any:
    table = _table("The worst heads", "head", "score", "why")
    for head in audit.worst():
        if head["reasons"]:
            table.add_row(short_place(head, audit), f"{head['score']:g}", reason_of(head))
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


def run(
    checkpoint: str,
    text: Path | None = None,
    images: Path | None = None,
    out: Path | None = None,
    *,
    quiet: bool = False,
) -> Audit:
    """Audit a checkpoint, print the result unless quiet, write the report to `out`, and return the audit.

    Raises:
        ValueError: if the report's files exist and were not written by headwise.
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
    hidden = quiet or not sys.stderr.isatty()
    with bars.Progress(*columns, console=console_of_bars, transient=True, disable=hidden) as bar:
        task = bar.add_task("layers", total=None)
        result = audit(
            checkpoint,
            text,
            images,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
            command=shlex.join(arguments),
        )
    if not quiet:
        show(result, console)
    for path in result.write(out) if out is not None else ():
        if not quiet:
            console.print(f"written: {path}", soft_wrap=True)
    return result
