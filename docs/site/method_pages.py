"""Write a page for each method of the registry: formula, picture, when to use it, measurements, cost, both forms
in code.

    python docs/site/method_pages.py FOLDER    only the pages, without Sphinx
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

SITE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(SITE.parent), *(str(SITE.parents[1] / part) for part in ("src", "verdict/src"))]

import methods_table  # noqa: E402
from heat import heat_maps  # noqa: E402
from method_results import results_of  # noqa: E402
from pictured_layer import HEADS, learned_numbers, pictured  # noqa: E402

from headwise import parse  # noqa: E402
from headwise.attend import methods  # noqa: E402
from headwise.attend.core.method import REGISTRY, STAGES, TWINS, Method  # noqa: E402
from headwise_verdict.files.ownership import claim, owned  # noqa: E402

BENCHMARKS = SITE.parent / "benchmarks.md"
EXAMPLE = """\
import torch
from torch import nn

import headwise

layer = nn.TransformerEncoderLayer(32, nhead=4, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 2)  # your own model
handle = headwise.regularize(model, headwise.{method})
optimizer = torch.optim.AdamW(model.parameters())

loss = model(torch.randn(8, 16, 32)).square().mean() + handle.loss()
loss.backward()
optimizer.step()
handle.after_step()"""


def entries() -> dict[str, dict[str, str]]:
    """Return the entries of methods.toml, by method."""
    return tomllib.loads((SITE / "methods.toml").read_text(encoding="utf-8"))


def example(name: str) -> str:
    """Return a training step with the method at its defaults, as code that runs."""
    return EXAMPLE.format(method=repr(REGISTRY[name]()))


def write(folder: Path) -> None:
    """Write index.md, and a page and a picture for each method, into `folder`."""
    texts, names = entries(), sorted(methods.__all__, key=str.lower)
    written = [*(f"{name}.{kind}" for name in names for kind in ("md", "svg")), "index.md"]
    claim(folder, written, "folder", shared=True)
    for old in owned(folder) or ():
        if Path(old).stem not in (*names, "index"):
            (folder / old).unlink(missing_ok=True)
    for name in names:
        _put(folder / f"{name}.md", page(name, texts.get(name, {}), folder))
    _put(folder / "index.md", index(names, texts))


def index(names: list[str], texts: dict[str, dict[str, str]]) -> str:
    """Return the page that lists all methods by purpose."""
    tables = []
    for family, members in methods_table.families().items():
        rows = [
            f"| [{name}]({name}.md) | {REGISTRY[name].summary()} | {_first(texts.get(name, {}).get('when', '–'))} "
            f"| {methods_table.ACTS[REGISTRY[name].acts]} | {methods_table.matrix_free(REGISTRY[name])} |"
            for name in members
        ]
        head = ["| method | what it does | when to use it | acts in | matrix-free |", "|---|---|---|---|---|"]
        tables.append("\n".join([f"## {methods_table.FAMILIES[family]}", "", *head, *rows]))
    table = "\n\n".join(tables)
    intro = (
        f"{len(names)} methods of the literature. Each page has the formula, a picture of what the method does to a "
        "fixed attention map, the cost, "
        "the source, and the code of both forms: as in the paper, on the matrix, and as it runs, without it. All fit "
        "any model in one line:"
    )
    code = (
        "```python\nhandle = headwise.regularize(model, headwise.DropHead(p=0.2), headwise.NeuTRENO(strength=0.6))\n```"
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", *names, "```"])
    return f"# Methods\n\n{intro}\n\n{code}\n\n{table}\n\nWrite your own: [](../../own_method.md).\n\n{toctree}\n"


def page(name: str, entry: dict[str, str], folder: Path) -> str:
    """Return the page of a method, and write its picture into `folder`."""
    cls = REGISTRY[name]
    first, _, *rest = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    parts = [f"# {name}", _line(first)]
    if "formula" in entry:
        parts.append(f"```{{math}}\n{entry['formula']}\n```")
    parts.append(_picture(cls, parse(entry.get("picture", name))[0], folder))
    if "when" in entry:
        parts += ["## When to use it", entry["when"]]
    parts += ["## Use it", f"```python\n{example(name)}\n```", _settings(cls)]
    parts += ["## What was measured", results_of(name), "## Cost and place", _facts(cls)]
    if rest:
        parts += ["## In full", *(_line(one) for one in rest)]
    parts += ["## The two forms", *_forms(cls)]
    return "\n\n".join(parts) + "\n"


def _picture(cls: type[Method], shown: Method, folder: Path) -> str:
    plain, edited, note = pictured(shown)
    top = float(plain.max())
    panels = [
        (f"head {h}, {which}", maps[h].tolist())
        for h in range(HEADS)
        for which, maps in (("plain", plain), ("with it", edited))
    ]
    described = f"The maps of two heads without and with {shown!r}"
    _put(folder / f"{cls.__name__}.svg", heat_maps(panels, top=top, described=described))
    caption = (
        f"The map that acts on the values of two heads, ten tokens, without and with `{shown!r}`: queries down, keys "
        "to the right, white is 0, full "
        f"blue {top:.2f} and more, red below 0. {note + ' ' if note else ''}Drawn by `python "
        "docs/site/method_pages.py FOLDER`."
    )
    return f"```{{figure}} {cls.__name__}.svg\n:alt: {described}\n\n{caption}\n```"


def _facts(cls: type[Method]) -> str:
    learned = learned_numbers(cls())
    rows = [
        ("source", cls.paper),
        ("acts in", methods_table.ACTS[cls.acts].replace("eval", "evaluation").replace("train", "training")),
        ("stages", methods_table.stages(cls)),
        ("runs without the attention matrix", methods_table.matrix_free(cls)),
        ("learns, in a layer of 768 channels and 12 heads", f"{learned:,} numbers" if learned else "nothing"),
    ]
    if (times := _times(cls.__name__)) is not None:
        rows.append(
            ("time of attention, forward and backward, over plain", f"{times} ([benchmarks](../../benchmarks.md))")
        )
    return "\n".join(
        [
            "| property | value |",
            "|---|---|",
            *(f"| {name} | {text.replace('|', chr(92) + '|')} |" for name, text in rows),
        ]
    )


def _times(name: str) -> str | None:
    """Return the measured ratios of the first table of benchmarks.md that has this method."""
    found = re.search(
        rf"^\| `({name}\([^|`]*)` \|([^|]+)\|([^|]+)\|([^|]+)\|", BENCHMARKS.read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        return None
    measured, *cells = found.groups()
    ratios = [cell.split("(")[0].strip() for cell in cells]
    return f"`{measured}`: " + ", ".join(f"{ratio} at T = {tokens}" for ratio, tokens in zip(ratios, (65, 256, 1024)))


def _settings(cls: type[Method]) -> str:
    fields: tuple[Any, ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    signature = ", ".join(f"{f.name}: {_type(f)} = {f.default!r}" for f in fields)
    live = (
        f"`{'`, `'.join(cls.live)}` may change while training: `handle.set(headwise.{cls.__name__}, "
        f"{cls.live[0]}=...)`."
        if cls.live
        else ""
    )
    neutral = f"No neutral setting: {cls.no_neutral}." if cls.no_neutral else _neutral(cls)
    return (
        f"```{{py:class}} "
        f"headwise.{cls.__name__}({'*, ' if fields else ''}{signature})\n{_line(cls.summary())}\n```\n\n{live} "
        f"{neutral}".strip()
    )


def _neutral(cls: type[Method]) -> str:
    if not cls.neutral:
        return "It changes nothing until its parameters have been trained."
    written = ", ".join(f"{name}={value!r}" for name, value in cls.neutral.items())
    return f"Neutral, where nothing but rounding changes: `{cls.__name__}({written})`."


def _type(field: Any) -> str:
    return field.type if isinstance(field.type, str) else field.type.__name__


def _forms(cls: type[Method]) -> list[str]:
    twins = dict.fromkeys(
        twin for stage, names in TWINS.items() if cls.overrides(stage) for twin in names if cls.overrides(twin)
    )
    textbook = [stage for stage in STAGES if cls.overrides(stage)]
    matrix = [stage for stage in TWINS if cls.overrides(stage)]
    if not matrix:
        # a penalty read in closed form needs no matrix in its paper either
        read = [twin for twin in TWINS["read"] if cls.overrides(twin)]
        return ["It does not act on the attention matrix, so that it needs only one form.", _code(cls, textbook + read)]
    free = ", without the matrix" if not methods_table.matrix_free(cls).startswith("no") else ""
    if not twins:
        return ["It has only the form of its paper, which builds the matrix.", _code(cls, textbook)]
    return [
        "As in the paper, on the matrix:",
        _code(cls, textbook),
        f"As it runs{free}, if that is exact:",
        _code(cls, list(twins)),
        "The tests compare both, values and gradients, on every kind of call.",
    ]


def _code(cls: type[Method], stages: list[str]) -> str:
    return (
        "```python\n"
        + "\n".join(textwrap.dedent(inspect.getsource(getattr(cls, stage))) for stage in stages).strip()
        + "\n```"
    )


def _line(paragraph: str) -> str:
    return " ".join(paragraph.split()).replace("*", "\\*").replace("<", "\\<")


def _first(text: str) -> str:
    return re.split(r"(?<=[a-z`)])(?:\.|:) ", text)[0].rstrip(".") + "."


def _put(path: Path, text: str) -> None:
    # an unchanged file keeps its modification time, so that its page is not built again
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
