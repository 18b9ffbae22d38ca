"""The studies that can be run by name, and the output of `headwise methods`, without torch."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from headwise.files.entry_points import entry_points, load
from headwise.lab.comparing.request import is_of_file
from headwise_verdict import StudyError

BUILT_IN = {"digits": "headwise.lab.studies.digits"}

# The studies of headwise-papers, to suggest this package if it is missing; a test of that package checks the list.
PAPERS = (
    "alarms blog-cifar10 blog-cifar100 blog-sizes blog-steps blog-stopped blog-sweeps blog-text-sst2 "
    "blog-text-wikitext2 collapse-with-norms decay-compress decay-decoupled decay-lm decay-pretrained decay-recall "
    "decay-vit entropy-collapse low-rank-toy neutreno-bert neutreno-bert-sts12 neutreno-bert-stsb neutreno-cifar "
    "neutreno-cost neutreno-depth neutreno-incremental neutreno-kernel neutreno-length neutreno-lm neutreno-prefixes "
    "neutreno-robust neutreno-segmentation neutreno-segmentation-pretrained neutreno-theory optimizers-by-head "
    "optimizers-by-head-steps oversmoothing-at-init retrofit sigma-bound sigma-lm sigma-robust sigma-simclr "
    "sigma-speech sigma-temperature sigma-translation sigma-translation-deep sigma-translation-rates sigma-vit "
    "sigma-vit-shallow stability-map"
).split()


@dataclass(frozen=True)
class Installed:
    """The installed studies, as an object for the command, which does not import this module."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the studies, without importing them."""
        return tuple(study_names())

    def load(self, name: str) -> ModuleType | SimpleNamespace:
        """Return the module of a study; the errors are those of `load_study`."""
        return load_study(name)

    def missing(self, name: str) -> str | None:
        """Return which package to install for a study that is missing, or None if none is known."""
        if name in PAPERS and name not in self.names:
            return f"{name} is a study of headwise-papers, which is not installed: pip install -e papers, in a checkout"
        return None

    def took(self, name: str, scale: str) -> str:
        """Return the sentence on how long the kept runs of a study took; "" where none are kept."""
        measured = catalogue()["studies"].get(name, {}).get("measured", {})
        figures = measured.get(scale) or measured.get(DEFAULT) or next(iter(measured.values()), None)
        if figures is None:
            return ""
        at = next(key for key, value in measured.items() if value is figures)
        runs = f"{figures['runs']} kept runs" if "runs" in figures else "kept run"
        here = "" if at in (scale, DEFAULT) else f" at --scale {at}"
        return f"Its {runs}{here} took {figures['minutes']:.3g} min on another machine, one after the other."


def study_names() -> list[str]:
    """Return the names of the installed studies, without importing them."""
    return sorted({*BUILT_IN, *entry_points("headwise.studies")})


def load_study(name: str) -> ModuleType | SimpleNamespace:
    """Return the module of a study, which has `STUDY`, or `TITLE` and `run` for a study of findings.

    Raises:
        StudyError: if there is no such study, or its package or file cannot be loaded.
    """
    if is_of_file(name):
        from headwise.lab.experiments.study import load_study_file

        return SimpleNamespace(STUDY=load_study_file(name))
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    if name not in entry_points("headwise.studies"):
        raise StudyError(
            Installed().missing(name)
            or f"there is no study {name!r}. `headwise studies` lists them; or pass --task FILE:CLASS."
        )
    study = load("headwise.studies", name)
    # an entry point is the module of a study or the Study itself
    return study if isinstance(study, ModuleType) else SimpleNamespace(STUDY=study)


WIDTH = 80
# the size of a study without --scale
DEFAULT = "default"


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return the generated descriptions of the methods and studies of headwise and headwise-papers, by name."""
    text = Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def print_methods(name: str | None = None, purpose: str | None = None) -> None:
    """Print all methods, the methods for a purpose, or the description of one method.

    Raises:
        StudyError: if there is no such method or purpose.
    """
    entries = catalogue()["methods"] | _methods_of_packages()
    if name is not None:
        print(_about_method(name, entries))
        return
    chosen = {
        key: entry
        for key, entry in entries.items()
        if purpose is None or any(purpose.lower() in aim for aim in entry["for"])
    }
    if not chosen:
        purposes = list(dict.fromkeys(aim for entry in entries.values() for aim in entry["for"]))
        raise StudyError(f"--for {purpose}: no method is for it. Purposes: {'; '.join(purposes)}.")
    for entry in chosen.values():
        aim = f"\n    for: {', '.join(entry['for'])}" if entry["for"] and purpose is None else ""
        print(f"{entry['written']}\n    {entry['summary']}\n    {entry['paper']}{aim}")


def _about_method(name: str, entries: dict[str, Any]) -> str:
    wanted = name.partition("(")[0].lower()
    method = next((entry for key, entry in entries.items() if key.lower() == wanted), None)
    if method is None:
        # imported here because it imports difflib, which is rarely needed
        from headwise.files.errors import suggest

        raise StudyError(f"there is no method {name!r}.{suggest(name, list(entries))} `headwise methods` lists them.")
    aim = f"\n\nFor: {', '.join(method['for'])}." if method["for"] else ""
    example = f"\n\nTry it: headwise compare digits --method '{method['written']}'"
    return f"{method['written']}\n\n{method['about']}{aim}{example}"


def _methods_of_packages() -> dict[str, Any]:
    """Return the methods of other installed packages, which have to be imported."""
    names = list(entry_points("headwise.methods"))
    if not names:
        return {}
    from headwise.attend import parse

    entries = {}
    for name in names:
        (method,) = parse(name)
        entries[name] = {
            "written": repr(method),
            "summary": method.summary(),
            "paper": method.paper,
            "for": [],
            "about": method.__doc__ or "",
        }
    return entries
