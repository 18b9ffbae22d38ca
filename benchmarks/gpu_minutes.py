"""What the studies of `make gpu` take on one GPU, by count: products and kernels of a step, times steps and runs.

python benchmarks/gpu_minutes.py          # write the table into docs/gpu.md
python benchmarks/gpu_minutes.py --check  # whether the table is current
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import dry_study
import torch
from on_a_gpu import PARTS

from headwise.borders import DispatchMode
from headwise.lab.comparing.choosing import choose_study
from headwise.lab.comparing.request import Request
from headwise.lab.experiments.task import Task
from headwise.lab.studies.registry import Installed
from headwise.lab.training.batches import first, make_batch, run_model
from headwise.lab.training.measuring import counter

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
MARKS = "<!-- minutes: begin (python benchmarks/gpu_minutes.py) -->", "<!-- minutes: end -->"
# a step takes the larger of its products at this rate, a quarter of an H100's in bf16 and half of its fp32's, and its
# kernels at this duration in a CUDA graph
RATES = {"bfloat16": 200e12, "float32": 30e12}
KERNEL = 2e-6
IMAGES = 50_000
EXAMPLES = 4


class Kernels(DispatchMode):
    """Counts operators that are no views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count an operator and run it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def step_of(task: Task) -> tuple[float, int]:
    """Return the floating-point operations of a step of the plain model, and its kernels without the optimizer."""
    torch.manual_seed(0)
    model = task.model()
    batch = make_batch(task, first(task.data("train"), EXAMPLES), None)
    with Kernels() as kernels, counter() as products:
        task.loss(run_model(model, batch.inputs), batch.targets).backward()
    return products.get_total_flops() / EXAMPLES * task.batch_size, kernels.count


def steps_of(task: Task) -> int:
    """Return the optimizer steps of a run."""
    return task.steps or task.epochs * math.ceil(IMAGES / task.batch_size)


def option(words: list[str], name: str, default: str) -> str:
    """Return the value of an option of a command."""
    return words[words.index(name) + 1] if name in words else default


def row(words: list[str]) -> str:
    """Return the row of a study by its command."""
    name, scale = words[3], option(words, "--scale", "small")
    study = choose_study(Request(study=name, studies=Installed(), scale=scale, device="cpu"))
    seeds = int(option(words, "--seeds", str(study.seeds)))
    arms = 2 if "--method" in words else len(study.arms)
    products, kernels = step_of(study.task)
    steps = steps_of(study.task)
    second = max(products / RATES[study.task.dtype], kernels * KERNEL)
    bound = "products" if second > kernels * KERNEL else "kernels"
    cells = (
        f"`{name}`, `{scale}`",
        f"{arms} × {seeds}",
        f"{steps:,}",
        f"{products * steps / 1e15:.2f}",
        f"{kernels:,}",
        bound,
        f"{second * steps / 60:.1f}",
        f"{second * steps * arms * seeds / 60:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table."""
    dry_study.pretend()
    commands = [part.command.split() for part in PARTS if part.name.startswith("studies-")]
    head = "| study, scale | arms × seeds | steps | PFLOP a run | kernels a step | bound by | minutes a run | all |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *map(row, commands)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(MARKS[0])
    wanted = f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
    if options.check:
        if wanted != text:
            print("not current: gpu.md; run python benchmarks/gpu_minutes.py")
        return wanted != text
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
