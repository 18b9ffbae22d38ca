"""Imports of optional libraries, with errors that name the extra to install, and transformers without its prints."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load(name: str, extra: str) -> Any:
    """Return the module `name`; raise ImportError with the extra to install if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name.split(".")[0]:
            raise
        raise ImportError(f"headwise needs {name}, which is not installed: pip install 'headwise[{extra}]'.") from error


@contextmanager
def needing(purpose: str, extra: str) -> Iterator[None]:
    """Turn ModuleNotFoundError into an ImportError that names the extra; `purpose` is the message's subject."""
    try:
        yield
    except ModuleNotFoundError as error:
        # A missing module of headwise is a bug, which no extra repairs.
        if error.name is None or error.name.split(".")[0] == "headwise":
            raise
        raise ImportError(
            f"{purpose} needs {error.name}, which is not installed: pip install 'headwise[{extra}]'."
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing."""
    logging = load("transformers", "hf").logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
