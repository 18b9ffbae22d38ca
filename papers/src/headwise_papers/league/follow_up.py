"""The follow-up of a league: its highest entries on fresh seeds, and pairs of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from headwise_papers.league.cell import Cell, Place
from headwise_papers.league.files import RATE, Axis, Choices, Entry
from headwise_papers.league.gains import Worlds
from headwise_papers.league.reading import WorldRead
from headwise_papers.league.tables import kinds_of, ordered
from headwise_papers.league.world_folder import FRESH, PAIRS
from headwise_verdict.files.errors import StudyError


def winners(read: Sequence[WorldRead], count: int, among: Collection[str] = ()) -> tuple[list[str], str]:
    """Return the `count` methods with the highest gain over all worlds, and the highest control, "" if none has a gain.

    Only entries `among` these count, if any are given.

    Raises:
        StudyError: if no method has a gain yet.
    """
    aggregates, kinds = Worlds([world.figures for world in read]).aggregates(), kinds_of(read)
    names = [name for name in ordered(aggregates) if aggregates[name].gain.value is not None]
    names = [name for name in names if not among or name in among]
    methods = [name for name in names if kinds[name] == "method"]
    if not methods:
        raise StudyError("no method has a gain yet. Run the league first: headwise league --run.")
    return methods[:count], next((name for name in names if kinds[name] == "control"), "")


def first_in(world: WorldRead) -> list[str]:
    """Return what a world alone recommends, of the entries that are better than its plain model: the highest method,
    the highest method that is better than the best control too, and the highest control; each may be missing.

    The best control by validation data is always among them, so that the comparison with it can be repeated.
    """
    gains = Worlds([world.figures]).mean_gains().get(world.record.world, {})
    better = [name for name, cell in world.cells.items() if cell.verdict == "better"]
    better.sort(key=lambda name: -(gains.get(name) or 0.0))
    methods = [name for name in better if world.cells[name].record.kind == "method"]
    above = [name for name in methods if (one := world.cells[name].to_control) and one.verdict == "better"]
    controls = [name for name in better if world.cells[name].record.kind == "control"]
    return list(dict.fromkeys([*methods[:1], *above[:1], *controls[:1], *filter(None, [world.control])]))


def recommended(read: Sequence[WorldRead], count: int) -> dict[str, list[str]]:
    """Return what each world runs on fresh seeds: the `winners` over all worlds, and what it recommends itself.

    Raises:
        StudyError: if no method has a gain yet.
    """
    methods, control = winners(read, count)
    everywhere = [*methods, *filter(None, [control])]
    return {world.record.world: list(dict.fromkeys([*everywhere, *first_in(world)])) for world in read}


def on_fresh_seeds(
    cells: Sequence[Cell], names: Mapping[str, Collection[str]], first_seeds: Mapping[str, int]
) -> list[Cell]:
    """Return the cells of these entries of each world and of its plain model, at their chosen settings, on fresh seeds
    from the world's first one on.

    An entry that was refused or failed in a world has no cell there.
    """
    places: dict[Path, Place] = {}
    fresh_cells = []
    for cell in cells:
        world = cell.place.world.name
        if cell.choice is None or (cell.entry.name not in names.get(world, ()) and cell.record.kind != "plain"):
            continue
        base = cell.place
        if base.folder not in places:
            places[base.folder] = base.beside(FRESH, first_seed=first_seeds[world])
        place = places[base.folder]
        place.record = place.record.model_copy(
            update={"entries": {**place.record.entries, cell.entry.name: cell.record}}
        )
        fresh_cells.append(Cell(cell.entry, place))
    return fresh_cells


def pairs_of(
    read: Sequence[WorldRead], entries: Mapping[str, Entry], count: int, say: Callable[[str], None]
) -> dict[str, list[Entry]]:
    """Return each world's pairs: the `count` highest of these methods two by two, and each with the best control.

    The best control is the world's own, chosen on validation data; it is left out where it is not better than the plain
    model. `say` is told why two entries cannot be paired.

    Raises:
        StudyError: if none of these methods has a gain yet.
    """
    methods, _ = winners(read, count, entries)
    pairs: dict[str, list[Entry]] = {}
    refused: dict[str, None] = {}
    for world in read:
        control = world.control if world.control and world.cells[world.control].verdict == "better" else ""
        in_world = [name for name in methods if name in world.record.entries]
        requested = [*combinations(in_world, 2), *((name, control) for name in in_world if control in entries)]
        for one, other in requested:
            try:
                pair = pair_of(entries[one], entries[other])
            except StudyError as error:
                refused[str(error)] = None
            else:
                pairs.setdefault(world.record.world, []).append(pair)
    for reason in refused:
        say(reason)
    return pairs


def pair_cells(cells: Sequence[Cell], pairs: Mapping[str, Sequence[Entry]]) -> list[Cell]:
    """Return the cells of each world's pairs, and of its plain model, in a subfolder, on the world's own seeds.

    Pairs are a separate family: they were chosen by the results, and must not change the verdicts of the entries.
    The plain model keeps its chosen setting and is trained again, so that pairs have it from the same machine.
    """
    added = []
    for cell in cells:
        if cell.record.kind != "plain" or cell.choice is None:
            continue
        base = cell.place
        place = base.beside(PAIRS, first_seed=base.first_seed)
        place.record = place.record.model_copy(
            update={"entries": {**place.record.entries, cell.entry.name: cell.record}}
        )
        added.append(Cell(cell.entry, place))
        for pair in pairs.get(base.world.name, ()):
            one = Cell(pair, place)
            parts = {part: base.record.entries[part].digest for part in pair.name.split("+")}
            if one.record.parts != parts:
                one.note(parts=parts)
            added.append(one)
    return added


def pair_of(one: Entry, other: Entry) -> Entry:
    """Return the entry that combines two: joined arms, each strength in its own range, the learning rate in the union
    of both ranges.

    Raises:
        StudyError: if both search the same setting, an arm says where it acts, or they have no world in common.
    """
    methods, changes, search = [], [], {}
    for entry in (one, other):
        head, _, changed = (part.strip() for part in entry.arm.partition("|"))
        if "@" in entry.arm:
            raise StudyError(
                f"{entry.name} names where it acts, so it is not paired automatically. Write its pairs as separate "
                "entries."
            )
        methods += [] if head == "baseline" else [head]
        changes += [changed] if changed else []
        for name, axis in entry.search.items():
            if name != RATE:
                key = name if "." in name or head == "baseline" else f"{head.partition('(')[0]}.{name}"
                if key in search:
                    raise StudyError(f"{one.name} and {other.name} both search {key}, so they cannot be paired.")
                search[key] = axis
    arm = " | ".join(filter(None, (" + ".join(methods) or "baseline", ", ".join(changes))))
    rates = [entry.search[RATE] for entry in (one, other)]
    assert not any(isinstance(rate, Choices) for rate in rates), "a learning rate is searched in a range"
    covered: Axis = (min(float(rate[0]) for rate in rates), max(float(rate[1]) for rate in rates))  # type: ignore[index]
    worlds = tuple(name for name in one.worlds or other.worlds if not other.worlds or name in other.worlds)
    if not worlds and (one.worlds or other.worlds):
        raise StudyError(f"{one.name} and {other.name} have no world in common, so they cannot be paired.")
    return Entry(
        name=f"{one.name}+{other.name}",
        arm=arm,
        kind="pair",
        reason=f"Do the gains of {one.name} and {other.name} add up? Their own ranges.",
        search={RATE: covered, **search},
        worlds=worlds,
    )
