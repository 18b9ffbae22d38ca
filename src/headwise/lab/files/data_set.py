"""The announcement of a data set before it is read: its name, its size, and whether it is present."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headwise_verdict.files import data_folder


@dataclass(frozen=True)
class DataSet:
    """The files that a task reads and that are not part of a package.

        Attributes:
            name: of its folder.
            forms: the files of each form that can be read, or folders that end with "/"; one form is enough.
            megabytes: size of its files, unpacked; None if not known.
            downloads: whether `prepare` downloads it.

        Example:
            >>> from pathlib import Path

    from headwise_verdict.files.cached_text import data_folder
            >>> from headwise.study import DataSet
            >>> DataSet("plays", (("input.txt",),), megabytes=1.1).words(Path("nowhere"))
            'plays, 1.1 MB unpacked, to download'
    """

    name: str
    forms: tuple[tuple[str, ...], ...]
    megabytes: float | None = None
    downloads: bool = True

    def is_here(self, given: Path | None) -> bool:
        """Return whether the folder of data sets, or `given` as the folder of this set, holds all files of a form."""
        folder = data_folder(given)
        # the folder of CIFAR's Python batches has another name than that of its binary files
        places = (folder, folder / self.name, folder.parent if folder.name == self.name else folder)
        return any(all(_exists(place, name) for name in form) for form in self.forms for place in places)

    def words(self, given: Path | None) -> str:
        """Return its name, its size and whether it is here or has to be downloaded."""
        size = f"{self.megabytes:g} MB unpacked" if self.megabytes is not None else "size not known"
        if self.is_here(given):
            return f"{self.name}, {size}, here"
        return (
            f"{self.name}, {size}, to download" if self.downloads else f"{self.name}, {size}, to be obtained manually"
        )


def _exists(place: Path, name: str) -> bool:
    return (place / name).is_dir() if name.endswith("/") else (place / name).is_file()
