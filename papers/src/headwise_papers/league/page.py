"""The page of a league (entries × worlds, aggregates, gain against cost, every world), its tables and its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise_papers.league import tables
from headwise_papers.league.charts import AGAINST, forest, pareto, undominated
from headwise_papers.league.follow_up_page import (
    estimate,
    fresh_section,
    fresh_worlds,
    pair_rows,
    pair_section,
    pair_worlds,
    search_section,
    shown,
)
from headwise_papers.league.gains import LEVELS, RESAMPLES, Aggregate, Estimate, Worlds
from headwise_papers.league.reading import Cell, WorldRead, current_part, read_worlds
from headwise_papers.league.tables import PairRow, costs_of, kinds_of, ordered, worlds_of
from headwise_verdict.files.durable import write_bytes
from headwise_verdict.files.ownership import claim
from headwise_verdict.pages.charts import heat_map
from headwise_verdict.pages.formats import unit_named
from headwise_verdict.pages.line_charts import lines
from headwise_verdict.pages.shell import Cell as Shown
from headwise_verdict.pages.shell import Column, Section, figure, join, page, prose, table
from headwise_verdict.reporting.export import svg
from headwise_verdict.results.analysis_record import Difference
from headwise_verdict.results.answer import count

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
# number of entries whose profiles are drawn
PROFILES = 8


def write(paths: Sequence[Path], out: Path, follow_up_in: Path | None = None) -> tuple[Path, list[str]]:
    """Write league.html, tables, figures and a file of each world into `out`; `paths` are folders or files of worlds.

    Return the path of the page, and lines for the terminal. Runs on fresh seeds and pairs in the folder `follow_up_in`
    replace those in the worlds' own folders or files.

    Raises:
        StudyError: for paths without a world, or worlds of different leagues.
    """
    contents, lines_ = contents_of(paths, follow_up_in)
    return keep(contents, out), lines_


def keep(contents: Mapping[str, str], out: Path) -> Path:
    """Write the files of a league, by name, into `out`, and return the path of the page."""
    claim(out, contents, shared=True)
    for name, content in contents.items():
        write_bytes(out / name, content.encode())
    return out / "league.html"


def contents_of(paths: Sequence[Path], follow_up_in: Path | None = None) -> tuple[dict[str, str], list[str]]:
    """Return the content of each file that `write` writes, by name, and lines for the terminal."""
    read = read_worlds(paths, follow_up_in)
    worlds, fresh = Worlds([world.figures for world in read]), fresh_worlds(read)
    over_fresh = Worlds([world.figures for world in fresh])
    aggregates = worlds.aggregates()
    # a gain over fewer worlds than in the league is another figure: fresh_cells.csv has it world by world
    fresh_aggregates = {
        name: one for name, one in over_fresh.aggregates().items() if one.worlds == aggregates[name].worlds
    }
    of_pairs, left_out = pair_worlds(read), worlds.left_out_each()
    pairs, without = pair_rows(of_pairs), worlds.gains_without_each()
    charts: dict[str, dict[str, Any] | None] = {
        "gains": gains_chart(read, worlds, aggregates),
        "cost": cost_chart(read, aggregates),
        "profiles": profile_chart(aggregates),
        **{f"forest-{world.record.world}": forest_chart(world) for world in read},
    }
    contents = {
        "league.html": league_page(read, worlds, aggregates, fresh_aggregates, pairs, left_out, without, charts),
        "league.csv": tables.cells_csv(read, worlds),
        "runs.csv": tables.runs_csv(read),
        "trials.csv": tables.trials_csv(read),
        "aggregate.csv": tables.aggregate_csv(read, aggregates),
        "left_out.csv": tables.left_out_csv(left_out),
        "without.csv": tables.without_csv(without),
    }
    if fresh:
        contents |= {
            "fresh_cells.csv": tables.cells_csv(fresh, over_fresh),
            "fresh_runs.csv": tables.runs_csv(fresh),
        }
    if fresh_aggregates:
        contents["fresh.csv"] = tables.fresh_csv(aggregates, fresh_aggregates)
    if of_pairs:
        contents |= {
            "pairs.csv": tables.pairs_csv(pairs),
            "pair_cells.csv": tables.cells_csv(of_pairs, Worlds([world.figures for world in of_pairs])),
            "pair_runs.csv": tables.runs_csv(of_pairs),
        }
    contents |= {f"{name}.svg": svg(chart) for name, chart in charts.items() if chart is not None}
    contents |= {f"{world.record.world}.json": world.file().model_dump_json() + "\n" for world in read}
    return contents, _terminal_lines(read, worlds, aggregates, fresh_aggregates)


def league_page(
    read: Sequence[WorldRead],
    worlds: Worlds,
    aggregates: dict[str, Aggregate],
    fresh_aggregates: dict[str, Aggregate],
    pairs: Sequence[PairRow],
    left_out: dict[str, Estimate],
    without: dict[str, dict[str, float | None]],
    charts: dict[str, dict[str, Any] | None],
) -> str:
    """Return the page as HTML."""
    sections = [
        Section(
            "Entries and worlds",
            join(*_warnings(read, worlds), *_figure(charts["gains"], "Gains by entry and world", MEANING)),
        ),
        Section("Over all worlds", join(_aggregate_table(read, aggregates), prose([_words(read)], kind="note"))),
        *fresh_section(aggregates, fresh_aggregates, kinds_of(read)),
    ]
    if charts["cost"] is not None:
        sections.append(
            Section(
                "Gain and cost",
                join(
                    *_figure(
                        charts["cost"], "Gain against the time of a step", "Named are entries that none beats in both."
                    )
                ),
            )
        )
    if charts["profiles"] is not None:
        caption = (
            f"Share of runs whose gain exceeds a level; the {PROFILES} entries with the highest gain, each world "
            "counting alike."
        )
        sections.append(Section("Profiles", join(*_figure(charts["profiles"], "Profiles of gains", caption))))
    sections += [
        *pair_section(pairs),
        *_left_out(left_out, without, aggregates),
        *search_section(read),
    ]
    for world in read:
        caption = "Difference and 95 % interval, corrected over the entries of this world."
        plot = _figure(charts[f"forest-{world.record.world}"], f"{world.record.title}: all entries", caption)
        sections.append(Section(world.record.title, join(*plot, _world_table(world, worlds)), _world_words(world)))
    return page(
        "The league",
        sections,
        eyebrow="headwise · league",
        question="Which method should one try, and what does it cost?",
        lead=_lead(read, aggregates, fresh_aggregates),
        facts=[
            ("worlds", len(read)),
            ("entries", len(aggregates)),
            ("trials an entry", read[0].record.trials),
            ("seeds", len(read[0].study.seeds)),
        ],
    )


def gains_chart(read: Sequence[WorldRead], worlds: Worlds, aggregates: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return the heat map of mean gains, with a glyph of the verdict in each cell; entries ordered by aggregate."""
    gains, order = worlds.mean_gains(), ordered(aggregates)
    rows: list[dict[str, Any]] = [
        {
            "entry": name,
            # the titles would hide each other's labels
            "world": world.record.world,
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


def cost_chart(read: Sequence[WorldRead], aggregates: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return the chart of gain over all worlds against the mean time of a step; None if no entry has both."""
    costs = costs_of(read)
    points = {
        name: (costs[name], one.gain.value)
        for name, one in aggregates.items()
        if name in costs and one.gain.value is not None
    }
    if not points:
        return None
    best, kinds = undominated(points), kinds_of(read)
    return pareto(
        [
            {
                "name": name,
                "kind": kinds[name],
                "cost": cost,
                "gain": gain,
                "low": aggregates[name].gain.low,
                "high": aggregates[name].gain.high,
                "best": name in best,
                "words": f"{estimate(aggregates[name].gain)}, {cost:.2f} of the plain model's time",
            }
            for name, (cost, gain) in points.items()
        ]
    )


def forest_chart(world: WorldRead) -> dict[str, Any] | None:
    """Return the forest plot of a world's entries, the best first; None without a difference."""
    unit = unit_named(world.outcome.unit)
    rows = []
    for name, cell in world.cells.items():
        for against, difference in zip(AGAINST, (cell.to_plain, cell.to_control)):
            if difference is None or difference.mean is None or not difference.n:
                continue
            ends = {end: getattr(difference, end) for end in ("mean", "low", "high")}
            shown_ends = {end: None if value is None else value * unit.factor for end, value in ends.items()}
            words = _difference(difference, world).text
            rows.append({"entry": name, "against": against, "verdict": difference.verdict, "words": words} | shown_ends)
    if not rows:
        return None
    higher = world.outcome.higher_is_better is not False
    own = {row["entry"]: row["mean"] for row in rows if row["against"] == AGAINST[0]}
    order = sorted(own, key=lambda name: -own[name] if higher else own[name])
    return forest(
        rows,
        title=f"difference in {world.outcome.label} ({unit.difference})"
        if unit.difference
        else f"difference in {world.outcome.label}",
        order=order,
    )


def profile_chart(aggregates: dict[str, Aggregate]) -> dict[str, Any] | None:
    """Return the profiles of the entries with the highest gain."""
    best = ordered(aggregates)[:PROFILES]
    rows = [
        {"gain": level, "share of runs": point.value, "entry": name}
        for name in best
        for level, point in zip(LEVELS, aggregates[name].profile)
        if point.value is not None
    ]
    return lines(rows, x="gain", y="share of runs", series="entry") if rows else None


def _figure(chart: dict[str, Any] | None, title: str, caption: str) -> list[Any]:
    return [] if chart is None else [figure(chart, title=title, caption=caption)]


def _warnings(read: Sequence[WorldRead], worlds: Worlds) -> list[Any]:
    warnings = [
        f"{name}: all runs of the plain model are equal, or fewer than two are finished, so that it sets no unit; it "
        "is in no aggregate."
        for name in worlds.left_out
    ]
    for world in read:
        environments = [(one.versions or {}, one.hardware or {}) for one in world.study.study.environments]
        if any(one != environments[0] for one in environments):
            warnings.append(
                f"{world.record.title}: its runs are from several machines or versions of libraries, so a difference "
                "may be theirs (headwise report on its folder lists them)."
            )
        for what, part in (("runs on fresh seeds", world.contents.fresh), ("pairs", world.contents.pairs)):
            _, replaced = current_part(world.contents, part)
            if replaced:
                warnings.append(
                    f"{world.record.title}: the {what} of {', '.join(replaced)} are of an earlier search and are left "
                    "out. Run them again."
                )
        missing = len(world.study.missing())
        if missing:
            warnings.append(
                f"{world.record.title}: {count(missing, 'final run')} missing; an entry's pairs are those that are "
                "there."
            )
    return [prose(warnings, kind="warning")] if warnings else []


def _lead(read: Sequence[WorldRead], aggregates: dict[str, Aggregate], fresh_aggregates: dict[str, Aggregate]) -> str:
    """Return the lead sentence on the entries whose interval is above 0, on fresh seeds if there are any."""
    kinds, judged = kinds_of(read), fresh_aggregates or aggregates
    above = [name for name in ordered(judged) if (low := judged[name].gain.low) is not None and low > 0]
    methods, controls = ([name for name in above if (kinds[name] == "control") is control] for control in (False, True))
    start = f"Over {count(len(read), 'world')}" + (
        ", on seeds that no search and no ranking saw," if fresh_aggregates else ""
    )
    if not above:
        return f"{start} no entry is shown to gain."
    parts = [
        f"{', '.join(f'{name} {estimate(judged[name].gain)}' for name in names[:3])}" for names in (methods, controls)
    ]
    clauses = [
        f"of the methods {parts[0]}" if methods else "none of the methods",
        f"of the controls {parts[1]}" if controls else "no control",
    ]
    warning = (
        "" if fresh_aggregates else " The highest of many is too high: run the winners on fresh seeds (--fresh 3)."
    )
    return f"{start} these gain by their interval, highest first: {clauses[0]}; {clauses[1]}.{warning}"


def _aggregate_table(read: Sequence[WorldRead], aggregates: dict[str, Aggregate]) -> Any:
    kinds, costs = kinds_of(read), costs_of(read)
    columns = [Column("entry"), Column("kind"), Column("worlds", number=True)]
    columns += [
        Column("gain", unit="spreads", number=True),
        Column("better than plain", unit="share of pairs", number=True),
    ]
    columns += [Column(f"{verdict} in", unit="worlds", number=True) for verdict in ("better", "worse")]
    columns += [Column("mean rank", number=True), Column("time of a step", unit="× plain", number=True)]
    rows = []
    for name in ordered(aggregates):
        one = aggregates[name]
        counts = [len(worlds_of(read, name, verdict)) for verdict in ("better", "worse")]
        rows.append([name, kinds[name], one.worlds, shown(one.gain), shown(one.improvement), *counts, shown(one.rank)])
        rows[-1].append(costs.get(name))
    return table(columns, rows)


def _words(read: Sequence[WorldRead]) -> str:
    return (
        "Gain: interquartile mean, over all runs of all worlds, of the paired difference to the plain model in units "
        "of its standard deviation between seeds (a fixed unit of each world, fresh seeds included). The mean leaves "
        "out the lowest and the highest quarter of the runs, so an entry may fail in one whole world without its gain "
        "showing it: look at the number of worlds in which it is worse. Better than plain: share of pairs of "
        f"runs, mean over worlds. Rank: of the mean within a world, 1 is best. Intervals: 95 %, {RESAMPLES:,} "
        "resamples of the seeds within each world, percentiles; they do not cover other worlds, and are not "
        "corrected over entries. An entry that was refused or failed somewhere has fewer worlds, and no figure there."
    )


def _left_out(
    estimates: dict[str, Estimate], without: dict[str, dict[str, float | None]], aggregates: dict[str, Aggregate]
) -> list[Section]:
    if not estimates:
        return []
    rows = [[name, shown(one)] for name, one in estimates.items()]
    words = (
        "How well the other worlds predict the order of entries in the one left out: Spearman's rank correlation, "
        "which noise of the seeds pulls towards 0. Below it, the gain of the highest entries without each world: does "
        "their order depend on one?"
    )
    highest = [
        [
            name,
            shown(Estimate(aggregates[name].gain.value)),
            *(shown(Estimate(by_name.get(name))) for by_name in without.values()),
        ]
        for name in ordered(aggregates)[:PROFILES]
    ]
    columns = [Column("entry"), Column("gain", unit="spreads", number=True)]
    columns += [Column(f"without {world}", number=True) for world in without]
    correlations = table([Column("left out"), Column("rank correlation", number=True)], rows)
    return [Section("One world left out", join(correlations, table(columns, highest)), words)]


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
    columns += [Column(_words_of(name), number=True) for name in others]
    rows: list[list[Any]] = []
    marked = []
    in_order = sorted(
        world.cells, key=lambda name: (world.cells[name].record.kind != "plain", -(gains.get(name) or -1e9), name)
    )
    for name in in_order:
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


def _words_of(name: str) -> str:
    """Return the heading of an outcome's column: "loss", "accuracy, 8-bit weights", "head redundancy"."""
    first, _, rest = name.partition("/")
    metric = rest.removesuffix("/mean").replace("_", " ")
    return f"{metric}, 8-bit weights" if first == "int8" else metric


def _against_control(cell: Cell, name: str, world: WorldRead) -> str:
    if name == world.control:
        return "the best control"
    return cell.to_control.verdict if cell.to_control is not None and cell.to_control.n else "missing"


def _difference(difference: Difference | None, world: WorldRead) -> Shown:
    unit = unit_named(world.outcome.unit)
    if difference is None or difference.mean is None:
        return Shown("")
    ends = unit.interval(difference.low, difference.high, signed=True)
    return Shown(f"{unit.number(difference.mean, signed=True)} {ends}".strip(), difference.mean)


def _terminal_lines(
    read: Sequence[WorldRead], worlds: Worlds, aggregates: dict[str, Aggregate], fresh_aggregates: dict[str, Aggregate]
) -> list[str]:
    """Return the aggregate as lines for the terminal."""
    width = max(map(len, aggregates), default=5)
    lines_ = [
        _lead(read, aggregates, fresh_aggregates),
        "",
        f"{'entry':<{width}}  worlds  gain in spreads of the plain model, 95 % interval",
    ]
    lines_ += [
        f"{name:<{width}}  {aggregates[name].worlds:>6}  {estimate(aggregates[name].gain) or 'no unit'}"
        for name in ordered(aggregates)
    ]
    return [*lines_, *(f"{name} sets no unit and is in no aggregate" for name in worlds.left_out)]
