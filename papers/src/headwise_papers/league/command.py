"""The command `headwise league`: its options, and what they start; `drive.py` carries out runs within the budget."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.files.json_output import json_alone
from headwise.files.provenance import usable_cores
from headwise.lab.comparing.choosing import choose_device
from headwise.lab.comparing.command import start_engine
from headwise.lab.comparing.comparison import Engine, Listener
from headwise.lab.comparing.progress import PlainLines, choose_display
from headwise.lab.comparing.request import ENGINES, Request
from headwise.lab.engines.local import HereEngine
from headwise.lab.files.stops import raise_on_stops, stop_code, stopped_line
from headwise_papers.league import files
from headwise_papers.league.cell import Cell, Place
from headwise_papers.league.drive import COMPLETE, carry_out, plan_lines, read_budget
from headwise_papers.league.follow_up import on_fresh_seeds, pair_cells, pairs_of, recommended
from headwise_papers.league.reading import read_worlds
from headwise_papers.league.step_time import time_steps
from headwise_papers.league.world_folder import LeagueRecord, is_ready, why_not_ready
from headwise_verdict.files.errors import StudyError, explain
from headwise_verdict.files.ownership import claim

OUT = Path("results") / "league"


@dataclass(frozen=True)
class LeagueRequest:
    """The options of one call of `headwise league`."""

    folders: tuple[Path, ...] = ()
    plan: bool = False
    run: bool = False
    budget: str | None = None
    worlds: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    # the user's own folders with entries/ and worlds/, in addition to those of installed packages
    sources: tuple[Path, ...] = ()
    trials: int = 6
    seeds: int = 8
    again: bool = False
    # how many of the highest methods, besides the highest control, are finally run on fresh seeds
    fresh: int = 0
    # how many of the highest methods are finally run in pairs, and each with the highest control
    pairs: int = 0
    # measure the time of a step of every entry relative to the plain model's
    time_steps: bool = False
    jobs: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    slurm: tuple[str, ...] = ()
    device: str = "cpu"
    data: Path | None = None
    out: Path = OUT
    # print one JSON object on standard output, and all else on standard error
    as_json: bool = False


def run(request: LeagueRequest) -> None:
    """Execute a request; exit with 130 or 143 if stopped. Raises StudyError for errors that the user can correct."""
    follows_up = request.fresh or request.pairs
    if request.folders and (request.plan or (request.run and not follows_up)):
        raise StudyError(
            "Worlds that are given are only read, while --plan and --run work on --out. Give one or the other, or "
            "--run with the worlds and --fresh 3 or --pairs 5, which run the highest of them on fresh seeds or in "
            "pairs."
        )
    if request.plan and request.run:
        raise StudyError("--plan only shows what --run would do. Give one of them.")
    files.check_sources(request.sources)
    if request.folders and not request.run and (request.worlds or request.entries):
        raise StudyError("--worlds and --entries choose runs, and worlds that are given are only read. Leave them out.")
    if request.budget is not None and not request.run:
        raise StudyError("--budget needs --run: without it nothing is trained.")
    if follows_up and not request.run:
        raise StudyError("--fresh and --pairs need --run: without it nothing is trained.")
    if request.time_steps and (request.folders or request.plan or request.run):
        raise StudyError("--time measures the entries in --out. Give it alone, after --run.")
    if request.plan:
        if request.as_json:
            raise StudyError("--json prints the verdicts, and --plan runs nothing. Leave one of them out.")
        # the engine is only a placeholder: planning submits nothing
        cells = cells_of(request, HereEngine(), PlainLines())
        print("\n".join(plan_lines(cells, request.jobs or usable_cores())))
        return
    with json_alone(request.as_json) as show:
        if request.time_steps:
            show(_time_steps(request))
        elif request.run:
            show(_work(request))
        else:
            show(write_page(request.folders or tuple(_readable(request.out)), request.out))


def named(texts: Sequence[str]) -> tuple[str, ...]:
    """Return names that were given separately or separated by commas, each once."""
    return tuple(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def cells_of(
    request: LeagueRequest, engine: Engine, listener: Listener, records: Mapping[str, LeagueRecord] | None = None
) -> list[Cell]:
    """Return the cells of the requested entries and worlds, always including the plain model.

    An entry that names its worlds has no cell in any other. `records` has the searches of published worlds by name.

    Raises:
        StudyError: for an unknown name, an invalid file of an entry or world, and a folder with other content.
    """
    folders = [*files.installed_folders(), *request.sources]
    all_entries = files.read_entries(folders)
    worlds = files.chosen(files.read_worlds(folders), request.worlds, "--worlds")
    requested = files.chosen(all_entries, request.entries, "--entries")
    entries = [entry for entry in all_entries.values() if entry.name in requested or entry.kind == "plain"]
    cells = []
    for world in worlds.values():
        place = Place(
            world,
            request.out / world.name,
            engine,
            listener,
            trials=request.trials,
            seeds=request.seeds,
            command=shlex.join(["headwise", *sys.argv[1:]]),
            data=request.data.resolve() if request.data else None,
            device=choose_device(request.device),
            record=(records or {}).get(world.name),
        )
        in_world = [entry for entry in entries if not entry.worlds or world.name in entry.worlds]
        cells += [Cell(entry, place, again=request.again) for entry in in_world]
    return cells


def write_page(
    folders: Sequence[Path], out: Path, follow_up_in: Path | None = None, complete: bool | None = None
) -> dict[str, Any]:
    """Read finished worlds, write page, tables and figures into `out`, print the aggregate, and return it."""
    from headwise_papers.league.json_answer import league_of
    from headwise_papers.league.page import contents_of, keep

    if not folders:
        raise StudyError(f"{out} contains no world of a league. Give folders, or run one: headwise league --run.")
    try:
        contents, lines = contents_of(folders, follow_up_in)
        page = keep(contents, out)
    except OSError as error:
        raise explain(error, out) from error
    print("\n".join(lines))
    print(f"\npage: {page}")
    return league_of(contents, page, lines, complete)


def _work(request: LeagueRequest) -> dict[str, Any]:
    deadline = None if request.budget is None else time.monotonic() + read_budget(request.budget)
    jobs = request.jobs or usable_cores()
    if request.engine not in ENGINES:
        raise StudyError(f"--engine {request.engine!r} is not known. Engines: {', '.join(ENGINES)}.")
    engine_request = Request(engine=request.engine, ray_address=request.ray_address, slurm=request.slurm, jobs=jobs)
    try:
        claim(request.out, (), shared=True)
    except OSError as error:
        raise explain(error, request.out) from error
    engine = start_engine(engine_request)
    try:
        with raise_on_stops(), choose_display() as display:
            cells = (_published_cells if request.folders else cells_of)(request, engine, display)
            for place in {cell.place.folder: cell.place for cell in cells}.values():
                try:
                    place.task.prepare(display.say)
                except OSError as error:
                    raise explain(error, request.data or Path.cwd(), "--data") from error
            ended = COMPLETE
            if not request.folders:
                ended = carry_out(cells, engine, display, jobs=jobs, deadline=deadline)
            for follow_up in (_fresh_cells, _pair_cells):
                if ended == COMPLETE and (further := follow_up(request, cells, display)):
                    ended = carry_out(further, engine, display, jobs=jobs, deadline=deadline)
            display.say(f"{ended}. The same command resumes the league.")
    except KeyboardInterrupt as stop:
        print(stopped_line(request.out), file=sys.stderr)
        sys.exit(stop_code(stop))
    finally:
        engine.close()
    ready = request.folders or _ready(request.out)
    if not ready:
        from headwise_papers.league.json_answer import league_of

        return league_of({}, None, [], ended == COMPLETE)
    return write_page(ready, request.out, request.out if request.folders else None, ended == COMPLETE)


def _published_cells(request: LeagueRequest, engine: Engine, display: Listener) -> list[Cell]:
    """Return the cells of the given worlds, with the searches that their folders or files contain."""
    records = {world.record.world: world.record for world in read_worlds(request.folders)}
    requested = request.worlds or tuple(records)
    missing = [name for name in requested if name not in records]
    if missing:
        raise StudyError(f"--worlds {missing[0]}: none of the given folders and files contains this world.")
    return cells_of(dataclasses.replace(request, worlds=requested), engine, display, records)


def _fresh_cells(request: LeagueRequest, cells: Sequence[Cell], display: Listener) -> list[Cell]:
    """Return the cells on fresh seeds, if they are requested."""
    if not request.fresh:
        return []
    read = read_worlds(request.folders or _ready(request.out))
    names = recommended(read, request.fresh)
    display.say(f"on fresh seeds: {', '.join(sorted({name for some in names.values() for name in some}))}")
    after = {world.record.world: max(world.study.seeds) + 1 for world in read}
    return on_fresh_seeds(cells, names, after)


def _pair_cells(request: LeagueRequest, cells: Sequence[Cell], display: Listener) -> list[Cell]:
    """Return the cells of pairs, if they are requested."""
    if not request.pairs:
        return []
    all_entries = files.read_entries([*files.installed_folders(), *request.sources])
    among = files.chosen(all_entries, request.entries, "--entries")
    pairs = pairs_of(read_worlds(request.folders or _ready(request.out)), among, request.pairs, display.say)
    display.say(f"pairs: {', '.join(dict.fromkeys(pair.name for some in pairs.values() for pair in some))}")
    return pair_cells(cells, pairs)


def _time_steps(request: LeagueRequest) -> dict[str, Any]:
    ready = {folder.name for folder in _ready(request.out)}
    if not ready:
        raise StudyError(f"{request.out} contains no world of a league. Run one: headwise league --run.")
    time_steps(
        [cell for cell in cells_of(request, HereEngine(), PlainLines()) if cell.place.folder.name in ready], print
    )
    return write_page(_ready(request.out), request.out)


def _readable(out: Path) -> list[Path]:
    """Return the worlds in a folder of which a page can be written; print why others are left out."""
    ready = _ready(out)
    for folder in _worlds_in(out):
        if folder not in ready:
            print(f"{folder} is left out: {why_not_ready(folder)}", file=sys.stderr)
    return ready


def _ready(out: Path) -> list[Path]:
    return [folder for folder in _worlds_in(out) if is_ready(folder)]


def _worlds_in(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/league.json"))
