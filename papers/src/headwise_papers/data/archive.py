"""The source of a data set: official addresses, checksums and archives, and the user's folder."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headwise.lab.files.data_set import data_folder
from headwise.study import DataSet, StudyError
from headwise_papers.data.download import digest, download, part_of
from headwise_verdict.files.durable import write_bytes
from headwise_verdict.files.ownership import claim, refuse_link

# a function that returns the content of an archive's member by name, or that of a plain or .gz file for any name
Read = Callable[[str], bytes]


@dataclass(frozen=True)
class Package:
    """One download: a tar or zip archive, a gzipped file or a plain one, according to the address's suffix.

    `members` maps each file to its member, `made` to a function that computes it from the members. `checksum` is the
    MD5 or SHA-256 of the download, or None if the publisher has no fixed one, and only each file's own is checked.
    """

    addresses: tuple[str, ...]
    members: dict[str, str] = field(default_factory=dict)
    checksum: str | None = None
    made: dict[str, Callable[[Read], bytes]] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the files in the package."""
        return (*self.members, *self.made)


@dataclass(frozen=True)
class Source:
    """A data set: the name of its folder, its downloads, and each file's MD5 or SHA-256 (None: unknown)."""

    folder: str
    files: dict[str, str | None]
    packages: tuple[Package, ...] = ()
    # the remedy if no download contains a file
    by_hand: str = ""
    # size of its files; None: unknown
    megabytes: float | None = None

    def find_folder(self, given: Path | None) -> Path:
        """Return the folder of the files: this one, or the one inside it; without one, in the user's cache.

        Raises StudyError if it is a file.
        """
        given = data_folder(given)
        if given.is_file():
            raise StudyError(
                f"--data names {given}, which is a file: name the folder that contains {self.folder}, or that folder."
            )
        has_files = any((given / name).is_file() for name in self.files)
        return given if given.name == self.folder or has_files else given / self.folder

    def paths(self, given: Path | None) -> list[Path]:
        """Return the files of the data set."""
        folder = self.find_folder(given)
        return [folder / name for name in self.files]

    def described(self) -> DataSet:
        """Return the description of the data set."""
        return DataSet(self.folder, (tuple(self.files),), self.megabytes, downloads=bool(self.packages))

    def prepare(self, given: Path | None, tell: Callable[[str], None]) -> None:
        """Download missing files, and check every file.

        Raises StudyError for a download that fails or has the wrong checksum, and for files that differ from the
        official ones, all of which are named.
        """
        folder = self.find_folder(given)
        missing = [name for name in self.files if not (folder / name).is_file()]
        for package in self.packages:
            if wanted := [name for name in missing if name in package.files]:
                fetch(package, folder, wanted, tell)
        if still_missing := [name for name in self.files if not (folder / name).is_file()]:
            raise StudyError(f"{folder} lacks {', '.join(still_missing)}. {self.by_hand}".rstrip())
        self.check(folder)

    def check(self, folder: Path) -> None:
        """Compare every file with its official checksum; an error names all that differ at once."""
        corrupt = []
        for name, official in self.files.items():
            if official is None:
                continue
            kind, actual = digest(folder / name, official)
            if actual != official:
                corrupt.append(f"{folder / name} ({kind} {actual}, officially {official})")
        if corrupt:
            raise StudyError(
                f"corrupt: {'; '.join(corrupt)}. Delete these files and start again: they are downloaded again."
            )


def fetch(package: Package, folder: Path, wanted: list[str], tell: Callable[[str], None]) -> None:
    """Download a package next to the folder and unpack the wanted files, each completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with downloaded(package, folder, ", ".join(wanted), tell) as read:
        for name in wanted:
            make = package.made.get(name)
            content = make(read) if make else read(package.members[name])
            # a link to a disk that is not there would be lost
            refuse_link(folder / name)
            write_bytes(folder / name, content)


@contextmanager
def downloaded(package: Package, folder: Path, lacking: str, tell: Callable[[str], None]) -> Iterator[Read]:
    """Download a package from its first working address, yield a reader of its members, and finally delete it.

    Raises StudyError if no address works, or if the archive is invalid.
    """
    path = folder.parent / f"{folder.name}.{Path(package.addresses[0]).name}"
    claim(path.parent, (path.name, part_of(path).name), "--data", shared=True)
    for address in package.addresses:
        tell(f"{folder} lacks {lacking}: downloading {address}")
        try:
            download(address, path, package.checksum, tell)
            break
        except StudyError as error:
            if address == package.addresses[-1]:
                raise
            tell(f"{error} Trying the next address.")
    try:
        with opened(path) as read:
            yield read
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, gzip.BadGzipFile, KeyError) as error:
        path.unlink()
        reason = " ".join(str(error.args[0] if error.args else type(error).__name__).split())
        raise StudyError(f"{address} cannot be unpacked: {reason}. It was deleted; start again.") from error
    path.unlink()


@contextmanager
def opened(path: Path) -> Iterator[Read]:
    """Open an archive and yield a reader of its members, which raises KeyError for an unknown name."""
    name = path.name
    if name.endswith(".zip"):
        with zipfile.ZipFile(path) as packed:
            yield packed.read
    elif name.endswith((".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")):
        with tarfile.open(path) as packed_tar:
            yield lambda member: _extract(packed_tar, member)
    elif name.endswith(".gz"):
        yield lambda _: gzip.decompress(path.read_bytes())
    else:
        yield lambda _: path.read_bytes()


def _extract(packed: tarfile.TarFile, member: str) -> bytes:
    stream = packed.extractfile(member)
    if stream is None:
        raise KeyError(f"{member} is not a file")
    return stream.read()
