"""A data set as it is announced before it is read: its name, its size, and whether it is here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def data_folder(given: Path | None) -> Path:
    """Return the folder of data sets: the one given, else that in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return given or Path(cache) / "headwise"


@dataclass(frozen=True)
class DataSet:
    """Describe the files that a task reads and does not bring along.

    Attributes:
        name: of its folder.
        forms: the files of each form in which it is read; one form is enough.
        megabytes: of its files, unpacked; None where it is not known.
        downloads: whether `prepare` fetches it.

    Example:
        >>> from pathlib import Path
        >>> from headwise.study import DataSet
        >>> DataSet("plays", (("input.txt",),), megabytes=1.1).words(Path("nowhere"))
        'plays, 1.1 MB unpacked, to download'
    """

    name: str
    forms: tuple[tuple[str, ...], ...]
    megabytes: float | None = None
    downloads: bool = True

    def is_here(self, given: Path | None) -> bool:
        """Return whether the folder of data sets, or the one given for this set, holds all files of a form."""
        folder = data_folder(given)
        # the Python batches of CIFAR lie in a folder of another name than its binary files
        places = (folder, folder / self.name, folder.parent if folder.name == self.name else folder)
        return any(all((place / name).exists() for name in form) for form in self.forms for place in places)

    def words(self, given: Path | None) -> str:
        """Say its name, its size and whether it is here or has to be fetched."""
        size = f"{self.megabytes:g} MB unpacked" if self.megabytes is not None else "size not known"
        if self.is_here(given):
            return f"{self.name}, {size}, here"
        return f"{self.name}, {size}, to download" if self.downloads else f"{self.name}, {size}, to be had by hand"
