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

try:
    import typer
    from typer.core import TyperCommand
except ModuleNotFoundError:
    sys.exit("The command line needs typer, which is not installed: pip install 'headwise[study]'")

from headwise.files.entry_points import entry_points, load
from headwise.lab.comparing.request import is_of_file
from headwise.lab.files.stops import end_on_stops
from headwise.lab.studies.registry import Installed, study_names
from headwise_verdict.files.errors import StudyError, is_for_users
from headwise_verdict.files.foreign_text import printable

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
def compare(
    study: Annotated[
        str | None,
        typer.Argument(
            help=f"Your own study, FILE.py:STUDY, or a built-in one: {', '.join(study_names())}.", show_default="digits"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Compare this arm instead of the study's, repeatable: 'DropHead(p=0.1) + RelaxedAttention()', "
            "'NeuTRENO(strength=0.6) @ 2-5 | learning_rate=0.001', 'baseline | weight_decay=0.1'."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="Compare arms along an axis: 'NeuTRENO(strength={0,0.3,0.6})'; repeatable.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a setting of task or recipe in all arms: name=value; repeatable. STUDY --help lists them.",
        ),
    ] = None,
    scale: Annotated[str | None, typer.Option(help="The size of the study, if it has several.")] = None,
    task: Annotated[str | None, typer.Option(help="Your own task instead of a study: FILE.py:CLASS.")] = None,
    script: Annotated[
        str | None,
        typer.Option(
            help="Your own training script instead: the command that trains once, 'python train.py --epochs 3'."
        ),
    ] = None,
    outcome: Annotated[
        list[str] | None,
        typer.Option(
            help="An outcome that the script records, with its better direction: accuracy:higher; the first decides."
        ),
    ] = None,
    arguments: Annotated[
        str | None,
        typer.Option(help="How the script takes changes after '|': argparse, hydra, environment or yaml:PATH."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds of silence after which a run of the script counts as hanging and is ended."),
    ] = None,
    require_pairs: Annotated[
        bool, typer.Option("--require-pairs", help="Stop if arms of a seed differ in initial weights or data.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Try every arm on one batch, print the plan, and stop.")] = False,
    no_rehearsal: Annotated[
        bool, typer.Option("--no-rehearsal", help="Start at once, without trying every arm on one batch.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds; six or more allow a verdict.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the training examples.")] = None,
    train_size: Annotated[
        int | None, typer.Option(min=1, help="Training examples, drawn separately for each seed.")
    ] = None,
    test_size: Annotated[int | None, typer.Option(min=1, help="Test examples, the same for all runs.")] = None,
    tune: Annotated[int, typer.Option(min=0, help="Trials on validation for every arm, before the seeds.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; does not change results. Default: the cores.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes that train each run together, one after the other.")
    ] = None,
    engine: Annotated[str, typer.Option(help="local, ray or slurm.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster. Default: the running one, or a new one.")
    ] = None,
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="Resources of each job of --engine slurm: partition=gpu,gpus_per_node=1,timeout_min=60; "
            "executor=local tries it out without Slurm. Options: docs/slurm.md."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if available.")] = None,
    graphs: Annotated[
        str, typer.Option(help="Capture training steps as CUDA graphs: auto, on or off. On a CPU there are none.")
    ] = "auto",
    data: Annotated[Path | None, typer.Option(envvar="HEADWISE_DATA", help="Folder of the data set.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Record the health of every head in every run.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results. Default: results/STUDY.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to standard error.")
    ] = False,
) -> None:
    """Train arms × seeds, paired, and write a report. After a stop, the same command continues.

    Exit code: 0 when the report is written, whatever its verdicts; 1 an error; 2 a wrong option; 130 or 143 stopped.
    """
    from headwise.lab.comparing.command import run
    from headwise.lab.comparing.request import Request

    run(
        Request(
            study=_study_name(study, task, script),
            studies=Installed(),
            methods=tuple(method or ()),
            sweeps=tuple(sweep or ()),
            settings=tuple(settings or ()),
            scale=scale,
            task=task,
            script=script,
            arguments=arguments,
            outcomes=tuple(outcome or ()),
            timeout=timeout,
            require_pairs=require_pairs,
            plan=plan,
            rehearsal=not no_rehearsal,
            changes={"epochs": epochs, "train_size": train_size, "test_size": test_size},
            seeds=seeds,
            trials=tune,
            jobs=jobs,
            processes=processes,
            engine=engine,
            ray_address=ray_address,
            slurm=tuple(slurm or ()),
            device=device,
            graphs=graphs,
            data=data,
            watch=watch,
            out=out,
            as_json=as_json,
            command=shlex.join(["headwise", *sys.argv[1:]]),
        )
    )


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
            help="Folders given by --out, whose arms are joined; or a table of runs from any source, CSV or JSONL.",
        ),
    ],
    outcome: Annotated[
        list[str] | None,
        typer.Option(help="For a table: the outcome to compare, accuracy:higher; repeatable, the first decides."),
    ] = None,
    baseline: Annotated[str, typer.Option(help="For a table: the arm to compare the others with.")] = "baseline",
    arm: Annotated[str, typer.Option(help="For a table: the column of the arms. Default: arm, method or group.")] = "",
    seed_column: Annotated[str, typer.Option(help="For a table: the column of the seeds. Default: seed.")] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            help="For a table: the columns that are settings, lr,width, in which rows of one arm must agree; "
            "repeatable. Default: those that an export marks as settings."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="For a table: the folder of its report. Default: NAME-report.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Also write figures (PDF, SVG, PNG) and tables (CSV, LaTeX) into this folder."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; notes go to standard error.")] = False,
) -> None:
    """Rebuild the report of a study from its files.

    Exit code: 0 when the report is written, whatever its verdicts; 1 an error; 2 a wrong option.
    """
    from headwise.files.json_output import json_alone
    from headwise_verdict.reporting.command import report_numbers, run
    from headwise_verdict.reporting.table_rows import is_table
    from headwise_verdict.results.json_answer import results_of

    tables = [path for path in folders if is_table(path)]
    if tables and len(folders) > 1:
        raise StudyError(f"{tables[0]} is a table of numbers. Report one table at a time.")
    if tables:
        columns = [name.strip() for text in settings or [] for name in text.split(",") if name.strip()]
        with json_alone(as_json) as show:
            page = report_numbers(
                tables[0], outcome or [], baseline, arm=arm, seed=seed_column, settings=columns, out=out, export=export
            )
            show(results_of([page.parent]))
        return
    if outcome or arm or seed_column or settings or out:
        raise StudyError(
            f"--outcome, --arm, --seed-column, --settings and --out are for tables, and {folders[0]} is a folder of "
            "results: leave them out."
        )
    with json_alone(as_json) as show:
        show(run(folders, export))


