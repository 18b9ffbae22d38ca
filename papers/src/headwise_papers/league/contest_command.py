"""What `headwise league` does: run what is missing of the small worlds, plan it, or write the page of its runs."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from headwise.files.entry_points import entry_points
from headwise.files.json_output import json_alone
from headwise.lab.comparing.choosing import choose_device
from headwise.lab.files.stops import raise_on_stops, stop_code, stopped_line
from headwise_papers.league.cli import LeagueRequest, league
from headwise_papers.league.contest import Contest, carry_out
from headwise_papers.league.contest_files import (
    ARMS,
    WORLDS,
    Contestant,
    SmallWorld,
    read_contestants,
    read_small_worlds,
)
from headwise_papers.league.contest_page import page
from headwise_papers.league.json_answer import league_of
from headwise_verdict.files.durable import write_bytes
from headwise_verdict.files.errors import StudyError, explain, suggest
from headwise_verdict.files.ownership import claim

PAGE = "league.md"
_HOLDS = {True: "holds", False: "does not hold"}


def run(request: LeagueRequest) -> None:
    """Execute a request; exit with 1 if a world could not be run, with 130 or 143 if stopped.

    Raises:
        StudyError: for options that exclude each other, an unknown world or device, and an invalid file.
    """
    if sum((request.plan, request.page, request.premises)) > 1:
        raise StudyError("--plan and --page run nothing, and --premises runs: give one of the three.")
    device = choose_device(request.device)
    contestants, worlds = _read(request)
    failed = False
    with json_alone(request.as_json) as show:
        if not (request.plan or request.page):
            failed = _run_worlds(request, contestants, worlds, device)
        contests = [Contest.kept(world, contestants, request.out / name) for name, world in worlds.items()]
        if request.plan:
            print("\n".join(map(plan_line, contests)))
        written = _write_page(contests, request.out) if request.page else None
        show(league_of(contests, written))
    if failed:
        sys.exit(1)


def plan_line(contest: Contest) -> str:
    """Return what is missing of a world, as a line: less, if a premise fails, which ends a world."""
    done, left = len(contest.ledger.runs), contest.runs_left()
    if contest.state in ("complete", "failed"):
        return f"{contest.world.name}: {contest.state}, {done} runs"
    minutes = left * contest.world.seconds / 60
    return f"{contest.world.name}: {contest.state}, runs {done}/{done + left}, about {minutes:.0f} core-minutes left"


def _read(request: LeagueRequest) -> tuple[dict[str, Contestant], dict[str, SmallWorld]]:
    """Return all contestants, and the requested worlds: of installed packages, and of the user's own folders."""
    for folder in request.sources:
        if not any((folder / part).is_dir() for part in (ARMS, WORLDS)):
            raise StudyError(
                f"--source {folder} contains neither {ARMS}/ nor {WORLDS}/. Give the folder that contains them."
            )
    packages = [importlib.import_module(point.value) for point in entry_points("headwise.leagues").values()]
    folders = [*(Path(place) for package in packages for place in package.__path__), *request.sources]
    contestants, known = read_contestants(folders), read_small_worlds(folders)
    wanted = [name.strip() for text in request.worlds for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise StudyError(f"there is no world {name!r}.{suggest(name, list(known))} Known: {', '.join(known)}.")
    return contestants, {name: known[name] for name in wanted or known}


def _run_worlds(
    request: LeagueRequest, contestants: Mapping[str, Contestant], worlds: Mapping[str, SmallWorld], device: str
) -> bool:
    """Run the missing runs of worlds, one after another, until the minutes are spent; return whether one could not."""
    end = float("inf") if request.minutes is None else time.monotonic() + 60 * request.minutes
    failed = False
    try:
        with raise_on_stops():
            for name, world in worlds.items():
                try:
                    _run_world(request, contestants, world, device, end)
                except (StudyError, OSError) as error:
                    failed = True
                    told = explain(error, request.out / name) if isinstance(error, OSError) else error
                    print(f"error: {name}: {told}", file=sys.stderr, flush=True)
    except KeyboardInterrupt as stop:
        print(stopped_line(request.out), file=sys.stderr)
        sys.exit(stop_code(stop))
    return failed


def _run_world(
    request: LeagueRequest, contestants: Mapping[str, Contestant], world: SmallWorld, device: str, end: float
) -> None:
    data = request.data.resolve() if request.data else None
    world.built(data).prepare(_say)
    contest = Contest.of(world, contestants, request.out / world.name, data)
    is_over = partial(_is_over, contest, end, only_premises=request.premises)
    carry_out(contest, data, _say, is_over, device)
    for one in contest.premises():
        _say(f"{world.name}: {one.name}: {one.says}: {one.figure:.3f}, {one.level:.3f}, {_HOLDS[one.holds]}")


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def _is_over(contest: Contest, end: float, *, only_premises: bool) -> bool:
    return time.monotonic() > end or (only_premises and bool(contest.premises()))


def _write_page(contests: list[Contest], out: Path) -> Path:
    claim(out, (PAGE,), shared=True)
    write_bytes(out / PAGE, f"# The league\n\n{page(contests)}\n".encode())
    print(f"page: {out / PAGE}")
    return out / PAGE


if __name__ == "__main__":
    import typer

    typer.run(league)
