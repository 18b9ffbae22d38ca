"""What headwise wrote in a folder, known by a marker file inside: nothing else is overwritten or deleted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from headwise.files.durable import append

MARKER = ".headwise"
HEAD = "headwise wrote the files and folders named here, and may write them again:"
# a line of the marker by which a user declares everything in the folder to be headwise's
ALL = "*"
# how many foreign files a message names
NAMED = 3


def claim(folder: Path, names: Iterable[str], option: str = "--out", *, shared: bool = False) -> None:
    """Make a folder if there is none, and record in its marker that the files of these names in it are headwise's.

    Args:
        folder: the folder.
        names: of files and folders directly inside.
        option: the option or argument by which the folder was given; "" if it cannot be another one.
        shared: whether the folder may hold other files, under other names, without a marker.

    Raises:
        ValueError: if a file of these names exists that is not headwise's, or is a link, or if the folder has no marker
            and is neither empty nor `shared`; nothing is written then.
    """
    names = tuple(names)
    if why := why_foreign(folder, names, shared=shared):
        remedy = f"Choose another {option}" if option else "Move it away"
        raise ValueError(
            f"{folder} {why}. {remedy}; or, if an earlier version of headwise wrote everything there, say so: "
            f"echo '{ALL}' > {folder / MARKER}."
        )
    folder.mkdir(parents=True, exist_ok=True)
    known = owned(folder)
    new = [name for name in names if known is None or not known & {name, ALL}]
    if known is None or new:
        append(folder / MARKER, "".join(f"{line}\n" for line in ([HEAD] if known is None else []) + new).encode())


def why_foreign(folder: Path, names: Iterable[str], *, shared: bool = False) -> str:
    """Return why files of these names may not be written into a folder, as the predicate of its name; "" if they may.

    The arguments are those of `claim`.
    """
    if not folder.is_dir():
        return ""
    known = owned(folder)
    if known is None and os.path.lexists(folder / MARKER):
        return f"holds a file {MARKER} that headwise did not write"
    present = [name for name in names if os.path.lexists(folder / name)]
    if links := [name for name in present if (folder / name).is_symlink()]:
        return f"holds the link {links[0]}, and headwise writes through no links"
    foreign = [name for name in present if not (known or set()) & {name, ALL}]
    if not foreign and known is None and not shared:
        foreign = sorted(path.name for path in folder.iterdir())
    if not foreign:
        return ""
    more = f" and {len(foreign) - NAMED} more" if len(foreign) > NAMED else ""
    return f"holds {', '.join(foreign[:NAMED])}{more}, which headwise did not write"


def owned(folder: Path) -> set[str] | None:
    """Return the names that the marker of a folder lists, {"*"} for all, or None without a marker of headwise."""
    path = folder / MARKER
    if path.is_symlink() or not path.is_file():
        return None
    head, *names = path.read_text(encoding="utf-8", errors="replace").splitlines() or [""]
    return {ALL} if head == ALL else {*names} if head == HEAD else None
