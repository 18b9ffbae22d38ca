"""Sweep over every model type of transformers: which attention layers headwise reaches, and that neutral is neutral
there.

python benchmarks/families.py                    # all types; writes docs/families.md (a quarter of an hour)
python benchmarks/families.py --resume rows.jsonl             # resumes an interrupted sweep
python benchmarks/families.py llama bert swin    # only these; prints
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torchvision_stub  # noqa: F401  (before transformers)
from shrink import build, outline
from torch import Tensor, nn

from headwise import RelaxedAttention
from headwise.attend import hosts
from headwise.attend.regularizing.regularize import regularize

OUT = Path(__file__).resolve().parents[1] / "docs" / "families.md"
NEUTRAL = RelaxedAttention(gamma=0.0, matched_inference=True)
STRONG = RelaxedAttention(gamma=0.9, matched_inference=True)
SECONDS = 40


@dataclass
class Row:
    """The result of one model type."""

    model_type: str
    loaded: str = ""
    reached: str = ""
    refused: str = ""
    neutral: str = ""
    strong: str = ""
    note: str = ""
    # why each refused class is refused, and what would have to change
    why: dict[str, str] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """Return the row of the table."""
        return [self.model_type, self.loaded, self.reached, self.refused, self.neutral, self.strong, self.note]


class TooLong(BaseException):
    """A model type took more than SECONDS of processor time."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TooLong in the block after SECONDS of processor time, so that a busy machine skips no type."""

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def sweep(model_type: str) -> Row:
    """Build a tiny model of a type and test it."""
    row = Row(model_type)
    try:
        with limited():
            try:
                model, batch = build(model_type, "sdpa")
                row.loaded = "sdpa"
            except ValueError:
                model, batch = build(model_type, "eager")
                row.loaded = "eager"
            _try(row, model, batch)
    except TooLong:
        # the partial result does not describe the type
        row = Row(model_type)
        row.note = f"not tried: more than {SECONDS} s of processor time"
    except ValueError as error:
        row = read_alone(model_type, str(error))
    except RuntimeError as error:
        row.note = f"raised in the call: {error}".split(";")[0]
    return row


def read_alone(model_type: str, error: str) -> Row:
    """Return the row of a model built without weights, because none that runs was found, with its attention layers."""
    row = Row(model_type)
    try:
        with limited():
            model = outline(model_type)
            # Layers look up the attention with which they were loaded.
            for module in model.modules():
                if hasattr(getattr(module, "config", None), "_attn_implementation"):
                    module.config._attn_implementation_internal = "sdpa"  # type: ignore[union-attr]
            _list(row, model)
    except TooLong:
        row = Row(model_type, note=f"not tried: more than {SECONDS} s of processor time")
    except ValueError:
        row.note = f"not tried: {error}"
    else:
        row.loaded = "no weights"
        row.note = f"not run: {error}"
    return row


def _list(row: Row, model: nn.Module) -> list[Any]:
    found = hosts.find(model)
    reached = Counter(f.site.host for f in found if f.adapter is not None)
    row.reached = " + ".join(f"{n} {host}" for host, n in sorted(reached.items()))
    row.why = {type(f.site.module).__name__: f.reason for f in found if f.adapter is None}
    row.refused = ", ".join(sorted(row.why))
    return found


def _try(row: Row, model: nn.Module, batch: dict[str, Tensor]) -> None:
    found = _list(row, model)
    if not found:
        row.note = "it has no attention"
    if not row.reached:
        return
    plain = run(model, batch)
    size = max(1.0, float(plain.abs().max()))
    handle = regularize(model, NEUTRAL)
    difference = float((run(model, batch) - plain).abs().max()) / size
    row.neutral = "same bits" if difference == 0 else f"{difference:.0e}"
    idle = [f.site.name for f in handle.fitted if not f.kernels]
    handle.remove()
    handle = regularize(model, STRONG)
    moved = float((run(model, batch) - plain).abs().max()) / size
    row.strong = f"{moved:.1g}"
    handle.remove()
    if idle:
        row.note = f"{len(idle)} layers not run by this batch"
    elif moved == 0:
        row.note = _within(model, batch)


def _within(model: nn.Module, batch: dict[str, Tensor]) -> str:
    """Return whether the strong method changes the output of the layers, if the model's own output hides it (nearest
    codes)."""
    outputs: list[Tensor] = []
    layers = [found.site.module for found in hosts.find(model) if found.adapter is not None]
    hooks = [
        layer.register_forward_hook(lambda _module, _given, output: outputs.extend(_tensors(output)))
        for layer in layers
    ]
    run(model, batch)
    plain = [tensor.clone() for tensor in outputs]
    outputs.clear()
    handle = regularize(model, STRONG)
    run(model, batch)
    handle.remove()
    for hook in hooks:
        hook.remove()
    changed = any(not torch.equal(*pair) for pair in zip(plain, outputs, strict=True))
    return "its layers' outputs change, the model's do not" if changed else "nothing changes"


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return all finite numbers of a model's output on one generator state."""
    torch.manual_seed(0)
    with torch.no_grad():
        flat = torch.cat(list(_tensors(model(**batch))))
    return flat.nan_to_num(0.0, 0.0, 0.0)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.float().flatten()
    elif isinstance(output, dict | tuple | list):
        # Weights that were not requested are not computed under a method; some models return them whenever they exist.
        parts = [v for name, v in output.items() if "attentions" not in name] if isinstance(output, dict) else output
        for value in parts:
            yield from _tensors(value)


