"""A table of every attention-like module of a model: whether it is regularized, and why not if it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, Site
from headwise.attend.hosts.layers.declared import Candidate
from headwise.files.html import html_table


@dataclass(frozen=True)
class Row:
    """One attention-like module: its name, its status, the reason, and the kernels that ran ("fused", "norm_rows")."""

    name: str
    status: str
    detail: str
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Coverage:
    """The status of every attention-like module; printing it gives a table."""

    rows: list[Row]
    notes: list[str]

    def __str__(self) -> str:
        table = [("module", "status", "kernel", "what")]
        table += [(r.name or "(the model)", r.status, "+".join(r.kernels) or "-", r.detail) for r in self.rows]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        lines = [
            "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])).rstrip()
            for row in table
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = [(row.name or "(the model)", row.status, "+".join(row.kernels) or "-", row.detail) for row in self.rows]
        return html_table("Attention layers", ("module", "status", "kernel", "what"), rows, "; ".join(self.notes))

    def status(self, name: str) -> str:
        """Return the status of the module of this name."""
        return next(row.status for row in self.rows if row.name == name)


def coverage(
    found: list[Candidate],
    fitted: list[FittedLayer],
    reasons: dict[Site, tuple[str, str]],
    describe: Callable[[Method], str],
    draws: str = "counter",
    together: Sequence[str] = (),
) -> Coverage:
    """Return the status of every attention-like module.

    `together` names the kernels that computed for all layers at once. `reasons` gives the status of each site that was
    left out and why, and the methods that do not apply to a fitted one; `describe` gives the text of a method with the
    strengths that were set later.
    """
    by_site = {f.site: f for f in fitted}
    rows = [_row(candidate.site, by_site.get(candidate.site), reasons, describe) for candidate in found]
    notes = [f"{f.site.name}: {reasons[f.site][1]}" for f in fitted if f.site in reasons and reasons[f.site][1]]
    if draws == "torch":
        notes.append("draws follow the state of torch's generator on the CPU (draws='torch')")
    if together:
        notes.append(f"kernels for all layers together: {', '.join(together)}")
    return Coverage(rows, notes)


def _row(
    site: Site, fitted: FittedLayer | None, reasons: dict[Site, tuple[str, str]], describe: Callable[[Method], str]
) -> Row:
    if fitted is None:
        return Row(site.name, *reasons[site])
    # A method that carries values does nothing on the layer that provides them.
    acting = [m for m in fitted.methods if not (m.carries and fitted.shares_values)]
    if acting:
        return Row(site.name, "regularized", " + ".join(map(describe, acting)), fitted.ran.names())
    return Row(site.name, "read", "its values are carried to the layers above")
