"""Errors that a user can act on: each message has the value, the reason and the remedy."""

from __future__ import annotations

import difflib
import errno
import traceback
from pathlib import Path


class StudyError(Exception):
    """A study cannot continue; the message has the cause and the remedy, and the command line prints no traceback.

    Example:
        >>> from headwise_verdict.files.errors import StudyError
        >>> raise StudyError("the text has no letter; give another --set text=FILE")
        Traceback (most recent call last):
        headwise_verdict.files.errors.StudyError: the text has no letter; give another --set text=FILE
    """

    # the last output lines and the traceback of another program that failed
    printed = ""
    trace = ""


def is_for_users(error: BaseException) -> bool:
    """Return whether an error is a message for users, without a traceback: raised here or by the file system."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_globals.get("__name__", "").startswith(("headwise.", "headwise_verdict.", "headwise_papers."))
    return isinstance(error, (OSError, StudyError)) or (ours and isinstance(error, (ValueError, ImportError)))


def explain(error: OSError, folder: Path, option: str = "--out") -> StudyError:
    """Return an error of the file system as a message with a remedy.

    `option` is the option or argument by which the folder was given; "" if it cannot be another one.
    """
    path = error.filename or folder
    other = f"choose another {option}" if option else "work on a copy of the folder"
    again = "then start the same command again: finished runs and checkpoints are kept"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StudyError(f"the disk of {folder} is full (while writing {path}). Free some space, {again}.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StudyError(f"{path} cannot be written: {error.strerror}. Give write permission or {other}, {again}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return StudyError(f"{path} cannot be used as a folder: {error.strerror}. It is a file; {other}.")
    return StudyError(f"{path}: {error.strerror or error}. Repair it, {again}.")


def suggest(name: str, known: list[str]) -> str:
    """Return " Did you mean ...?" with the nearest known name, or an empty string."""
    lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f" Did you mean {lower[near[0]]!r}?" if near else ""


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'s' if number != 1 else ''}"