HEADER = """# Families of transformers

Every model type that transformers {transformers} registers, built tiny with random weights: the attention layers that
headwise reaches (and through which host), the classes that it refuses with an error, the largest relative difference
that a neutral method makes to the model's output (`{neutral}`), and the one a strong method makes (`{strong}`).

Written by `python benchmarks/families.py` with torch {torch} on CPU.

| of {types} types | |
|---|---|
{counts}
Of the {tried} types with a layer that was reached and run, {equal} are neutral to 1e-6, {same} of them to the bit.
The types for which `benchmarks/shrink.py` built no model are at the end, with the reason; this does not concern
headwise. A type loaded with "no weights" was built without values, because no batch that it takes was
found: the layers that are reached were determined from its code, and nothing was run. The last table states for each
refused class what would have to change.

| type | loaded as | reached | refused | neutral | strong | note |
|---|---|---|---|---|---|---|
"""

# The outcomes of a type, in the order in which a row is tested; each type counts under one of them.
OUTCOMES = (
    "every attention layer reached",
    "some attention layers reached, the others refused by name",
    "every attention layer refused by name",
    "no attention",
    "reached, and raised in the call",
    "built without weights and read, not run",
    "not tried",
)


def outcome(row: Row) -> str:
    """Return the one of OUTCOMES to which a row belongs."""
    if row.note.startswith("not tried"):
        return OUTCOMES[6]
    if row.note.startswith("not run"):
        return OUTCOMES[5]
    if row.note.startswith("raised in the call"):
        return OUTCOMES[4]
    if not row.reached:
        return OUTCOMES[2] if row.refused else OUTCOMES[3]
    return OUTCOMES[1] if row.refused else OUTCOMES[0]


def table(rows: list[Row]) -> str:
    """Return docs/families.md."""
    tried = [row for row in rows if row.neutral]
    counted = Counter(outcome(row) for row in rows)
    head = HEADER.format(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch"),
        neutral=repr(NEUTRAL),
        strong=repr(STRONG),
        types=len(rows),
        counts="".join(f"| {name} | {counted[name]} |\n" for name in OUTCOMES),
        tried=len(tried),
        equal=sum(row.neutral == "same bits" or float(row.neutral) <= 1e-6 for row in tried),
        same=sum(row.neutral == "same bits" for row in tried),
    )
    untried = [row for row in rows if outcome(row) == "not tried"]
    shown = [row for row in rows if outcome(row) != "not tried"]
    lines = "".join(f"| {' | '.join(_cell(cell) for cell in row.cells())} |\n" for row in shown)
    listed = "".join(f"| {row.model_type} | {_cell(row.note.removeprefix('not tried: '))} |\n" for row in untried)
    why = {kind: reason for row in rows for kind, reason in row.why.items()}
    changes = "".join(f"| {kind} | {_cell(reason)} |\n" for kind, reason in sorted(why.items()))
    rows_to_count = (
        f"\n## Refused classes\n\n| class | why, and what would have to change |\n|---|---|\n{changes}"
        if changes
        else ""
    )
    return f"{head}{lines}\n## Not tried\n\n| type | first error |\n|---|---|\n{listed}{rows_to_count}"


def _cell(text: str) -> str:
    # Messages name modules with the file from which they were loaded, which differs between machines.
    text = re.sub(r"<module '([\w.]+)' from '[^']*'>", r"\1", text)
    return " ".join(text.replace("|", "/").split())


def kept_rows(file: Path | None) -> dict[str, Row]:
    """Return the rows of an earlier sweep; the row of an incomplete line is computed again."""
    rows: dict[str, Row] = {}
    for line in file.read_text().splitlines() if file is not None and file.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            row = Row(*json.loads(line))
            rows[row.model_type] = row
    return rows


def main() -> None:
    """Sweep, print one line for each type, and write the table if all types were requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument(
        "--resume", type=Path, help="a file to which each row is appended; types in it are not run again"
    )
    options = parser.parse_args()
    chosen = options.types
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    kept = kept_rows(options.resume)
    rows = []
    for model_type in chosen or sorted(CONFIG_MAPPING_NAMES):
        if model_type not in kept:
            start = time.perf_counter()
            kept[model_type] = sweep(model_type)
            print(" | ".join(kept[model_type].cells()), f"| {time.perf_counter() - start:.1f} s", flush=True)
            if options.resume is not None:
                with options.resume.open("a") as file:
                    file.write(json.dumps([*kept[model_type].cells(), kept[model_type].why]) + "\n")
        rows.append(kept[model_type])
    if not chosen:
        OUT.write_text(table(rows))


if __name__ == "__main__":
    main()
