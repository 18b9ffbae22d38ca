"""Count what a step of each optimizer does on a GPU: `python benchmarks/optimizer_costs.py [--check]`.

The weights are those of 12 layers of GPT-2 small in bf16, fused as its host fuses them; gradients are at hand. Counted
on fake tensors as in docs/cuda_costs.md, in the second step: operators that launch kernels (one for a list of tensors,
which takes a few kernels), bytes, products, and the least time on an H100. The table stands in docs/optimizers.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "optimizers.md"
FIRST, LAST = "<!-- counted by benchmarks/optimizer_costs.py -->", "<!-- end of counts -->"
NAMES = (
    "AdamW", "torch.optim.Muon, whole weights", 'Muon(per="matrix")', 'Muon(per="head")', "AdamW and Hyperball",
    'Muon(per="head") and Stiefel', "AdamW and CautiousDecay", "AdamW and AlphaDecay, between readings",
)  # fmt: skip


def counted() -> list[dict[str, Any]]:
    """Return the counts of a step of each optimizer, from a process that believes in a device."""
    sys.path.append(str(ROOT / "tests"))
    from integration import fake_device

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--count"],
            text=True,
            capture_output=True,
            env={**fake_device.environment(Path(folder)), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def makers() -> list[Callable[[Any], Any]]:
    """Return functions of parameter groups that make each optimizer."""
    import torch

    import headwise

    def theirs(groups: Any) -> Any:
        hidden = [p for group in groups if group["name"] in ("attention", "mlp") for p in group["params"]]
        rest = [p for group in groups if group["name"] not in ("attention", "mlp") for p in group["params"]]
        return [torch.optim.Muon(hidden, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]

    def attached(kind: Any, optimizer: Any, *more: Any) -> Any:
        kind(optimizer, *more)
        return [optimizer]

    return [
        lambda groups: [torch.optim.AdamW(groups)],
        theirs,
        lambda groups: [headwise.Muon(groups, per="matrix")],
        lambda groups: [headwise.Muon(groups, per="head")],
        lambda groups: attached(headwise.Hyperball, torch.optim.AdamW(groups), groups),
        lambda groups: attached(headwise.Stiefel, headwise.Muon(groups), groups),
        lambda groups: attached(headwise.CautiousDecay, torch.optim.AdamW(groups)),
        lambda groups: attached(headwise.AlphaDecay, torch.optim.AdamW(groups), groups),
    ]


def count() -> None:
    """Print the counts; runs in the process with the device."""
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "integration")]
    import torch
    from cuda_counter import Counter
    from fake_cuda import believe_in_cuda
    from training_models import MODELS

    import headwise

    believe_in_cuda()
    for name, make in zip(NAMES, makers(), strict=True):
        torch.manual_seed(0)
        model = MODELS["GPT-2 small"].layers(12).to(torch.bfloat16)
        decay = 0.1 if "Decay" in name else 0.0
        groups = headwise.parameter_groups(model, 1e-3, decay, example=MODELS["GPT-2 small"].example())
        optimizers = make(groups)
        if "AlphaDecay" in name:
            # the exponents need numbers, which the device does not have here
            for at, _, parts in optimizers[0].headwise_attached[0]._places:
                group = optimizers[0].param_groups[at]
                group["alpha_age"] = 0
                group.setdefault("alpha_factors", []).append([[0.9 + 0.1 * i] * p.count for i, p in enumerate(parts)])
        places = {id(p): own for own, p in model.named_parameters()}
        with Counter() as counter:
            there = {name: torch.nn.Parameter(p.detach().cuda()) for name, p in model.named_parameters()}
            for group in (group for one in optimizers for group in one.param_groups):
                group["params"] = [there[places[id(p)]] for p in group["params"]]
            for parameter in there.values():
                parameter.grad = torch.empty_like(parameter)
            for _ in range(2):
                counter.clear()
                for one in optimizers:
                    one.step()
            found = {
                "name": name,
                "operators": counter.kernels,
                "mib": counter.bytes / 2**20,
                "gflop": counter.flops / 1e9,
                "ms": counter.seconds * 1e3,
                "waits": len(counter.waits),
            }
        print(json.dumps(found), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = ["| optimizer | operators | MiB | GFLOP | least ms on an H100 | waits |", "|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {row['operators']:,.0f} | {row['mib']:,.0f} | {row['gflop']:,.0f} | {row['ms']:.2f} "
        f"| {row['waits']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    if "--count" in sys.argv:
        count()
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(re.escape(FIRST) + ".*?" + re.escape(LAST), re.DOTALL)
    new = pattern.sub(lambda _: f"{FIRST}\n{table(counted())}\n{LAST}", text)
    if "--check" in sys.argv:
        sys.exit(0 if new == text else f"{PAGE.name} has other counts: python benchmarks/optimizer_costs.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