for _name in entry_points("headwise.commands"):
    app.command(_name)(load("headwise.commands", _name))


@app.command()
def studies(
    name: Annotated[str | None, typer.Argument(help="Describe this study in full.")] = None,
    source: Annotated[
        str | None, typer.Option(help="Only studies of this source: blog, neutreno, sigma, decay or own.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Only studies that took at most this long.")] = None,
) -> None:
    """List the studies, one a line: name, source, minutes, question."""
    from headwise.lab.studies.listing import print_studies

    print_studies(name, source, minutes)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Describe this method in full.")] = None,
    purpose: Annotated[
        str | None,
        typer.Option(
            "--for", help="Only methods for this: overfitting, unstable training, oversmoothing, long contexts, ..."
        ),
    ] = None,
) -> None:
    """List the methods: name, operation, paper, what they are for."""
    from headwise.lab.studies.registry import print_methods

    print_methods(name, purpose)


@app.command()
def audit(
    checkpoint: Annotated[
        str, typer.Argument(help="A transformers folder, a timm name or file, or module.py:factory.")
    ],
    text: Annotated[Path | None, typer.Option(help="A text file for the statistics of activations.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of images for the statistics of activations.")] = None,
    out: Annotated[Path | None, typer.Option(help="File of the report (HTML; the JSON is written next to it).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Exit with 3 if there is an alert of these names (commas between), or any.")
    ] = None,
) -> None:
    """Read the health of every head of a checkpoint from its weights and, if given, from data.

    Exit code: 0, or 3 for an alert of --fail-on; 1 and 2 are errors.
    """
    from headwise.health.auditing.command import command

    command(checkpoint, text, images, out, as_json=as_json, fail_on=fail_on or ())


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
def judge(
    metric: Annotated[
        str, typer.Option(help="The column, or the script's figure, and its better direction: val_loss:lower.")
    ],
    table: Annotated[Path | None, typer.Argument(help="A table with one row per run: CSV, TSV, JSON or JSONL.")] = None,
    script: Annotated[
        str | None, typer.Option(help="Instead of a table: the command that trains once; pairs run until they decide.")
    ] = None,
    change: Annotated[
        str, typer.Option(help="The candidate of --script: changed arguments (lr=3e-4), or a method.")
    ] = "",
    candidate: Annotated[str, typer.Option(help="The arm that has the change.")] = "candidate",
    baseline: Annotated[str, typer.Option(help="The arm that lacks it.")] = "baseline",
    margin: Annotated[float, typer.Option(min=0, help="Differences up to this size count as none.")] = 0.0,
    alpha: Annotated[float, typer.Option(help="Probability of a wrong answer, over all looks together.")] = 0.05,
    budget: Annotated[int | None, typer.Option(min=1, help="The most pairs of runs.")] = None,
    arm: Annotated[str, typer.Option(help="The column of the arms. Default: arm, method or group.")] = "",
    seed_column: Annotated[str, typer.Option(help="The column of the seeds. Default: seed.")] = "",
    target: Annotated[
        float | None, typer.Option(help="Judge the steps to this value of the metric; the table holds curves.")
    ] = None,
    step: Annotated[str, typer.Option(help="The column of the steps for --target. Default: step.")] = "",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Keep the baseline's spread over seeds as the noise floor.")
    ] = False,
    floor: Annotated[
        Path | None, typer.Option(help="Judge a candidate without pairs by this noise floor, or where to keep it.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="A file of all candidates; false discoveries over them are held at alpha.")
    ] = None,
    arguments: Annotated[
        str, typer.Option(help="How --script takes arguments: argparse, hydra, environment, yaml:PATH.")
    ] = "argparse",
    out: Annotated[Path | None, typer.Option(help="Folder of --script's runs. Default: results/judge/NAME.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Kill a run of --script after this many silent seconds.")
    ] = None,
    diverged: Annotated[
        float | None,
        typer.Option(help="Count a diverged run as this figure: the metric of a model that has learned nothing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a block for a pull request.")] = False,
) -> None:
    """Accept or reject a change after each seed.

    Exit code: 0 accept, 1 reject, 2 equivalent, 3 go on, 4 undecided within the budget, 5 an error.
    """
    from headwise.lab.comparing.judged_script import Script
    from headwise_verdict.judging.command import Request, main

    form = "json" if as_json else "markdown" if markdown else "line"
    options: dict[str, Any] = {
        "arm": arm,
        "seed": seed_column,
        "calibrate": calibrate,
        "floor": floor,
        "ledger": ledger,
        "target": target,
        "step": step,
        "diverged": diverged,
        "script": Script(script, change, metric, arguments, out, timeout, diverged) if script is not None else None,
    }
    main(Request(table, metric, change if script else candidate, baseline, margin, alpha, budget, form=form, **options))


