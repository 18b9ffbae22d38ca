"""Run every method under every kernel and write the table into docs/backends.md.

Usage: `python docs/backends_matrix.py [--check] [--only KERNEL,...]`. Each cell is one training step of a small Llama
(one forward pass if the kernel has no backward on a CPU) under a reference function with the kernel's own signature, on
a padded batch and on the same sequences in one packed row, compared with the same step under sdpa.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, logging

import headwise
from headwise.attend import methods
from headwise.attend.core.method import REGISTRY, Method

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "hosts"))

import backend_functions  # noqa: E402

PAGE = ROOT / "docs" / "backends.md"
BEGIN, END = "<!-- matrix: begin (python docs/backends_matrix.py) -->", "<!-- matrix: end -->"
KINDS = ["sdpa", "eager", *backend_functions.KINDS]
SHOWN = {"kernels-community/flash-attn2": "hub kernel", "users_own": "your own"}
LENGTHS = (5, 7, 2)
WITHIN = 1e-5


def model() -> LlamaForCausalLM:
    """Return the model that all cells use."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=20))
    for parameter in llama.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return llama


def batches() -> dict[str, dict[str, torch.Tensor]]:
    """Return the same sequences as a padded batch and as one packed row."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 20, (n,), generator=generator) for n in LENGTHS]
    positions = torch.arange(max(LENGTHS))
    return {
        "padded": {
            "input_ids": torch.stack([F.pad(row, (0, max(LENGTHS) - len(row))) for row in rows]),
            "attention_mask": torch.stack([positions < n for n in LENGTHS]).long(),
        },
        "packed": {
            "input_ids": torch.cat(rows)[None],
            "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        },
    }


def step(
    plain: LlamaForCausalLM,
    kind: str,
    method: Method,
    batch: dict[str, torch.Tensor],
    attention: str | None,
    grad: bool,
) -> list[torch.Tensor]:
    """Return the logits of the real tokens, the penalties, and the gradient of the embedding after one step."""
    fitted = backend_functions.use(copy.deepcopy(plain).train(), kind)
    handle = headwise.regularize(fitted, method, attention=attention)
    with torch.set_grad_enabled(grad):
        out = fitted(**batch, use_cache=False).logits
    out = out[batch["attention_mask"].bool()] if "attention_mask" in batch else out[0]
    penalty = handle.loss()
    if not grad:
        return [out, penalty]
    (out.square().mean() + penalty).backward()
    weight = fitted.model.embed_tokens.weight.grad
    assert weight is not None
    return [out.detach(), penalty.detach(), weight]


def cell(
    plain: LlamaForCausalLM, kind: str, method: Method, attention: str | None, known: dict[bool, list[torch.Tensor]]
) -> str:
    """Return the cell of a method under a kernel: where headwise computes it, or that its results differ.

    `known` caches the results under sdpa.
    """
    # On a CPU flex attention has no backward pass.
    grad = kind != "flex_attention"
    batch_by_layout = batches()
    if grad not in known:
        known[grad] = step(plain, "sdpa", method, batch_by_layout["padded"], None, grad)
    expected = known[grad]
    for batch in batch_by_layout.values():
        actual = step(plain, kind, method, batch, attention, grad)
        if not all(torch.allclose(a, b, rtol=WITHIN, atol=WITHIN) for a, b in zip(actual, expected, strict=True)):
            return "differs"
    if kind in ("sdpa", "eager"):
        return "yes"
    return "around" if attention is None else "headwise"


def taken(plain: LlamaForCausalLM, kind: str, method: Method, attention: str | None) -> bool:
    """Return whether a method is accepted under a kernel."""
    fitted = backend_functions.use(copy.deepcopy(plain), kind)
    try:
        headwise.regularize(fitted, method, attention=attention)
    except ValueError:
        return False
    return True


def row(plain: LlamaForCausalLM, name: str, kinds: Sequence[str]) -> list[str]:
    """Return the cells of one method."""
    method = REGISTRY[name](**REGISTRY[name].strong)
    cells: list[str] = []
    known: dict[bool, list[torch.Tensor]] = {}
    for kind in kinds:
        # With attention="headwise" every method runs that is defined for these layers.
        if not taken(plain, kind, method, "headwise"):
            cells.append("not on causal layers")
            continue
        attention = None if taken(plain, kind, method, None) else "headwise"
        cells.append(cell(plain, kind, method, attention, known))
    return cells


def table(kinds: Sequence[str]) -> str:
    """Return the table in Markdown: one row per method, one column per kernel."""
    headings = [SHOWN.get(kind, f"`{kind}`") for kind in kinds]
    lines = ["| method | " + " | ".join(headings) + " |", "|---" * (len(kinds) + 1) + "|"]
    plain = model()
    lines += [f"| `{name}` | " + " | ".join(row(plain, name, kinds)) + " |" for name in sorted(methods.__all__)]
    return "\n".join(lines)


def columns(text: str, kinds: Sequence[str]) -> str:
    """Return the columns of these kernels from the whole table."""
    places = [0, *(KINDS.index(kind) + 1 for kind in kinds)]
    rows = [line.strip("|").split("|") for line in text.splitlines()]
    return "\n".join("|" + "|".join(cells[at] for at in places) + "|" for cells in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or with `--check` compare it with the one in the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", default=",".join(KINDS), help="kernels whose columns are compared")
    options = parser.parse_args(arguments)
    kinds = options.only.split(",")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend_functions.put_in_place(patch)
        current = table(kinds)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    stored, after = rest.split(END)
    if options.check:
        if columns(stored.strip(), kinds) == current:
            return 0
        print(f"{PAGE} does not match the results: run python docs/backends_matrix.py")
        return 1
    if kinds != KINDS:
        parser.error("only the whole table can be written: remove --only")
    PAGE.write_text(f"{before}{BEGIN}\n{current}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
