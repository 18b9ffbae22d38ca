"""The command line of headwise-verdict: `headwise-verdict judge`, which `headwise judge` is too."""

from __future__ import annotations

import sys
import traceback
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headwise_verdict.files.errors import is_for_users
from headwise_verdict.files.foreign_text import printable

app = typer.Typer(name="headwise-verdict", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
# the entry points of packages that run training scripts in pairs
SCRIPTS = "headwise_verdict.scripts"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"headwise-verdict {version('headwise-verdict')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Judge training runs of any framework."""


class JudgeCommand(TyperCommand):
    """The command `judge`, whose wrong options end with 5: the usual 2 would be the answer "equivalent"."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Read the options."""
        try:
            return super().make_context(*arguments, **named)
        except Exception as error:
            # errors of the command line carry their exit code, also where typer brings its own click
            if hasattr(error, "exit_code"):
                error.exit_code = error.exit_code and 5
            raise

    def invoke(self, ctx: Any) -> Any:
        """Carry the command out."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if hasattr(error, "exit_code"):
                error.exit_code = error.exit_code and 5
            elif is_for_users(error):
                print(f"error: {printable(str(error))}", file=sys.stderr)
                sys.exit(5)
            else:
                # Python's own 1 would be the answer "reject"
                traceback.print_exc()
                sys.exit(5)
            raise


@app.command(cls=JudgeCommand)
def judge(
    metric: Annotated[
        str, typer.Option(help="Judge this column, or figure of the script: val_loss:lower, accuracy:higher.")
    ],
    table: Annotated[
        Path | None, typer.Argument(help="Read runs from this table, one per row: CSV, TSV, JSON or JSONL.")
    ] = None,
    script: Annotated[
        str | None, typer.Option(help="Run this training command pair by pair until there is an answer.")
    ] = None,
    change: Annotated[str, typer.Option(help="Judge this change of --script: lr=3e-4, or a method.")] = "",
    candidate: Annotated[str, typer.Option(help="Judge this arm.")] = "candidate",
    baseline: Annotated[str, typer.Option(help="Compare with this arm.")] = "baseline",
    against: Annotated[
        Path | None,
        typer.Option(help="Read the baseline's runs from this table; all runs of TABLE are the candidate's."),
    ] = None,
    margin: Annotated[float, typer.Option(min=0, help="Count differences up to this size as none.")] = 0.0,
    alpha: Annotated[
        float, typer.Option(help="Allow a wrong answer with this probability, over all looks together.")
    ] = 0.05,
    budget: Annotated[int | None, typer.Option(min=1, help="Stop after this many pairs of runs.")] = None,
    arm: Annotated[str, typer.Option(help="Read arms from this column. Default: arm, method or group.")] = "",
    seed_column: Annotated[str, typer.Option(help="Read seeds from this column. Default: seed.")] = "",
    target: Annotated[
        float | None,
        typer.Option(help="Judge the steps until a run reaches this value of the metric, from a table of curves."),
    ] = None,
    step: Annotated[str, typer.Option(help="Read the steps for --target from this column. Default: step.")] = "",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Keep the baseline's spread over seeds as the noise floor.")
    ] = False,
    floor: Annotated[
        Path | None,
        typer.Option(help="Judge unpaired runs against the noise floor in this file; with --calibrate, save it there."),
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Record all candidates in this file, and hold their false discovery rate at alpha."),
    ] = None,
    arguments: Annotated[
        str, typer.Option(help="Pass changes to --script in this form: argparse, hydra, environment, yaml:PATH.")
    ] = "argparse",
    out: Annotated[
        Path | None, typer.Option(help="Keep the runs of --script in this folder. Default: results/judge/NAME.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Kill a run of --script after this many silent seconds.")
    ] = None,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Start --script with this seed. Fresh seeds confirm an accepted change.")
    ] = 0,
    diverged: Annotated[
        float | None,
        typer.Option(help="Count a diverged run as this value: that of a model that has learned nothing."),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(help="Assume only that no two runs differ by more than this, and not that noise is normal."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a block for a pull request.")] = False,
) -> None:
    """Accept or reject a change after each seed.

    Exit code: 0 accept, 1 reject, 2 equivalent, 3 go on, 4 undecided within the budget, 5 an error.
    """
    from headwise_verdict.judging.command import Request, main

    if as_json and markdown:
        raise typer.BadParameter("give either --json or --markdown")
    of_script = {"--change": change, "--out": out, "--timeout": timeout, "--first-seed": first_seed}
    if script is None and (given := [name for name, value in of_script.items() if value]):
        raise typer.BadParameter(f"{given[0]} belongs to --script")
    form = "json" if as_json else "markdown" if markdown else "line"
    options: dict[str, Any] = {
        "against": against,
        "arm": arm,
        "seed": seed_column,
        "calibrate": calibrate,
        "floor": floor,
        "ledger": ledger,
        "target": target,
        "step": step,
        "diverged": diverged,
        "bound": bound,
        "script": script and _script(script, change, metric, arguments, out, timeout, diverged, first_seed),
    }
    if script is not None:
        candidate = f"{change}, seeds from {first_seed}" if first_seed else change
    if against is not None and table is not None:
        candidate, baseline = _named(table, against, candidate, baseline)
    main(Request(table, metric, candidate, baseline, margin, alpha, budget, form=form, **options))


def add_judge(other: typer.Typer) -> None:
    """Add the command `judge` to another command line."""
    other.command(cls=JudgeCommand)(judge)


def _named(table: Path, against: Path, candidate: str, baseline: str) -> tuple[str, str]:
    """Return the names of the arms of two tables: those given, else those of the files."""
    mine, other = (table.stem, against.stem) if table.stem != against.stem else (str(table), str(against))
    return mine if candidate == "candidate" else candidate, other if baseline == "baseline" else baseline


def _script(command: str, *settings: Any) -> Any:
    """Return the script to run in pairs, by the package that runs scripts; end with 5 where none is installed."""
    found = tuple(entry_points(group=SCRIPTS))
    if not found:
        print("error: --script needs headwise, which is not installed: pip install 'headwise[study]'", file=sys.stderr)
        sys.exit(5)
    return found[0].load()(command, *settings)


def main() -> None:
    """Run the command line."""
    app()
