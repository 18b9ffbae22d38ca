"""The options of `headwise league`, without what runs it, so that the command line starts at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def league(
    worlds: Annotated[
        list[str] | None, typer.Option(help="Use only these worlds. Commas between several. Default: all.")
    ] = None,
    source: Annotated[
        list[Path] | None, typer.Option(help="Add this folder with your arms/ and small_worlds/. Repeat for more.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print what is missing, in core-minutes, and run nothing.")
    ] = False,
    premises: Annotated[bool, typer.Option("--premises", help="Stop each world once its premises are known.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write league.md from the runs in --out, and run nothing.")
    ] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Start no run after this many minutes.")] = None,
    device: Annotated[str, typer.Option(help="Train on cpu or cuda.")] = "cpu",
    data: Annotated[
        Path | None, typer.Option(envvar="HEADWISE_DATA", help="Read the data sets from this folder.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Keep the runs here, in a folder for each world.")] = Path("results/league"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; progress goes to standard error.")
    ] = False,
) -> None:
    """Run what is missing of the league: methods and controls in small worlds, all tuned by one search.

    Stop at any moment; the same command resumes.

    Exit code: 0 also when --minutes are spent, whatever the verdicts; 1 an error; 2 a wrong option; 130 or 143 stopped.
    """
    from headwise_papers.league.contest_command import LeagueRequest, run

    run(
        LeagueRequest(
            worlds=tuple(name.strip() for text in worlds or () for name in text.split(",") if name.strip()),
            sources=tuple(source or ()),
            plan=plan,
            only_premises=premises,
            page=page,
            minutes=float("inf") if minutes is None else minutes,
            device=device,
            data=data.resolve() if data else None,
            out=out,
            as_json=as_json,
        )
    )
