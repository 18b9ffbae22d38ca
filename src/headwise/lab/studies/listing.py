"""The output of `headwise studies`: source, minutes and question of each, or one study in full, without torch."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from headwise.lab.files.data_set import DataSet
from headwise.lab.studies.registry import DEFAULT, PAPERS, WIDTH, catalogue, load_study, study_names
from headwise_verdict import StudyError
from headwise_verdict.files import read_json

# whose experiments a study repeats; "own": a question of this project
SOURCES = ("blog", "neutreno", "sigma", "decay", "own")


def print_studies(name: str | None = None, source: str | None = None, minutes: float | None = None) -> None:
    """Print name, source, minutes and question of every study; or one study in full.

    Args:
        name: the study to print in full.
        source: print only the studies of this source.
        minutes: print only studies whose kept runs took at most this long.

    Raises:
        StudyError: if there is no such study or source.
    """
    if name is not None:
        print(_in_full(name))
        return
    if source is not None and source not in SOURCES:
        raise StudyError(f"--source {source}: no study is from it. Sources: {', '.join(SOURCES)}.")
    names = study_names()
    entries = {one: _entry(one) for one in names}
    shown = {one: entry for one, entry in entries.items() if source in (None, source_of(one, entry))}
    unknown = [one for one, entry in shown.items() if least_minutes(entry) is None]
    if minutes is not None:
        shown = {
            one: entry for one, entry in shown.items() if (took := least_minutes(entry)) is not None and took <= minutes
        }
    rows = [_row(one, entry) for one, entry in shown.items()]
    print("\n".join(_lines(rows)))
    print("\nheadwise studies NAME prints one in full, with its command. Minutes are of the")
    print("kept runs, one after the other; headwise compare NAME --plan estimates them")
    print("for this machine.")
    if minutes is not None and unknown:
        print(f"Left out, as no time was kept: {len(unknown)} studies.")
    missing = [one for one in PAPERS if one not in names]
    if missing:
        print(f"In a checkout, pip install -e papers adds {len(missing)} studies, such as {missing[0]}.")


def source_of(name: str, entry: dict[str, Any]) -> str:
    """Return the source of a study; a study of another package is its own."""
    return str(entry.get("source", "own"))


def least_minutes(entry: dict[str, Any]) -> float | None:
    """Return the minutes of the shortest kept run of a study; None without one."""
    return min((figures["minutes"] for figures in entry.get("measured", {}).values()), default=None)


def _row(name: str, entry: dict[str, Any]) -> tuple[str, str, str, str]:
    took = least_minutes(entry)
    return name, source_of(name, entry), "" if took is None else f"{took:.3g}", entry["question"]


def _lines(rows: list[tuple[str, str, str, str]]) -> list[str]:
    """Return one line a study; where a terminal is too narrow for every question, questions follow on lines below."""
    head = ("study", "source", "minutes", "question")
    sizes = [max(len(row[at]) for row in [head, *rows]) for at in range(3)]
    left = [f"{row[0]:<{sizes[0]}}  {row[1]:<{sizes[1]}}  {row[2]:>{sizes[2]}}".rstrip() for row in [head, *rows]]
    column, questions = sum(sizes) + 6, [row[3] for row in [head, *rows]]
    # without a terminal, as in a pipe to grep, a line may be of any length
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    if column + max(map(len, questions)) <= width:
        return [f"{begin:<{column}}{question}" for begin, question in zip(left, questions)]
    indent = {"initial_indent": "    ", "subsequent_indent": "    ", "break_on_hyphens": False}
    lines = left[:1]
    for begin, question in zip(left[1:], questions[1:]):
        lines += [begin, *textwrap.wrap(question, max(WIDTH, width), **indent)]  # type: ignore[arg-type]
    return lines


def _in_full(name: str) -> str:
    """Return question, arms and seeds, data, minutes at each scale, command, and the latest verdict of a study."""
    if name not in study_names():
        # its error names the package that has the study, or lists all names
        load_study(name)
    entry = _entry(name)
    measured = entry.get("measured", {})
    facts = [entry["question"]]
    if "arms" in entry:
        facts.append(f"{entry['arms']} arms x {entry['seeds']} seeds; data: {_data(entry['data'])}")
        sizes = {DEFAULT: entry["seeds"]} | {key: scale["seeds"] for key, scale in entry["scales"].items()}
        for key, seeds in sizes.items():
            scale = "" if key == DEFAULT else f" --scale {key}"
            facts.append(f"headwise compare {name}{scale}: {entry['arms']} x {seeds}, {_minutes(measured.get(key))}")
    else:
        facts.append(f"headwise compare {name}: it has no arms to choose; {_minutes(measured.get(DEFAULT))}")
    indent = {"initial_indent": "    ", "subsequent_indent": "    ", "break_on_hyphens": False}
    lines = [textwrap.fill(fact, WIDTH, **indent) for fact in [*facts, *_verdict(name, entry)]]  # type: ignore[arg-type]
    return "\n".join([name, *lines])


def _entry(name: str) -> dict[str, Any]:
    return catalogue()["studies"].get(name) or _study_of_package(name)


def _data(data_sets: list[dict[str, Any]] | str) -> str:
    """Return the data sets with their sizes, and whether they are in $HEADWISE_DATA or the user's cache."""
    if isinstance(data_sets, str):
        return data_sets
    folder = Path(os.environ["HEADWISE_DATA"]) if os.environ.get("HEADWISE_DATA") else None
    return "; ".join(DataSet(**entry).words(folder) for entry in data_sets) or "comes with its packages"


def _minutes(measured: dict[str, Any] | None) -> str:
    """Return the time of the kept run, or "not measured" without one."""
    if measured is None:
        return "not measured"
    runs = f"{measured['runs']} runs took " if "runs" in measured else "took "
    return f"{runs}{measured['minutes']:.3g} min"


def _verdict(name: str, entry: dict[str, Any]) -> list[str]:
    """Return the verdict of the last run in this folder, else the one that is kept with the project."""
    analysis = read_json(Path("results") / name / "analysis.json")
    if isinstance(analysis, dict) and analysis.get("answer"):
        return [f"found here: {analysis['answer']}"]
    return [f"kept: {entry['kept']}"] if entry.get("kept") else []


def _study_of_package(name: str) -> dict[str, Any]:
    module = load_study(name)
    study = getattr(module, "STUDY", None)
    if study is None:
        return {"question": module.TITLE}
    scales = {key: {"seeds": scale.seeds or study.seeds} for key, scale in study.scales.items()}
    return {
        "question": study.question,
        "arms": len(study.arms),
        "seeds": study.seeds,
        "scales": scales,
        "data": [dataclasses.asdict(data_set) for data_set in study.task.data_sets()] or "its package says",
    }