@app.command()
def alarms(
    log: Annotated[
        Path,
        typer.Argument(
            help="CSV, TSV, JSON lines, a trainer_state.json, a TensorBoard event file or a folder of them."
        ),
    ],
    mapped: Annotated[
        list[str] | None,
        typer.Option("--map", help="The column of a figure: loss=train/loss, max_logit='layer*/logit'; repeatable."),
    ] = None,
    step: Annotated[str, typer.Option(help="The column of the steps. Default: step, _step or global_step.")] = "",
    run: Annotated[str, typer.Option(help="The column of the runs. Default: run, run_id or run_name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Apply the rules of headwise.watch to a log that exists already, and say which of them could be applied.

    Exit code: 0 no alert, 3 an alert; 1 and 2 are errors.
    """
    from headwise.lab.comparing.log_alarms import command

    command(log, mapped or (), step, run, as_json=as_json)


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="The file that headwise.watch(..., keep=N) wrote for an alert.")],
    training: Annotated[
        str,
        typer.Argument(help="FILE.py:FUNCTION, which returns (model, optimizer, step); step(batch) trains on a batch."),
    ],
) -> None:
    """Run the steps before an alert again, from their weights, batches and random state, and read each step."""
    from headwise.health.watching.replay import run

    run(file, training)


def main() -> None:
    """Run the command line: errors a user can act on are printed without a traceback, with exit code 1."""
    # stops torch's profiler, which measures memory, from printing; it must be set before torch is imported
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from headwise.lab.engines.rank import be_one_of_several

        be_one_of_several(app)
    end_on_stops()
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
