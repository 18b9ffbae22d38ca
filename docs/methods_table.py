"""Write the tables of methods into docs/methods.md from the classes: `python docs/methods_table.py [--check]`."""

from __future__ import annotations

import inspect
import sys
import tomllib
from pathlib import Path

import torch

from headwise.attend import methods
from headwise.attend.core.method import REGISTRY, STAGES, TWINS, Method
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "methods.md"
BEGIN, END = "<!-- methods: begin (python docs/methods_table.py) -->", "<!-- methods: end -->"
ACTS = {"train": "train", "both": "train, eval", "step": "after the step"}
MATRIX = ("logits", "weights", "read")


# in the order of the table: the key of each family of methods, and the problem that it addresses
FAMILIES = {
    "memorising": "The model memorises",
    "collapse": "Attention collapses, or the loss diverges",
    "over-smoothing": "Deep layers over-smooth",
    "rank": "Heads lose rank, or repeat each other",
    "logits": "Another shape of attention",
    "controls": "Controls",
}


def families() -> dict[str, list[str]]:
    """Return the names of the package's methods by family, as defined in docs/site/methods.toml.

    Raises:
        ValueError: if a method is in no family.
    """
    entries = tomllib.loads((DOCS / "site" / "methods.toml").read_text(encoding="utf-8"))
    unassigned = [name for name in methods.__all__ if entries.get(name, {}).get("family") not in FAMILIES]
    if unassigned:
        raise ValueError(f"{', '.join(unassigned)}: docs/site/methods.toml names no family of {', '.join(FAMILIES)}")
    return {one: sorted(name for name in methods.__all__ if entries[name]["family"] == one) for one in FAMILIES}


def table() -> str:
    """Return a section with a table for each family in Markdown, one row per method."""
    lines: list[str] = []
    for family, names in families().items():
        lines += ["", f"## {FAMILIES[family]}", "", "| method | what it does | source |", "|---|---|---|"]
        for name in names:
            cells = (f"`{REGISTRY[name]()!r}`", REGISTRY[name].summary(), source(REGISTRY[name]))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def source(cls: type[Method]) -> str:
    """Return the source of a method: the second paragraph of its docstring."""
    return inspect.cleandoc(cls.__doc__ or "").split("\n\n")[1].replace("\n", " ").rstrip(".")


def stages(cls: type[Method]) -> str:
    """Return the stages that the class defines, in order of action; `build` only if it is the only one."""
    # A method that its paper also defines without the matrix has `read_free` as its only form of `read`.
    read = cls.overrides("read_free")
    return (
        ", ".join(
            f"`{stage}`"
            for stage in STAGES
            if (stage != "build" and cls.overrides(stage)) or (stage == "read" and read)
        )
        or "`build`"
    )


def matrix_free(cls: type[Method]) -> str:
    """Return whether the method runs without the attention matrix, as observed in a call with default settings."""
    needs = [stage for stage in MATRIX if cls.overrides(stage)]
    if not needs:
        return "yes"
    kernels = kernels_of(cls())
    if "explicit" not in kernels:
        return "yes"
    if cls.overrides("edit"):
        return "on CUDA"
    if "its own map" in kernels:
        return "no: made in blocks"
    twins = {twin for stages_ in TWINS.values() for twin in stages_}
    return "with other settings" if any(map(cls.overrides, twins)) else "no"


def kernels_of(method: Method) -> frozenset[str]:
    """Return the kernels that serve one causal training call, large enough that the explicit matrix is not faster."""
    q, x = torch.randn(2, 1, 2, 128, 8, generator=torch.Generator().manual_seed(0))
    hidden = x[:, 0]
    fitted = fit_standalone([method], standalone_site(q, q, hidden=hidden))
    attend_with([method], q, q, q, fitted=fitted, hidden=hidden, causal=True)
    return frozenset(fitted.kernels)


def main(arguments: list[str]) -> int:
    """Write the tables between their marks, or with --check report whether it is current."""
    text = PAGE.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"{PAGE.name} has no place for the tables of methods: add the lines\n{BEGIN}\n{END}", file=sys.stderr)
        return 1
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        print(
            f"the tables of methods in docs/{PAGE.name} is out of date: run python docs/methods_table.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
