"""The options of `headwise league`, without what runs it, so that the command line starts at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise_verdict.files import option, takes_options_of


@dataclass(frozen=True)
class LeagueRequest:
    """The options of one call of `headwise league`, each declared here alone."""

    worlds: tuple[str, ...] = option((), help="Use only these worlds. Commas between several. Default: all.")
    # in addition to those of installed packages
    sources: tuple[Path, ...] = option(
        (), "--source", help="Add this folder with your arms/ and small_worlds/. Repeat for more."
    )
    plan: bool = option(False, "--plan", help="Print what is missing, in core-minutes, and run nothing.")
    premises: bool = option(False, "--premises", help="Stop each world once its premises are known.")
    page: bool = option(False, "--page", help="Write league.md from the runs in --out, and run nothing.")
    minutes: float | None = option(None, min=0, help="Start no run after this many minutes.")
    device: str = option("cpu", help="Train on cpu or cuda.")
    data: Path | None = option(None, envvar="HEADWISE_DATA", help="Read the data sets from this folder.")
    out: Path = option(Path("results") / "league", help="Keep the runs here, in a folder for each world.")
    as_json: bool = option(False, "--json", help="Print one JSON object; progress goes to standard error.")


@takes_options_of(LeagueRequest)
def league(**given: Any) -> None:
    """Run what the league still lacks: methods and controls in small worlds, all tuned by the same search.

    Stop at any moment; the same command resumes.

    Exit code: 0 at the end or when --minutes are spent, whatever the verdicts; 1 an error; 2 a wrong option; 130
    or 143 stopped.
    """
    from headwise_papers.league.contest_command import run

    run(LeagueRequest(**given))
