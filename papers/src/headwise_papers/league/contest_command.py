"""The command of the league: runs what is missing of its small worlds, one after another; stop it at any moment.

python -m headwise_papers.league.contest_command --out results/league --data DATA            run all that is missing
python -m headwise_papers.league.contest_command --out results/league --worlds short-pairs   some worlds alone
python -m headwise_papers.league.contest_command --out results/league --plan                 what is missing, in minutes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from headwise.files.errors import suggest
from headwise_papers.league.contest import Contest, carry_out
from headwise_papers.league.contest_files import Contestant, SmallWorld, read_contestants, read_small_worlds
from headwise_papers.league.files import installed_folders
from headwise_papers.league.rate_search import FINAL
from headwise_verdict.files.errors import StudyError

_HOLDS = {True: "holds", False: "does not hold"}


def folders_with(sources: Sequence[Path]) -> list[Path]:
    """Return the folders with contestants and worlds: those of installed packages, and the user's own."""
    return [*installed_folders(), *sources]


def picked(worlds: dict[str, SmallWorld], names: str) -> dict[str, SmallWorld]:
    """Return the worlds of a list of names separated by commas, in its order; all for ""; raise for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(worlds)
    for name in wanted:
        if name not in worlds:
            raise StudyError(f"there is no world {name!r}.{suggest(name, list(worlds))} Known: {', '.join(worlds)}.")
    return {name: worlds[name] for name in wanted}


def plan_line(contest: Contest) -> str:
    """Return what is missing of a world, as a line: at most, since a premise that fails ends a world."""
    done, most = len(contest.ledger.runs), most_runs(contest.contestants)
    minutes = max(0, most - done) * contest.world.seconds / 60
    left = "" if contest.state in ("complete", "failed") else f", about {minutes:.0f} core-minutes left"
    return f"{contest.world.name}: {contest.state}, {done} runs{left}"


def most_runs(contestants: Mapping[str, Contestant]) -> int:
    """Return about how many runs a world needs: searches, final runs, and those of the plain model alone."""
    searches = sum(
        2 * (13 if one.reparametrizes else 9) + 2 * (len(one.arms) - 1) + len(FINAL) for one in contestants.values()
    )
    return searches + 12 + 2 * 17 + 5 * len(FINAL)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or plan the missing runs of worlds, one after another, until the minutes are spent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / "league")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--worlds", default="", help="names, separated by commas; all")
    parser.add_argument("--source", type=Path, action="append", default=[], help="your folder with arms, small_worlds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--premises", action="store_true", help="stop each world once its premises are known")
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args(arguments)
    folders, end = folders_with(options.source), time.monotonic() + 60 * options.minutes
    try:
        contestants, worlds = read_contestants(folders), picked(read_small_worlds(folders), options.worlds)
    except StudyError as error:
        parser.error(str(error))

    def tell(text: str) -> None:
        print(time.strftime("%H:%M:%S"), text, flush=True)

    data = options.data.resolve() if options.data else None
    for name, world in worlds.items():
        try:
            if options.plan:
                print(plan_line(Contest.kept(world, contestants, options.out / name)))
                continue
            world.built(data).prepare(tell)
            contest = Contest.of(world, contestants, options.out / name, data)
            is_over = partial(_is_over, contest, end, only_premises=options.premises)
            carry_out(contest, data, tell, is_over, options.device)
            for one in contest.premises():
                tell(f"{name}: {one.name}: {one.says}: {one.figure:.3f}, {one.level:.3f}, {_HOLDS[one.holds]}")
        except StudyError as error:
            tell(f"{name}: {error}")


def _is_over(contest: Contest, end: float, *, only_premises: bool) -> bool:
    return time.monotonic() > end or (only_premises and bool(contest.premises()))


if __name__ == "__main__":
    main()
