"""Measure the speed of the main job: the loop's overhead, images per second, start-up, two jobs against one.

make bench-study
make bench-study ARGS="--only overhead --rounds 7"
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from headwise_papers.blog_cifar10 import STUDY
from timing import interleave, machine, ratio

from headwise.lab.experiments.task import Task
from headwise.lab.training.optimizer import LearningRate
from headwise.lab.training.train import Training, train_epoch

IMAGES = 1024
# the block that timm also has: a norm before attention
PAPER = type(STUDY.task)(name="cifar10", **STUDY.scales["paper"].settings | {"norm": "pre"})
SMALL = type(STUDY.task)(name="cifar10", **STUDY.scales["small"].settings | {"norm": "pre"})


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 10, (IMAGES,), generator=generator)


def overhead(rounds: int) -> None:
    """Print the time of an epoch through the study's loop over that of a bare loop on the same tensors (bar 1.05)."""
    for scale, task, data in (("paper", PAPER, _data()), ("small", SMALL, _data())):
        torch.manual_seed(0)
        model = task.model()
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        training = Training(task, accelerator.prepare(model), optimizer, accelerator, 0)
        training.rates = LearningRate(task, optimizer, 1000)
        plain = task.model()
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

        def bare(task=task, data=data, plain=plain, plain_optimizer=plain_optimizer) -> int:
            images, labels = data
            steps = torch.randperm(len(images)).split(task.batch_size)
            for index in steps:
                output = plain(task.transform(images[index], None))
                loss = F.cross_entropy(output, labels[index])
                plain_optimizer.zero_grad()
                loss.backward()
                plain_optimizer.step()
            return len(steps)

        def study(training=training, data=data) -> int:
            return train_epoch(training, data, 0, lambda *_: None).steps

        if bare() != study():
            raise AssertionError("the two loops take different numbers of steps: their times cannot be compared")
        times = interleave({"bare": bare, "study": study, "bare again": bare}, rounds, warmup=1)
        print(
            f"loop overhead, {scale} scale of the blog's ViT, batches of {task.batch_size}, "
            f"{statistics.median(times['bare']):.2f} s an epoch, "
            f"study / bare: {ratio(times, 'study', 'bare'):.3f} (bar 1.05; bare against itself "
            f"{ratio(times, 'bare again', 'bare'):.3f})"
        )


def images_per_second(rounds: int) -> None:
    """Print images per second through the study's loop and through timm's ViT of that size with torch's DataLoader."""
    from torch.utils.data import DataLoader, TensorDataset

    with contextlib.suppress(ImportError):
        import torchvision_stub  # noqa: F401
    import timm.layers
    from timm.models.vision_transformer import VisionTransformer

    task, (images, labels) = PAPER, _data()
    accelerator = Accelerator(cpu=True)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    training = Training(task, accelerator.prepare(model), optimizer, accelerator, 0)

    # timm's models take the head size from the width; its attention layer takes any.
    class Attention(timm.layers.Attention):
        def __init__(self, dim: int, num_heads: int, **others) -> None:
            super().__init__(dim, num_heads, attn_head_dim=64, **others)

    shape = {"embed_dim": 128, "depth": 6, "num_heads": 5, "mlp_ratio": 1.0, "num_classes": 10}
    other = VisionTransformer(img_size=32, patch_size=4, qkv_bias=True, attn_layer=Attention, **shape)
    assert sum(p.numel() for p in other.parameters()) == sum(p.numel() for p in model.parameters())
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=task.batch_size, shuffle=True)

    def timm_epoch() -> None:
        for batch, target in loader:
            loss = F.cross_entropy(other(task.transform(batch, None)), target)
            its_optimizer.zero_grad()
            loss.backward()
            its_optimizer.step()

    def loading() -> None:
        for batch, _ in loader:
            task.transform(batch, None)

    runs = {
        "study": lambda: train_epoch(training, (images, labels), 0, lambda *_: None),
        "timm": timm_epoch,
        "loading": loading,
    }
    times = interleave(runs, rounds, warmup=1)
    for name in ("study", "timm"):
        print(f"{name}: {IMAGES / statistics.median(times[name]):.0f} images/s")
    print(f"of timm's epoch, torch's DataLoader alone takes {ratio(times, 'loading', 'timm'):.1%}")


