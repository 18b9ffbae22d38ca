"""Training steps of the blog's model on a GPU: kernel by kernel, as CUDA graphs and compiled, and several runs at once.

python benchmarks/steps_on_cuda.py             # each of the blog's arms: ms a step of both loops, and equal losses
python benchmarks/steps_on_cuda.py --compile   # the plain model and DropHead: the same, compiled instead of captured
python benchmarks/steps_on_cuda.py --jobs 4    # 1, 2 and 4 processes on one device, with and without CUDA graphs
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from accelerate import Accelerator
from headwise_papers.blog_cifar10 import STUDY

from headwise.lab.experiments.arm import read_arm
from headwise.lab.training.compiled_forward import CompiledForward
from headwise.lab.training.fit import fit
from headwise.lab.training.optimizer import LearningRate, build_optimizer
from headwise.lab.training.step_graphs import StepGraphs
from headwise.lab.training.train import Training, train_epoch

IMAGES = 50 * 256


def training_of(arm: str, device: torch.device, graphs: bool, dtype: str) -> Training:
    """Return a training of the blog's model at its own size."""
    task = type(STUDY.task)(name="cifar10", **STUDY.scales["paper"].settings | {"dtype": dtype})
    torch.manual_seed(0)
    model = task.model().to(device)
    example = torch.zeros(2, 3, 32, 32, device=device)
    chosen = read_arm(arm, task)
    regularized = fit(chosen, model, example=example, seed=1, steps=1000)
    optimizer = build_optimizer(task, model, example, device)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if dtype == "bfloat16" else "no")
    training = Training(task, model, optimizer, accelerator, 0, regularized)
    training.rates = LearningRate(task, optimizer, 1000)
    training.clock.memory.peak = 1
    training.model = accelerator.prepare(model)
    if graphs and device.type == "cuda":
        training.graphs = StepGraphs(optimizer, device, regularized.fitted if regularized else [])
    return training


def epochs(training: Training, device: torch.device, count: int) -> tuple[float, list[float]]:
    """Train for some epochs; return the milliseconds of a step in the last, and all losses."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=draws, dtype=torch.uint8).to(device)
    classes = torch.randint(0, 10, (IMAGES,), generator=draws).to(device)
    losses, took = [], 0.0
    for epoch in range(1, count + 1):
        begin = time.perf_counter()
        losses.append(train_epoch(training, (images, classes), epoch, lambda *_: None).loss)
        took = time.perf_counter() - begin
    return took / (IMAGES // 256) * 1e3, losses


def arms(names: tuple[str, ...], device: torch.device, dtype: str, how: str = "captured") -> None:
    """Print the plain loop and the other, captured or compiled, for each arm."""
    for arm in names:
        found = {}
        for other in (False, True):
            training = training_of(arm, device, other and how == "captured", dtype)
            if other and how == "compiled":
                training.compiled = CompiledForward()
            try:
                found[other] = epochs(training, device, 2)
                told = training.graphs.told() if training.graphs else ""
            except Exception as error:
                found[other], told = (float("nan"), [0.0]), f"{type(error).__name__}: {str(error)[:300]}"
        apart = max(abs(a - b) / abs(a) for a, b in zip(found[False][1], found[True][1], strict=False))
        times = f"{found[False][0]:6.2f} ms a step, {found[True][0]:6.2f} {how}"
        print(f"{arm:45} {times}, losses differ by {apart:.0e}; {told}", flush=True)


def jobs(most: int, dtype: str) -> None:
    """Print the steps a second of several processes together."""
    for graphs in ("on", "off"):
        for count in [n for n in (1, 2, 3, 4, 6, 8) if n <= most]:
            command = [sys.executable, __file__, "--one", graphs, "--dtype", dtype]
            started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
            each = [float(process.communicate()[0].split()[-1]) for process in started]
            print(f"graphs {graphs}, {count} processes: {sum(1e3 / ms for ms in each):.0f} steps a second", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=0, help="the most processes at once")
    parser.add_argument("--compile", action="store_true", help="compiled steps instead of captured ones")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.one:
        training = training_of("DropHead(p=0.2)", device, options.one == "on", options.dtype)
        print(epochs(training, device, 12)[0])
    elif options.jobs:
        jobs(options.jobs, options.dtype)
    elif options.compile:
        arms(("baseline", "DropHead(p=0.2)"), device, options.dtype, "compiled")
    else:
        arms(STUDY.arms, device, options.dtype)


if __name__ == "__main__":
    main()
