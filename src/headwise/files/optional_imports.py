"""Import the optional libraries of reports, with an error that names the extra."""

from __future__ import annotations

import importlib


def load(name: str, extra: str):
    """Return the module `name`; raise ImportError naming the extra that brings it when it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != name.split(".")[0]:
            raise
        raise ImportError(f"A report needs {name}, which is not installed: pip install 'headwise[{extra}]'.") from error
