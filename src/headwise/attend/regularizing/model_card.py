"""The model card of a saved model: its methods, their sources and settings, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method
from headwise.files.durable import write_bytes

CARD = "README.md"
BEGIN, END = "<!-- headwise: begin -->", "<!-- headwise: end -->"


def write(folder: Path, text: str, library: str) -> None:
    """Write the part about methods into a folder's model card, and keep the rest of the card.

    Args:
        library: the module of the model's class, from which a hub learns how to load it.
    """
    path = folder / CARD
    part = f"{BEGIN}\n{text}{END}\n"
    old = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN in old and END in old:
        before, rest = old.split(BEGIN, 1)
        new = before + part.rstrip("\n") + rest.split(END, 1)[1]
    elif old.strip():
        new = old.rstrip("\n") + "\n\n" + part
    else:
        name = "library_name: transformers\n" if library.startswith("transformers.") else ""
        new = f"---\n{name}tags:\n- headwise\n---\n\n{part}"
    write_bytes(path, new.encode())


def text(methods: Sequence[Method], fitted: Sequence[FittedLayer], model: type, *, loads: bool) -> str:
    """Return the part of a model card about methods, in Markdown.

    Args:
        loads: whether the folder is for `headwise.load_pretrained`; otherwise it holds a stock model.
    """
    rows = ["| method | what it does | acts in | layers | source |", "|---|---|---|---|---|"]
    for method in methods:
        count = sum(any(m is method for m in f.methods) for f in fitted)
        when = "training and evaluation" if method.acts_in(training=False) else "training"
        paper = method.paper.replace("|", "\\|")
        rows.append(f"| `{method!r}` | {method.summary()} | {when} | {count} | {paper} |")
    return "\n".join(
        [
            f"## Attention methods\n\nTrained with headwise.\n\n{chr(10).join(rows)}",
            "",
            *_loading(methods, model, loads),
            "",
        ]
    )


def _loading(methods: Sequence[Method], model: type, loads: bool) -> list[str]:
    if not loads:
        return [
            "This folder holds a stock model: its weights contain the effect of the methods, and it runs without "
            "headwise."
        ]
    outside = beyond_weights(methods)
    name = model.__name__
    # only classes of transformers itself can be imported from it, not a subclass in a script
    if model.__module__.startswith("transformers."):
        imports = ["import headwise", f"from transformers import AutoConfig, {name}"]
        built = f'model = {name}(AutoConfig.from_pretrained("folder"))'
    else:
        imports, built = ["import headwise"], f"model = ...  # a plain {name}, built as the saved one was"
    load = 'handle = headwise.load_pretrained(model, "folder")'
    lines = ["```python", *imports, "", built, load, "```", ""]
    if outside:
        names = ", ".join(f"`{type(m).__name__}`" for m in outside)
        lines.append(
            f"These methods also act in evaluation: {names}. Loaded without headwise, the model computes something "
            "else than the one that was trained."
        )
    else:
        lines.append("In evaluation the plain weights compute the same: the model also runs without headwise.")
    return lines


def beyond_weights(methods: Sequence[Method]) -> list[Method]:
    """Return the methods whose effect in evaluation is not in the weights of a plain model."""
    return [m for m in methods if m.acts_in(training=False) and not m.overrides("fold")]
