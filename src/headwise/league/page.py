"""Write the page of a league: entries × worlds, the aggregate with intervals, gain against cost, then every world; its
tables and figures beside it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.files.durable import write_bytes
from headwise.league.charts import pareto, undominated
from headwise.league.gains import LEVELS, RESAMPLES, Aggregate, Estimate, Worlds
from headwise.league.reading import Cell, WorldRead, read_worlds
from headwise.pages.charts import heat_map
from headwise.pages.formats import MINUS, unit_named
from headwise.pages.line_charts import lines
from headwise.pages.shell import Cell as Shown
from headwise.pages.shell import Column, Section, figure, join, page, prose, table
from headwise.reporting.export import svg
from headwise.results.analysis_record import Difference
from headwise.results.answer import count

GLYPHS = {
    "better": "▲",
    "worse": "▼",
    "equivalent": "=",
    "no evidence": "·",
    "undecided": "?",
    "failed": "×",
    "refused": "–",
    "missing": "",
    "searching": "",
}
MEANING = (
    "▲ better, ▼ worse, = equivalent within the world's margin, · no evidence, ? too few seeds for a verdict, × a run "
    "failed, – refused by the world's model; empty: not run yet."
)
# entries whose profile is drawn
PROFILES = 8


def write(folders: Sequence[Path], out: Path) -> tuple[Path, list[str]]:
    """Read worlds and write league.html, league.csv, aggregate.csv and the figures into `out`; give the page and lines
    for a screen.

    Raises:
        StudyError: for folders that hold no world, or worlds of different leagues.
    """
    read = read_worlds(folders)
    worlds = Worlds([world.figures for world in read])
    found = worlds.aggregates()
    drawn = {
        "gains": gains_chart(read, worlds, found),
        "cost": cost_chart(read, found),
        "profiles": profile_chart(found),
    }
    out.mkdir(parents=True, exist_ok=True)
    target = out / "league.html"
    write_bytes(target, league_page(read, worlds, found, drawn).encode())
    write_bytes(out / "league.csv", cells_csv(read, worlds).encode())
    write_bytes(out / "aggregate.csv", aggregate_csv(read, found).encode())
    for name, chart in drawn.items():
        if chart is not None:
            write_bytes(out / f"{name}.svg", svg(chart).encode())
    return target, _screen(read, worlds, found)


def league_page(
    read: Sequence[WorldRead], worlds: Worlds, found: dict[str, Aggregate], drawn: dict[str, dict[str, Any] | None]
) -> str:
    """Return the page as HTML."""
    sections = [
        Section(
            "Entries and worlds",
            join(*_warned(read, worlds), *_figure(drawn["gains"], "Gains by entry and world", MEANING)),
        ),
        Section("Over all worlds", join(_aggregate_table(read, found), prose([_words(read)], kind="note"))),
    ]
    if drawn["cost"] is not None:
        sections.append(
            Section(
                "Gain and cost",
                join(
                    *_figure(
                        drawn["cost"], "Gain against the time of a step", "Named are entries that none beats in both."
                    )
                ),
            )
        )
    if drawn["profiles"] is not None:
        caption = (
            f"Share of runs whose gain exceeds a level; the {PROFILES} entries with the highest gain, each world "
            "counting alike."
        )
        sections.append(Section("Profiles", join(*_figure(drawn["profiles"], "Profiles of gains", caption))))
    sections += _left_out(worlds)
    sections += [Section(world.record.title, _world_table(world, worlds), _world_words(world)) for world in read]
    return page(
        "The league",
        sections,
        eyebrow="headwise · league",
        question="Which method should one try, and what does it cost?",
        lead=_lead(read, found),
        facts=[
            ("worlds", len(read)),
            ("entries", len(found)),
            ("trials an entry", read[0].record.trials),
            ("seeds", len(read[0].study.seeds)),
        ],
    )


def gains_chart(read: Sequence[WorldRead], worlds: Worlds, found: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return the heat map of mean gains, entries in the order of their aggregate, a glyph of the verdict in each
    cell."""
    gains, order = worlds.mean_gains(), _ordered(found)
    rows: list[dict[str, Any]] = [
        {
            "entry": name,
            "world": world.record.title,
            "gain": gains.get(world.record.world, {}).get(name),
            "glyph": GLYPHS[world.cells[name].verdict],
            "verdict": world.cells[name].verdict,
        }
        for world in read
        for name in order
        if name in world.cells
    ]
    if not rows:
        return None
    limit = max((abs(row["gain"]) for row in rows if row["gain"] is not None), default=1.0)
    # one runaway must not make all others look alike
    limit = min(max(limit, 1.0), 5.0)
    return heat_map(
        rows,
        x="world",
        y="entry",
        value="gain",
        value_title="gain (spreads of the plain model)",
        domain=(-limit, limit),
        tooltip=("verdict",),
        diverging=True,
        y_order=order,
        mark="glyph",
        label_limit=190,
    )


