"""The command `headwise audit`: a progress bar, tables, and the files."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from headwise.auditing.audit import audit
from headwise.auditing.report import Audit
from headwise.auditing.terminal import show
from headwise.files.optional_imports import load


def run(checkpoint: str, text: Path | None = None, images: Path | None = None, out: Path | None = None) -> Audit:
    """Audit a checkpoint, print what was found, and write the report where `out` says.

    Raises:
        CheckpointError: where the checkpoint cannot be read, with the remedy.
    """
    console = load("rich.console", "study").Console()
    bars = load("rich.progress", "study")
    columns = (
        bars.TextColumn("reading layers"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
    )
    words = ["headwise", "audit", str(checkpoint)]
    for name, value in (("--text", text), ("--images", images), ("--out", out)):
        words += [name, str(value)] if value is not None else []
    with bars.Progress(*columns, console=load("rich.console", "study").Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("layers", total=None)
        found = audit(
            checkpoint,
            text,
            images,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
            command=shlex.join(words),
        )
    show(found, console)
    if out is not None:
        for path in found.write(out):
            console.print(f"written: {path}", soft_wrap=True)
    return found
