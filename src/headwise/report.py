"""The public name for rebuilding a report: `headwise.report.write(folder)`."""

from __future__ import annotations

from headwise.reporting import write

__all__ = ["write"]


def __dir__() -> list[str]:
    return sorted(__all__)
