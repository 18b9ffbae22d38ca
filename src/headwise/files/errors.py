"""Errors that a user can act on: each message has the value, the reason and the remedy."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint is corrupt, truncated, pickled, unknown or does not fit; the message has the file and the remedy."""


class StudyError(Exception):
    """A study cannot continue; the message has the cause and the remedy, and the command line prints no traceback.

    Example:
        >>> from headwise.study import StudyError
        >>> raise StudyError("the text has no letter; give another --set text=FILE")
        Traceback (most recent call last):
        headwise.files.errors.StudyError: the text has no letter; give another --set text=FILE
    """

    # the last output lines and the traceback of another program that failed
    printed = ""
    trace = ""


def is_for_users(error: BaseException) -> bool:
    """Return whether an error is a message for users, without a traceback: raised here or by the file system."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    ours = frame.f_globals.get("__name__", "").startswith(("headwise.", "headwise_papers."))
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


# remedies that messages of several rooms share
LOAD_SDPA = "load the model with attn_implementation='sdpa'"
SET_SDPA = "call model.set_attn_implementation('sdpa')"
OWN_ATTENTION = (
    'pass attention="headwise" to regularize(), by which headwise computes the attention of these layers itself, or '
    "load the model with attn_implementation='sdpa'"
)
LEAVE_OUT = "leave the layer out with where="
