"""Sweeps over every model type of transformers: which attention layers headwise reaches, and that neutral is neutral there.

python benchmarks/families.py                    # all types; writes docs/families.md (a quarter of an hour)
python benchmarks/families.py llama bert swin    # these only; prints
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
import torchvision_stub  # noqa: F401  (before transformers)
from shrink import build
from torch import Tensor, nn

from headwise import RelaxedAttention, hosts
from headwise.regularizing.handle import regularize

OUT = Path(__file__).resolve().parents[1] / "docs" / "families.md"
NEUTRAL = RelaxedAttention(gamma=0.0, matched_inference=True)
STRONG = RelaxedAttention(gamma=0.9, matched_inference=True)
SECONDS = 40


@dataclass
class Row:
    """What became of one model type."""

    model_type: str
    loaded: str = ""
    reached: str = ""
    refused: str = ""
    neutral: str = ""
    strong: str = ""
    note: str = ""

    def cells(self) -> list[str]:
        """Give the row of the table."""
        return [self.model_type, self.loaded, self.reached, self.refused, self.neutral, self.strong, self.note]


class TooLong(BaseException):
    """A model type took longer than SECONDS."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise TooLong in the block after SECONDS."""

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def sweep(model_type: str) -> Row:
    """Build a tiny model of a type and try it."""
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
        row.note = f"not tried: more than {SECONDS} s"
    except ValueError as error:
        row.note = f"not tried: {error}"
    except RuntimeError as error:
        row.note = f"raised in the call: {error}".split(";")[0]
    return row


def _try(row: Row, model: nn.Module, batch: dict[str, Tensor]) -> None:
    found = hosts.find(model)
    reached = Counter(f.site.host for f in found if f.adapter is not None)
    row.reached = " + ".join(f"{n} {host}" for host, n in sorted(reached.items()))
    row.refused = ", ".join(sorted({type(f.site.module).__name__ for f in found if f.adapter is None}))
    if not found:
        row.note = "it has no attention"
    if not reached:
        return
    plain = run(model, batch)
    size = max(1.0, float(plain.abs().max()))
    handle = regularize(model, NEUTRAL)
    difference = float((run(model, batch) - plain).abs().max()) / size
    row.neutral = "same bits" if difference == 0 else f"{difference:.0e}"
    idle = [f.site.name for f in handle.fitted if not f.kernels]
    handle.remove()
    handle = regularize(model, STRONG)
    row.strong = f"{float((run(model, batch) - plain).abs().max()) / size:.1g}"
    handle.remove()
    if idle:
        row.note = f"{len(idle)} layers not run by this batch"


def run(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Give all finite numbers of a model's output on one generator state."""
    torch.manual_seed(0)
    with torch.no_grad():
        flat = torch.cat(list(_tensors(model(**batch))))
    return flat.nan_to_num(0.0, 0.0, 0.0)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.float().flatten()
    elif isinstance(output, dict | tuple | list):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)


HEADER = """# Families of transformers

Every model type that transformers {transformers} registers, built tiny and at random: which attention layers headwise reaches
(and through which host), the classes it refuses by name, the largest relative difference that a neutral method makes to
the model's output (`{neutral}`), and the one a strong method makes (`{strong}`). At the end stand the types of which no tiny
model could be built or fed by `benchmarks/shrink.py`, which says nothing about them.

Written by `python benchmarks/families.py` with torch {torch} on CPU. Of {types} types {tried} were tried, {equal} of them are
neutral to 1e-6, {same} to the bit; {refused} have attention layers of their own that are refused by name.

| type | loaded as | reached | refused | neutral | strong | note |
|---|---|---|---|---|---|---|
"""


def table(rows: list[Row]) -> str:
    """Give docs/families.md."""
    tried = [row for row in rows if row.neutral]
    head = HEADER.format(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch"),
        neutral=repr(NEUTRAL),
        strong=repr(STRONG),
        types=len(rows),
        tried=len(tried),
        equal=sum(row.neutral == "same bits" or float(row.neutral) <= 1e-6 for row in tried),
        same=sum(row.neutral == "same bits" for row in tried),
        refused=sum(bool(row.refused) for row in rows),
    )
    untried = [row.cells()[0] for row in rows if row.note.startswith("not tried")]
    shown = [row for row in rows if not row.note.startswith("not tried")]
    lines = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in row.cells())} |\n" for row in shown)
    return f"{head}{lines}\n## Not tried\n\n{', '.join(untried)}.\n"


def main() -> None:
    """Sweep, print one line for each type, and write the table when all were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    chosen = parser.parse_args().types
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for model_type in chosen or sorted(CONFIG_MAPPING_NAMES):
        start = time.perf_counter()
        rows.append(sweep(model_type))
        print(" | ".join(rows[-1].cells()), f"| {time.perf_counter() - start:.1f} s", flush=True)
    if not chosen:
        OUT.write_text(table(rows))


if __name__ == "__main__":
    main()