def cost_chart(read: Sequence[WorldRead], found: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return gain over all worlds against the time of a step, its mean over worlds; None without both of any entry."""
    costs = _costs(read)
    points = {
        name: (costs[name], one.gain.value)
        for name, one in found.items()
        if name in costs and one.gain.value is not None
    }
    if not points:
        return None
    best, kinds = undominated(points), _kinds(read)
    return pareto(
        [
            {
                "name": name,
                "kind": kinds[name],
                "cost": cost,
                "gain": gain,
                "low": found[name].gain.low,
                "high": found[name].gain.high,
                "best": name in best,
                "words": f"{_estimate(found[name].gain)}, {cost:.2f} of the plain model's time",
            }
            for name, (cost, gain) in points.items()
        ]
    )


def profile_chart(found: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return the profiles of the entries with the highest gain."""
    best = _ordered(found)[:PROFILES]
    rows = [
        {"gain": level, "share of runs": point.value, "entry": name}
        for name in best
        for level, point in zip(LEVELS, found[name].profile)
        if point.value is not None
    ]
    return lines(rows, x="gain", y="share of runs", series="entry") if rows else None


def cells_csv(read: Sequence[WorldRead], worlds: Worlds) -> str:
    """Return every entry of every world in a row; what is missing is empty."""
    gains = worlds.mean_gains()
    head = (
        "world,entry,kind,arm,status,chosen,learning_rate,validation,second_validation,runs,diverged,outcome,"
        "difference,low,high,p,verdict,"
    )
    rows: list[list[Any]] = [
        (head + "against_control,control_low,control_high,control_verdict,gain,cost,why").split(",")
    ]
    for world in read:
        higher = world.outcome.higher_is_better is not False
        for name, cell in world.cells.items():
            one, plain, control = cell.record, cell.to_plain, cell.to_control
            values = sorted((trial.value for trial in one.tried if trial.value is not None), reverse=higher)
            rows.append(
                [world.record.world, name, one.kind, one.arm, one.status, one.chosen, one.rate]
                + [one.validation, values[1] if len(values) > 1 else None, cell.runs, cell.diverged, world.outcome.name]
                + _cells_of(plain, p=True)
                + _cells_of(control)
                + [gains.get(world.record.world, {}).get(name), cell.cost, one.why]
            )
    return _csv(rows)


def aggregate_csv(read: Sequence[WorldRead], found: dict[str, Aggregate]) -> str:
    """Return the aggregate of every entry in a row, each figure with its interval."""
    kinds, costs = _kinds(read), _costs(read)
    parts = ("gain", "improvement", "rank")
    rows: list[list[Any]] = [
        ["entry", "kind", "worlds", *(f"{p}{end}" for p in parts for end in ("", "_low", "_high")), "cost"]
    ]
    for name in _ordered(found):
        one = found[name]
        figures = [value for part in parts for value in _ends(getattr(one, part))]
        rows.append([name, kinds[name], one.worlds, *figures, costs.get(name)])
    return _csv(rows)


def _cells_of(found: Difference | None, *, p: bool = False) -> list[Any]:
    if found is None:
        return [None] * (5 if p else 4)
    return [found.mean, found.low, found.high, *([found.p_corrected] if p else []), found.verdict]


def _ends(found: Estimate) -> tuple[float | None, float | None, float | None]:
    return found.value, found.low, found.high


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows(
        [["" if value is None else value for value in row] for row in rows]
    )
    return stream.getvalue()


def _ordered(found: dict[str, Aggregate]) -> list[str]:
    return sorted(found, key=lambda name: (found[name].gain.value is None, -(found[name].gain.value or 0.0), name))


def _kinds(read: Sequence[WorldRead]) -> dict[str, str]:
    return {name: cell.record.kind for world in read for name, cell in world.cells.items()}


def _costs(read: Sequence[WorldRead]) -> dict[str, float]:
    """Return the mean over worlds of the time of a step, as a share of the plain model's."""
    known: dict[str, list[float]] = {}
    for world in read:
        for name, cell in world.cells.items():
            if cell.cost is not None:
                known.setdefault(name, []).append(cell.cost)
    return {name: sum(values) / len(values) for name, values in known.items()}


def _figure(chart: dict[str, Any] | None, title: str, caption: str) -> list[Any]:
    return [] if chart is None else [figure(chart, title=title, caption=caption)]


def _warned(read: Sequence[WorldRead], worlds: Worlds) -> list[Any]:
    told = [
        f"{name}: all runs of the plain model are equal, or fewer than two are finished, so that it sets no unit; it "
        "is in no aggregate."
        for name in worlds.left_out
    ]
    for world in read:
        missing = len(world.study.missing())
        if missing:
            told.append(
                f"{world.record.title}: {count(missing, 'final run')} missing; an entry's pairs are those that are "
                "there."
            )
    return [prose(told, kind="warning")] if told else []


def _lead(read: Sequence[WorldRead], found: dict[str, Aggregate]) -> str:
    """Name what is above the plain model by its interval; never a name without one."""
    kinds = _kinds(read)
    above = [name for name in _ordered(found) if (low := found[name].gain.low) is not None and low > 0]
    methods, controls = ([name for name in above if (kinds[name] == "control") is control] for control in (False, True))
    if not above:
        return f"Over {count(len(read), 'world')} no entry is shown to gain."
    parts = [
        f"{', '.join(f'{name} {_estimate(found[name].gain)}' for name in names[:3])}" for names in (methods, controls)
    ]
    said = [
        f"of the methods {parts[0]}" if methods else "none of the methods",
        f"of the controls {parts[1]}" if controls else "no control",
    ]
    return (
        f"Over {count(len(read), 'world')} these gain by their interval, highest first: {said[0]}; {said[1]}. The "
        "highest of many is too high: run a winner on fresh seeds before you name it."
    )


def _aggregate_table(read: Sequence[WorldRead], found: dict[str, Aggregate]) -> Any:
    kinds, costs = _kinds(read), _costs(read)
    columns = [Column("entry"), Column("kind"), Column("worlds", number=True)]
    columns += [
        Column("gain", unit="spreads", number=True),
        Column("better than plain", unit="share of pairs", number=True),
    ]
    columns += [Column("mean rank", number=True), Column("time of a step", unit="× plain", number=True)]
    rows = [
        [name, kinds[name], one.worlds, *map(_shown, (one.gain, one.improvement, one.rank)), costs.get(name)]
        for name in _ordered(found)
        for one in (found[name],)
    ]
    return table(columns, rows)


def _shown(found: Estimate) -> Shown:
    return Shown(None if found.value is None else _estimate(found), found.value)


def _estimate(found: Estimate) -> str:
    if found.value is None:
        return ""
    ends = "" if found.low is None or found.high is None else f" [{_number(found.low)}, {_number(found.high)}]"
    return f"{_number(found.value)}{ends}"


def _number(value: float) -> str:
    return f"{value:.2f}".replace("-", MINUS)


def _words(read: Sequence[WorldRead]) -> str:
    return (
        "Gain: interquartile mean, over all runs of all worlds, of the paired difference to the plain model in units "
        "of its standard deviation between seeds (a fixed unit of each world). Better than plain: share of pairs of "
        f"runs, mean over worlds. Rank: of the mean within a world, 1 is best. Intervals: 95 %, {RESAMPLES:,} "
        "resamples of the seeds within each world, percentiles; they say nothing of other worlds, and are not "
        "corrected over entries. An entry that was refused or failed somewhere has fewer worlds, and no figure there."
    )


def _left_out(worlds: Worlds) -> list[Section]:
    found = worlds.left_out_each()
    if not found:
        return []
    rows = [[name, _shown(one)] for name, one in found.items()]
    words = (
        "How well the other worlds foretell the order of entries in the one left out: Spearman's rank correlation. "
        "Noise of the seeds lowers it, and its interval lies rather too low."
    )
    return [
        Section("One world left out", table([Column("left out"), Column("rank correlation", number=True)], rows), words)
    ]


def _world_words(world: WorldRead) -> str:
    control = (
        f"The best control on validation data is {world.control}."
        if world.control
        else "No control has been searched here."
    )
    return (
        f"The plain model suffers from {world.record.symptom}. Outcome: {world.outcome.label}. {control} All entries "
        "are one family of tests."
    )


def _world_table(world: WorldRead, worlds: Worlds) -> Any:
    gains = worlds.mean_gains().get(world.record.world, {})
    unit = unit_named(world.outcome.unit)
    others = list(dict.fromkeys(name for cell in world.cells.values() for name in cell.others))
    columns = [Column("entry"), Column("against plain", unit=unit.difference, number=True), Column("verdict")]
    columns += [Column("against the best control", unit=unit.difference, number=True), Column("verdict there")]
    columns += [
        Column("gain", unit="spreads", number=True),
        Column("diverged", number=True),
        Column("chosen", wide=True),
    ]
    columns += [Column("learning rate", number=True), Column("time of a step", unit="× plain", number=True)]
    columns += [Column(name.rpartition("/")[2].replace("_", " "), number=True) for name in others]
    rows: list[list[Any]] = []
    marked = []
    ordered = sorted(
        world.cells, key=lambda name: (world.cells[name].record.kind != "plain", -(gains.get(name) or -1e9), name)
    )
    for name in ordered:
        cell = world.cells[name]
        if cell.record.kind == "plain":
            marked.append(len(rows))
        rows.append(
            [
                name,
                _difference(cell.to_plain, world),
                Shown(
                    cell.verdict,
                    tone=cell.verdict if cell.verdict in ("better", "worse") else "",
                    small=cell.record.why,
                ),
                _difference(cell.to_control, world),
                _against_control(cell, name, world),
                gains.get(name),
                cell.diverged,
                cell.record.chosen or cell.record.arm,
                cell.record.rate,
                cell.cost,
                *(cell.others.get(other) for other in others),
            ]
        )
    return table(columns, rows, marked=marked)


def _against_control(cell: Cell, name: str, world: WorldRead) -> str:
    if name == world.control:
        return "the best control"
    return cell.to_control.verdict if cell.to_control is not None and cell.to_control.n else "missing"


def _difference(found: Difference | None, world: WorldRead) -> Shown:
    unit = unit_named(world.outcome.unit)
    if found is None or found.mean is None:
        return Shown("")
    ends = unit.interval(found.low, found.high, signed=True)
    return Shown(f"{unit.number(found.mean, signed=True)} {ends}".strip(), found.mean)


def _screen(read: Sequence[WorldRead], worlds: Worlds, found: dict[str, Aggregate]) -> list[str]:
    """Return the aggregate in lines of a screen."""
    width = max(map(len, found), default=5)
    lines_ = [_lead(read, found), "", f"{'entry':<{width}}  worlds  gain in spreads of the plain model, 95 % interval"]
    lines_ += [
        f"{name:<{width}}  {found[name].worlds:>6}  {_estimate(found[name].gain) or 'no unit'}"
        for name in _ordered(found)
    ]
    return [*lines_, *(f"{name} sets no unit and is in no aggregate" for name in worlds.left_out)]
