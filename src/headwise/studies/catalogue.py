"""What `headwise methods` and `headwise studies` print: from a catalogue made of the code, without torch."""

from __future__ import annotations

import json
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

from headwise.files.durable import read_json
from headwise.files.entry_points import entry_points
from headwise.files.errors import StudyError
from headwise.studies.registry import PAPERS, load_study, study_names

WIDTH = 80


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return what is known of the methods and studies of headwise and headwise-papers, by name."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def print_methods(name: str | None = None, purpose: str | None = None) -> None:
    """Print each method, those for a purpose, or all that is said of one.

    Raises:
        StudyError: where there is no such method or purpose.
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
    """Print each installed study: question, arms and seeds, scales, data, and its verdict here or as it was kept."""
    names = study_names()
    for name in names:
        print(name)
        for line in _about_study(name):
            print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    missing = [name for name in PAPERS if name not in names]
    if missing:
        print(f"\npip install headwise-papers adds {len(missing)} studies of the literature, such as {missing[0]}.")
    print("\nheadwise compare STUDY --plan says how long a study takes on this machine.")


def _about_study(name: str) -> list[str]:
    known = catalogue()["studies"].get(name) or _of_another(name)
    if "arms" not in known:
        return [known["question"], "figures of its own kind: no arms to choose", *_verdict(name, known)]
    lines = [known["question"], f"{known['arms']} arms x {known['seeds']} seeds; data: {known['data']}"]
    scales = [f"{key} ({known['arms']} x {scale['seeds']})" for key, scale in known["scales"].items()]
    return [*lines, *([f"scales {', '.join(scales)}"] if scales else []), *_verdict(name, known)]


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
        "data": "its package says",
    }