def start_up(rounds: int) -> None:
    """Print the time of `headwise --help` (bar 0.5 s), of importing torch, and of a run of one epoch from a cold
    start."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def median(*command: str) -> float:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    print(
        f"headwise --help: {median('-m', 'headwise', '--help'):.2f} s (bar 0.5; import torch alone "
        f"{median('-c', 'import torch'):.2f} s)"
    )
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [
            sys.executable,
            "-u",
            "-m",
            "headwise",
            "compare",
            "digits",
            "--seeds",
            "1",
            "--epochs",
            "1",
            "--jobs",
            "1",
            "--out",
            folder,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        # The first epoch is 8 steps; its line is on disk right after them, so this bounds the first step from above.
        while process.poll() is None and not any(p.stat().st_size for p in Path(folder).glob("runs/*/metrics.jsonl")):
            time.sleep(0.02)
        print(
            f"first epoch (8 steps) of the default study on disk after {time.perf_counter() - start:.1f} s (bar for "
            "the first step 6 s)"
        )
        process.kill()
        process.wait()


def jobs() -> None:
    """Print how much faster two jobs are than one on the same runs (bar 1.6)."""
    times = {}
    for count in (1, 2, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            methods = [
                x for m in ("DropColumn(p=0.2)", "DropHead(p=0.2)", "NeuTRENO(strength=0.6)") for x in ("--method", m)
            ]
            command = ["-m", "headwise", "compare", "digits", "--seeds", "4", "--jobs", str(count), "--out", folder]
            subprocess.run(
                [sys.executable, *command, *methods],
                check=True,
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            times.setdefault(count, []).append(time.perf_counter() - start)
    print(
        f"one job {min(times[1]):.1f} s, two jobs {min(times[2]):.1f} s: {min(times[1]) / min(times[2]):.2f} x (bar "
        "1.6)"
    )


def _bare_loop(task: Task) -> Callable[[], None]:
    """Run some tens of training steps of a plain model of the task, without leaving any state."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = task.data("train")[0][: task.batch_size]

    def run() -> None:
        for _ in range(20):
            optimizer.zero_grad()
            model(inputs).float().square().mean().backward()
            optimizer.step()

    return run


def growth(rounds: int) -> None:
    """Print the time of a run at the start and at the end of 100 tiny runs per round in one process (bar: neither time
    nor memory grows).

    A bare training loop is timed after every run: a machine whose speed drifts moves both.
    """
    import psutil

    from headwise.lab.comparing.compare import compare
    from headwise.lab.comparing.comparison import Comparison
    from headwise.lab.comparing.progress import PlainLines
    from headwise.lab.engines.local import HereEngine
    from headwise.lab.studies.digits import STUDY as DIGITS
    from headwise.lab.training.execution import execute
    from headwise_verdict.reporting import write

    runs = 100 * rounds
    torch.set_num_threads(1)
    changes = {
        "epochs": 1,
        "train_size": 50,
        "test_size": 50,
        "depth": 2,
        "dim": 16,
        "head_statistics": ("attention_entropy",),
    }
    small = DIGITS.model_copy(
        update={"task": type(DIGITS.task)(**changes), "methods": ("SigmaReparam()",), "seeds": runs // 2}
    )
    process, seconds, bare, memory = psutil.Process(), [], [], []
    reference = _bare_loop(small.task)
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(small, Path(folder), HereEngine(), PlainLines(io.StringIO()), watch=True)
        for configuration in small.configurations():
            start = time.process_time()
            execute(comparison.order(configuration), lambda event: None)
            seconds.append(time.process_time() - start)
            start = time.process_time()
            reference()
            bare.append(time.process_time() - start)
            memory.append(process.memory_info().rss)
        start, began = time.perf_counter(), time.process_time()
        compare(comparison)
        write(Path(folder))
        took, used = time.perf_counter() - start, time.process_time() - began
    (early, late), (before, after) = (
        (statistics.median(times[runs // 10 : runs // 4]), statistics.median(times[-runs // 5 :]))
        for times in (seconds, bare)
    )
    drift = after / before
    print(
        f"{runs} tiny runs: processor time of a run {early:.3f} s at the start, {late:.3f} s at the end: "
        f"{late / early:.2f} x; "
        f"of a bare loop in between {drift:.2f} x; run over bare loop {late / early / drift:.2f} x (bar 1.05)"
    )
    per_run = (statistics.median(memory[-runs // 10 :]) - statistics.median(memory[runs // 5 : 3 * runs // 10])) / (
        0.7 * runs
    )
    print(
        f"memory of the process: {memory[runs // 5] / 2**20:.0f} MiB after {runs // 5} runs, {memory[-1] / 2**20:.0f} "
        f"MiB at the end, {per_run / 1024:.1f} KiB a run"
    )
    print(
        f"{runs} finished runs are resumed and reported in {took:.1f} s, {used:.1f} s of processor time (bar 10 s for "
        "500)"
    )


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "overhead": overhead,
        "images": images_per_second,
        "startup": start_up,
        "jobs": lambda rounds: jobs(),
        "growth": growth,
    }
    parser.add_argument("--only", choices=list(parts))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(2)
    print(machine(2))
    for name, run in parts.items():
        if options.only in (None, name):
            run(options.rounds)


if __name__ == "__main__":
    main()
