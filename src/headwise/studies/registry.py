"""The studies that can be run by name: the built-in study and those of installed packages."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from headwise.comparing.request import is_of_file
from headwise.files.entry_points import entry_points, load
from headwise.files.errors import StudyError

BUILT_IN = {"digits": "headwise.studies.digits"}

# The studies of headwise-papers, to suggest this package if it is missing; a test of that package checks the list.
PAPERS = (
    "alarms blog-cifar10 blog-cifar100 blog-sizes blog-sweeps blog-text-sst2 blog-text-wikitext2 collapse-with-norms "
    "decay-compress decay-decoupled decay-lm decay-pretrained decay-recall decay-vit entropy-collapse low-rank-toy "
    "neutreno-bert neutreno-bert-sts12 neutreno-bert-stsb neutreno-cifar neutreno-cost neutreno-depth "
    "neutreno-incremental neutreno-kernel neutreno-length neutreno-lm neutreno-prefixes neutreno-robust "
    "neutreno-segmentation neutreno-theory oversmoothing-at-init retrofit sigma-bound sigma-lm sigma-robust "
    "sigma-simclr sigma-speech sigma-temperature sigma-translation sigma-vit stability-map"
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


def study_names() -> list[str]:
    """Return the names of the installed studies, without importing them."""
    return sorted({*BUILT_IN, *entry_points("headwise.studies")})


def load_study(name: str) -> ModuleType | SimpleNamespace:
    """Return the module of a study, which has `STUDY`, or `TITLE` and `run` for a study of findings.

    Raises:
        StudyError: if there is no such study, or its package or file cannot be loaded.
    """
    if is_of_file(name):
        from headwise.experiments.study import load_study_file

        return SimpleNamespace(STUDY=load_study_file(name))
    if name in BUILT_IN:
        return importlib.import_module(BUILT_IN[name])
    if name not in entry_points("headwise.studies"):
        raise StudyError(
            Installed().missing(name)
            or f"there is no study {name!r}. Studies: {', '.join(study_names())}; or pass --task FILE:CLASS."
        )
    study = load("headwise.studies", name)
    # an entry point is the module of a study or the Study itself
    return study if isinstance(study, ModuleType) else SimpleNamespace(STUDY=study)
