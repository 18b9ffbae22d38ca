"""The public name for rebuilding a report: `headwise.report.write(folder)`."""

from __future__ import annotations

from headwise.comparing.report import write

__all__ = ["write"]
