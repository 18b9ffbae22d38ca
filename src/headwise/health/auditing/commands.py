"""The commands `headwise audit | alarms | replay`; each imports its own modules when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def audit(
    checkpoint: Annotated[
        str, typer.Argument(help="Audit a transformers folder, a timm name or file, or module.py:factory.")
    ],
    text: Annotated[Path | None, typer.Option(help="Run the model on this text, and read its activations.")] = None,
    images: Annotated[
        Path | None, typer.Option(help="Run the model on these images, a folder, and read its activations.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the report into this HTML file, and its JSON next to it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Exit with 3 at an alert of this name, or any. Commas between several.")
    ] = None,
) -> None:
    """Read the health of every head of a checkpoint, from its weights and from data.

    Exit code: 0, or 3 for an alert of --fail-on; 1 and 2 are errors.
    """
    from headwise.health.auditing.command import command

    command(checkpoint, text, images, out, as_json=as_json, fail_on=fail_on or ())


def alarms(
    log: Annotated[
        Path,
        typer.Argument(
            help="Read this log: CSV, TSV, JSON lines, a trainer_state.json, a TensorBoard event file, or a folder."
        ),
    ],
    mapped: Annotated[
        list[str] | None,
        typer.Option(
            "--map", help="Read a figure from this column: loss=train/loss, max_logit='layer*/logit'. Repeat for more."
        ),
    ] = None,
    step: Annotated[str, typer.Option(help="Read steps from this column. Default: step, _step or global_step.")] = "",
    run: Annotated[str, typer.Option(help="Read runs from this column. Default: run, run_id or run_name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Apply the alert rules of headwise.watch to an existing log, and say which rules could be applied.

    Exit code: 0 no alert, 3 an alert; 1 and 2 are errors.
    """
    from headwise.health.auditing.log_alarms import command

    command(log, mapped or (), step, run, as_json=as_json)


def replay(
    file: Annotated[
        Path, typer.Argument(help="Replay this file, which headwise.watch(..., keep=N) wrote for an alert.")
    ],
    training: Annotated[
        str,
        typer.Argument(
            help="Call FILE.py:FUNCTION, which returns (model, optimizer, step); step(batch) trains on a batch."
        ),
    ],
) -> None:
    """Repeat the steps before an alert, and read every head at each step."""
    from headwise.health.watching.replay import run

    run(file, training)


def add_commands(app: typer.Typer) -> None:
    """Add these commands to a command line."""
    for command in (audit, alarms, replay):
        app.command()(command)
