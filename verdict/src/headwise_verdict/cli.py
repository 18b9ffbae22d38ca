"""The command line of headwise-verdict: `headwise-verdict judge`, which `headwise judge` is too."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headwise_verdict.files.declared_options import takes_options_of
from headwise_verdict.files.foreign_text import spell_out
from headwise_verdict.judging.command import Request
from headwise_verdict.judging.command import main as carry_out

app = typer.Typer(name="headwise-verdict", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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


@app.command(cls=JudgeCommand)
@takes_options_of(Request)
def judge(**given: Any) -> None:
    """Accept or reject a change after each seed.

    Exit code: 0 accept, 1 reject, 2 equivalent, 3 go on, 4 undecided within the budget, 5 an error.
    """
    carry_out(Request(**given))


def add_judge(other: typer.Typer) -> None:
    """Add the command `judge` to another command line."""
    other.command(cls=JudgeCommand)(judge)


def main() -> None:
    """Run the command line."""
    spell_out(sys.stdout, sys.stderr)
    app()
