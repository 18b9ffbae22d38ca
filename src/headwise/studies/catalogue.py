"""What `headwise methods` and `headwise studies` print: from a catalogue made of the code, without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from headwise.files.data_set import DataSet
from headwise.files.durable import read_json
from headwise.files.entry_points import entry_points
from headwise.files.errors import StudyError
from headwise.studies.registry import PAPERS, load_study, study_names

WIDTH = 80
# the size of a study that is given no --scale
DEFAULT = "default"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return what is known of the methods and studies of headwise and headwise-papers, by name."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def print_methods(name: str | None = None, purpose: str | None = None) -> None:
    """Print each method, those for a purpose, or all that is said of one.

    Raises:
        StudyError: if there is no such method or purpose.
    """
    known = catalogue()["methods"] | _of_packages()
    if name is not None:
        print(_about_method(name, known))
        return
    chosen = {key: entry for key, entry in known.items() if purpose is None or _is_for(entry, purpose)}
    if not chosen:
        purposes = list(dict.fromkeys(one for entry in known.values() for one in entry["for"]))
        raise StudyError(f"--for {purpose}: no method is for it. Purposes: {'; '.join(purposes)}.")
    for entry in chosen.values():
        aim = f"\n    for: {', '.join(entry['for'])}" if entry["for"] and purpose is None else ""
        print(f"{entry['written']}\n    {entry['summary']}\n    {entry['paper']}{aim}")


def _is_for(entry: dict[str, Any], purpose: str) -> bool:
    return any(purpose.lower() in one for one in entry["for"])


def _about_method(name: str, known: dict[str, Any]) -> str:
    found = next((entry for key, entry in known.items() if key.lower() == name.partition("(")[0].lower()), None)
    if found is None:
        # not at the top: difflib is asked for once in a while
        from headwise.core.settings import suggest

        raise StudyError(f"there is no method {name!r}.{suggest(name, list(known))} `headwise methods` lists them.")
    aim = f"\n\nFor: {', '.join(found['for'])}." if found["for"] else ""
    example = f"\n\nTry it: headwise compare digits --method '{found['written']}'"
    return f"{found['written']}\n\n{found['about']}{aim}{example}"


def _of_packages() -> dict[str, Any]:
    """Return the methods of other installed packages, which must be imported to be asked."""
    names = list(entry_points("headwise.methods"))
    if not names:
        return {}
    from headwise.core.method import REGISTRY
    from headwise.methods.text import find

    found = {}
    for name in names:
        find(name)
        cls = REGISTRY[name]
        found[name] = {
            "written": repr(cls()),
            "summary": cls.summary(),
            "paper": cls.paper,
            "for": [],
            "about": cls.__doc__ or "",
        }
    return found


def print_studies() -> None:
    """Print each installed study: question, arms and seeds, data, minutes at each scale, and its verdict here or
    as it was kept."""
    names = study_names()
    for name in names:
        print(name)
        for line in _about_study(name):
            print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    missing = [name for name in PAPERS if name not in names]
    if missing:
        print(f"\npip install headwise-papers adds {len(missing)} studies of the literature, such as {missing[0]}.")
    print("\nMinutes are of the training of the kept runs, one after the other (docs/results")
    print("names their machines); headwise compare STUDY --plan says them of this one.")


def _about_study(name: str) -> list[str]:
    known = catalogue()["studies"].get(name) or _of_another(name)
    measured = known.get("measured", {})
    if "arms" not in known:
        own = f"figures of its own kind: no arms to choose; {_minutes(measured.get(DEFAULT))}"
        return [known["question"], own, *_verdict(name, known)]
    sizes = {DEFAULT: known["seeds"]} | {key: scale["seeds"] for key, scale in known["scales"].items()}
    lines = [known["question"], f"{known['arms']} arms x {known['seeds']} seeds; data: {_data(known['data'])}"]
    lines += [f"{key}: {known['arms']} x {seeds}, {_minutes(measured.get(key))}" for key, seeds in sizes.items()]
    return [*lines, *_verdict(name, known)]


def _data(found: list[dict[str, Any]] | str) -> str:
    """Name the data sets with their size, and say whether they are here: in --data's default, or the user's cache."""
    if isinstance(found, str):
        return found
    given = Path(os.environ["HEADWISE_DATA"]) if os.environ.get("HEADWISE_DATA") else None
    return "; ".join(DataSet(**entry).words(given) for entry in found) or "comes with its packages"


def _minutes(measured: dict[str, Any] | None) -> str:
    """Say what the kept run took; a scale at which none was kept is not measured."""
    if measured is None:
        return "not measured"
    runs = f"{measured['runs']} runs took " if "runs" in measured else "took "
    return f"{runs}{measured['minutes']:.3g} min"


def _verdict(name: str, known: dict[str, Any]) -> list[str]:
    """Return the verdict that was found here last, else the one that is kept with the project."""
    here = read_json(Path("results") / name / "analysis.json")
    if isinstance(here, dict) and here.get("answer"):
        return [f"found here: {here['answer']}"]
    return [f"kept: {known['kept']}"] if known.get("kept") else []


def _of_another(name: str) -> dict[str, Any]:
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
