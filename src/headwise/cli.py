"""The command line: `headwise compare | report | audit | methods`. Each command imports what it needs, when it runs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    sys.exit("The command line needs typer, which is not installed: pip install 'headwise[study]'")

from headwise.comparing.registry import study_names
from headwise.files.errors import is_for_users

app = typer.Typer(
    name="headwise",
    help="Regularize, watch, audit and fairly compare the attention layers of transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def compare(
    study: Annotated[
        str | None, typer.Argument(help=f"A built-in study: {', '.join(study_names())}.", show_default="digits")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help='Compare this instead of the study\'s methods: "DropHead(p=0.1) + RelaxedAttention()"; repeatable.'
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Your own task instead of a study: FILE.py:CLASS.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds; nine or more allow a verdict on eight methods.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training examples.")] = None,
    train_size: Annotated[int | None, typer.Option(min=1, help="Training examples, drawn anew for each seed.")] = None,
    test_size: Annotated[int | None, typer.Option(min=1, help="Test examples, the same for all runs.")] = None,
    tune: Annotated[int, typer.Option(min=0, help="Trials on validation for every arm, before the seeds.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; changes no number. Default: the cores.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that train each run together, one after the other.")
    ] = None,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster; absent: the running one, or a new one.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    data: Annotated[Path | None, typer.Option(envvar="HEADWISE_DATA", help="Folder of the data set.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Record the health of every head in every run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: results/STUDY.")] = None,
) -> None:
    """Train methods × seeds, paired, and write a report. Stopped at any moment, the same command goes on."""
    from headwise.comparing.command import Request, run

    run(
        Request(
            study=_named(study, task),
            methods=tuple(method or ()),
            task=task,
            changes={"epochs": epochs, "train_size": train_size, "test_size": test_size},
            seeds=seeds,
            trials=tune,
            jobs=jobs,
            processes=processes,
            engine=engine,
            ray_address=ray_address,
            device=device,
            data=data,
            watch=watch,
            out=out,
            command=shlex.join(["headwise", *sys.argv[1:]]),
        )
    )


def _named(study: str | None, task: str | None) -> str:
    from headwise.files.errors import StudyError

    if study and task:
        raise StudyError(f"{study} is a built-in study and --task {task} is your own: give one of the two.")
    return study or "digits"


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder given by --out.")]) -> None:
    """Rebuild the report of a study from its files."""
    from headwise.comparing.report import write
    from headwise.comparing.report.run_records import damaged_words
    from headwise.files.durable import read_json

    print(write(folder))
    for words in damaged_words(read_json(folder / "analysis.json") or {}):
        print(f"note: {words}", file=sys.stderr)


@app.command()
def methods() -> None:
    """List the methods: name, operation, paper."""
    from headwise.methods.listing import print_methods

    print_methods()


@app.command()
def audit(
    checkpoint: Annotated[
        str, typer.Argument(help="A transformers folder, a timm name or file, or module.py:factory.")
    ],
    text: Annotated[Path | None, typer.Option(help="A text to read the activations on.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of images to read the activations on.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the report (HTML; JSON beside it).")] = None,
) -> None:
    """Read the health of every head of a checkpoint from its weights, and from data where given."""
    from headwise.audit.command import run

    run(checkpoint, text=text, images=images, out=out)


def main() -> None:
    """Run the command line: errors a user can act on are printed without a traceback, with exit code 1."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from headwise.comparing.engines.rank import be_one_of_several

        be_one_of_several(app)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not is_for_users(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
