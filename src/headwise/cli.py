"""The command line: `headwise compare | report | judge | audit | alarms | replay | methods | studies`, and others.

Each command imports its own modules when it runs.
"""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from headwise.files.entry_points import entry_points, load
from headwise.health import add_commands
from headwise.lab.comparing.request import Request, is_of_file
from headwise.lab.files.stops import end_on_stops
from headwise.lab.studies.registry import Installed, study_names
from headwise_verdict import StudyError, add_judge
from headwise_verdict.files import is_for_users, printable, spell_out, takes_options_of

app = typer.Typer(
    name="headwise",
    help="Regularize, watch, audit and fairly compare the attention layers of transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        # from the metadata, because modules may not import the package `headwise` itself
        print(f"headwise {metadata.version('headwise')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Regularize, watch, audit and fairly compare the attention layers of transformers."""


class CompareCommand(TyperCommand):
    """The command `compare`, whose help for a study also lists the settings of that study."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store the arguments, because format_help does not get them."""
        ctx.meta["headwise.given"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the study or task on the command line with its settings, then the options."""
        words = ctx.meta.get("headwise.given", [])
        task, scale = (_value_of(option, words) for option in ("--task", "--scale"))
        study = next((word for word in words if word in study_names() or is_of_file(word)), None)
        if task or study:
            from headwise.lab.comparing.choosing import describe_request

            try:
                print(describe_request(study, task, scale, Installed()))
            except StudyError as error:
                print(f"error: {error}", file=sys.stderr)
                ctx.exit(1)
        super().format_help(ctx, formatter)


def _value_of(option: str, words: list[str]) -> str | None:
    """Return the value of an option, either the next word or the text after its equals sign."""
    separate = (value for name, value in itertools.pairwise(words) if name == option)
    joined = (word.partition("=")[2] for word in words if word.startswith(f"{option}="))
    return next(itertools.chain(separate, joined), None)


@app.command(cls=CompareCommand)
@takes_options_of(Request)
def compare(**given: Any) -> None:
    """Train every arm with the same seeds, and write a report. After a stop, the same command continues.

    Exit code: 0 when the report is written, whatever its verdicts; 1 an error; 2 a wrong option; 130 or 143 stopped.
    """
    from headwise.lab.comparing.command import run

    given["study"] = _study_name(given["study"], given["task"], given["script"])
    run(Request(**given, studies=Installed(), command=shlex.join(["headwise", *sys.argv[1:]])))


def _study_name(study: str | None, task: str | None, script: str | None) -> str:
    if study and script:
        raise StudyError(f"{study} is a study and --script {script!r} is your own: pass one of the two.")
    if study and task:
        raise StudyError(f"{study} is a study and --task {task} is your own: pass one of the two.")
    return study or "digits"


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="Report these folders of results, together if there are several; or one table of runs, CSV or JSON.",
        ),
    ],
    outcome: Annotated[
        list[str] | None,
        typer.Option(help="For a table: compare this outcome, accuracy:higher. Repeat for more; the first decides."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="For a table: compare the other arms with this one.")] = "baseline",
    arm: Annotated[
        str, typer.Option(help="For a table: read arms from this column. Default: arm, method or group.")
    ] = "",
    seed_column: Annotated[str, typer.Option(help="For a table: read seeds from this column. Default: seed.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            help="For a table: take these columns as settings, such as lr,width; all rows of an arm must agree in "
            "them. Default: those that an export marks."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For a table: write the report into this folder. Default: NAME-report.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Also write figures (PDF, SVG, PNG) and tables (CSV, LaTeX) into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; notes go to standard error.")] = False,
) -> None:
    """Rebuild the report of a study, or report a table of runs.

    Exit code: 0 when the report is written, whatever its verdicts; 1 an error; 2 a wrong option.
    """
    from headwise.files.json_output import json_alone
    from headwise_verdict import report as report_of

    options: dict[str, Any] = {"arm": arm, "seed": seed_column, "settings": settings or [], "out": out}
    with json_alone(as_json) as show:
        show(report_of(folders, outcome or [], baseline, **options, export=export))


for _name in entry_points("headwise.commands"):
    app.command(_name)(load("headwise.commands", _name))


@app.command()
def studies(
    name: Annotated[str | None, typer.Argument(help="Describe this study in full.")] = None,
    source: Annotated[
        str | None, typer.Option(help="List only studies of this source: blog, neutreno, sigma, decay or own.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="List only studies that took at most this many minutes.")
    ] = None,
) -> None:
    """List the studies: name, source, minutes, question."""
    from headwise.lab.studies.listing import print_studies

    print_studies(name, source, minutes)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Describe this method in full.")] = None,
    purpose: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="List only methods for this: overfitting, unstable training, oversmoothing, long contexts, ...",
        ),
    ] = None,
) -> None:
    """List the methods: name, operation, paper, what they are for."""
    from headwise.lab.studies.registry import print_methods

    print_methods(name, purpose)


add_commands(app)
add_judge(app)


def main() -> None:
    """Run the command line: errors a user can act on are printed without a traceback, with exit code 1."""
    # stops torch's profiler, which measures memory, from printing; it must be set before torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from headwise.lab.engines.rank import be_one_of_several

        be_one_of_several(app)
    end_on_stops()
    spell_out(sys.stdout, sys.stderr)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
