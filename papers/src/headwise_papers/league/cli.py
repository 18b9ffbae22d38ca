"""The options of `headwise league`, without what runs it, so that the command line starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def league(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="WORLD...", help="Read these folders or files of worlds. Default: those in --out."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print which runs are missing and how long they take, and stop.")
    ] = False,
    go: Annotated[bool, typer.Option("--run", help="Run the missing runs, the most informative first.")] = False,
    budget: Annotated[str | None, typer.Option(help="Start no run after this time: 30min, 2h.")] = None,
    worlds: Annotated[list[str] | None, typer.Option(help="Use only these worlds. Commas between several.")] = None,
    entries: Annotated[list[str] | None, typer.Option(help="Use only these entries, and the plain model.")] = None,
    source: Annotated[
        list[Path] | None, typer.Option(help="Add this folder with your entries/ and worlds/. Repeat for more.")
    ] = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Tune each entry, and the plain model, with this many trials on validation data.")
    ] = 6,
    seeds: Annotated[int, typer.Option(min=2, help="Run each entry with this many final seeds.")] = 8,
    again: Annotated[bool, typer.Option("--again", help="Retry entries that failed or were refused.")] = False,
    fresh: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --run: repeat this many top methods on fresh seeds; with WORLD, run only these.",
        ),
    ] = 0,
    pairs: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --run: run this many top methods in pairs, and each with a control that helps; "
            "given worlds, only these runs.",
        ),
    ] = 0,
    time_steps: Annotated[
        bool, typer.Option("--time", help="Time a step of each entry, alternately with the plain model.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Run this many at a time. Default: one a core.")] = None,
    engine: Annotated[str, typer.Option(help="Run on this engine: local, ray or slurm.")] = "local",
    ray_address: Annotated[
        str | None, typer.Option(help="Use the Ray cluster at this address. Default: the running one, or a new one.")
    ] = None,
    slurm: Annotated[
        list[str] | None, typer.Option(help="Request these resources for each Slurm job: partition=gpu,timeout_min=60.")
    ] = None,
    device: Annotated[str, typer.Option(help="Train on cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(envvar="HEADWISE_DATA", help="Read the data sets from this folder.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Keep the league in this folder: its page, and a folder for each world.")
    ] = Path("results/league"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to standard error.")
    ] = False,
) -> None:
    """Compare many methods and controls in many worlds, each tuned by the same search.

    Exit code: 0 also when --budget is spent, whatever the verdicts; 1 an error; 2 a wrong option; 130 or 143 stopped.
    """
    from headwise_papers.league.command import LeagueRequest, named, run

    run(
        LeagueRequest(
            folders=tuple(folders or ()),
            plan=plan,
            run=go,
            budget=budget,
            worlds=named(worlds or ()),
            entries=named(entries or ()),
            sources=tuple(source or ()),
            trials=trials,
            seeds=seeds,
            again=again,
            fresh=fresh,
            pairs=pairs,
            time_steps=time_steps,
            jobs=jobs,
            engine=engine,
            ray_address=ray_address,
            slurm=tuple(slurm or ()),
            device=device,
            data=data,
            out=out,
            as_json=as_json,
        )
    )
