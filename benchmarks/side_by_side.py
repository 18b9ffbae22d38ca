"""How many runs are fastest side by side on one device: steps of the blog's model in one process, two and more.

python benchmarks/side_by_side.py               # prints steps a second of each number of processes, and the best
python benchmarks/side_by_side.py --device cpu --counts 1,2 --seconds 0.5

The processes start once and train when they are asked to, so that all numbers take half a minute. A larger number of
processes is the best one only if it makes 5 % more steps: memory and waiting cost something too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext

COUNTS = (1, 2, 3, 4, 6)
# the blog's; a CPU tries the program, not the device
BATCHES = {"cuda": 256, "cpu": 2}
GAIN = 1.05


def best(rates: dict[int, float]) -> int:
    """Return the number of processes to use, of the steps a second that each number makes in all."""
    chosen = min(rates)
    for processes in sorted(rates):
        if rates[processes] > GAIN * rates[chosen]:
            chosen = processes
    return chosen


def train(device_name: str) -> None:
    """Train for as many seconds as each line of standard input says, and print the steps a second."""
    import dry_study
    import torch
    from study_steps import prepared

    from headwise.lab.training.step_graphs import WARM, StepGraphs
    from headwise.lab.training.train import _step

    torch.set_num_threads(1)
    dry_study.pretend()
    device = torch.device(device_name)
    training, examples, _ = prepared("blog-cifar10", "paper", device, nullcontext())
    training.model.train()
    if device.type == "cuda":
        training.graphs = StepGraphs(training.optimizer, device)
    index = torch.zeros(BATCHES[device.type], dtype=torch.long, device=device)
    done = 0

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def step() -> None:
        nonlocal done
        done += 1
        # the task draws nothing
        _step(training, examples, (index,), [None], done)

    for _ in range(WARM + 2):
        step()
    finish()
    print("ready", flush=True)
    for line in sys.stdin:
        start, before, seconds = time.perf_counter(), done, float(line)
        while time.perf_counter() - start < seconds:
            step()
            if done % 8 == 0:
                # a queue of many steps would go on after the time is over
                finish()
        finish()
        print((done - before) / (time.perf_counter() - start), flush=True)


def measure(device: str, counts: tuple[int, ...], seconds: float) -> dict[int, float]:
    """Return the steps a second that each number of processes makes in all."""
    command = [sys.executable, __file__, "--train", "--device", device]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(max(counts))
    ]
    try:
        for process in running:
            if (said := _line(process)) != "ready":
                raise RuntimeError(f"a process that trains on {device} ended before its first step: {said!r}")
        rates = {}
        for count in counts:
            for process in running[:count]:
                assert process.stdin is not None
                process.stdin.write(f"{seconds}\n")
                process.stdin.flush()
            rates[count] = sum(float(_line(process)) for process in running[:count])
        return rates
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of processes")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each number")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.device)
        return
    rates = measure(options.device, tuple(map(int, options.counts.split(","))), options.seconds)
    told = ", ".join(f"{count}: {rate:.0f}" for count, rate in rates.items())
    print(f"steps a second of all processes together, by their number: {told}")
    print(json.dumps({"rates": rates, "best": best(rates)}))


if __name__ == "__main__":
    main()
