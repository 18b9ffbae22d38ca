"""What became of every attention-like module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One attention-like module: its name, its status, why, and which kernels ran so far ("fused", "explicit")."""

    name: str
    status: str
    detail: str
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """What became of every attention-like module; printing it gives a table."""

    rows: list[Row]
    notes: list[str]

    def __str__(self) -> str:
        table = [("module", "status", "kernel", "what")]
        table += [(r.name or "(the model)", r.status, "+".join(r.kernels) or "-", r.detail) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])).rstrip() for row in table]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def status(self, name: str) -> str:
        """Give the status of the module of this name."""
        return next(row.status for row in self.rows if row.name == name)
