"""What a training step of each study of `make gpu` launches, and whether it and its evaluations are captured: counted
on fake CUDA tensors, without a device.

python benchmarks/study_steps.py                    # count all, write benchmarks/study_steps.csv and docs/gpu.md
python benchmarks/study_steps.py --only sigma-vit   # count some and print them
python benchmarks/study_steps.py --page             # write the table in docs/gpu.md from the kept rows
python benchmarks/study_steps.py --host             # on this CPU: processor time of a step of one example
python benchmarks/study_steps.py --host --compile   # and of a compiled one, with their ratio
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from on_a_gpu import PARTS

ROOT = Path(__file__).parents[1]
KEPT, PAGE = ROOT / "benchmarks" / "study_steps.csv", ROOT / "docs" / "gpu.md"
MARKS = "<!-- steps: begin (python benchmarks/study_steps.py) -->", "<!-- steps: end -->"
# of a step: operators that launch kernels, operators on tensors of the CPU, and waits for the device
COUNTED = ("launches", "on_cpu", "waits")
COLUMNS = ("study", "scale", *COUNTED, "step", "evaluations")
# training examples, steps in which they are passed, and batches of one example in an evaluation
EXAMPLES, STEPS, BATCHES = 48, 3, 6
# `--host`: steps, of which the shortest counts
ROUNDS = 20


def studies() -> list[tuple[str, str]]:
    """Return the studies of `make gpu` with their scales, each once."""
    words = [part.command.split() for part in PARTS if part.name.startswith("studies-")]
    return list(dict.fromkeys((one[3], one[one.index("--scale") + 1]) for one in words))


def count(asked: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Count a step of the plain model of each study."""
    sys.path.append(str(ROOT / "tests"))
    from integration import fake_device

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--counted-here"],
            input="".join(f"{study}\t{scale}\n" for study, scale in asked),
            text=True,
            capture_output=True,
            env={**fake_device.environment(Path(folder)), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def counted_here() -> None:
    """Count the studies that standard input names, in a process that has the fake device."""
    # before headwise is imported, whose attention it counts
    import cuda_counter
    import dry_study
    import torch

    from headwise.lab.training import step_graphs

    class Counter(cuda_counter.Counter):
        """Counts the fused optimizers that read their rate from the device too, of which there is no fake form."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).endswith("_.tensor_lr"):
                self.kernels += 1
                return None
            return super().__torch_dispatch__(func, types, args, kwargs)

    cuda_counter.believe_in_cuda()
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_: True
    dry_study.pretend()
    step_graphs._aside = lambda device, run: run()
    for line in sys.stdin:
        study, scale = line.rstrip("\n").split("\t")
        print(json.dumps({"study": study, "scale": scale, **counted(study, scale, Counter())}), flush=True)


def counted(name: str, scale: str, cuda: Any) -> dict[str, Any]:
    """Return the counts of a step of a study's plain model, and how its steps and evaluations are taken."""
    import torch

    from headwise.lab.training.batches import size
    from headwise.lab.training.evaluate import evaluate
    from headwise.lab.training.evaluation_graphs import EvaluationGraphs
    from headwise.lab.training.preflight import evaluations_of
    from headwise.lab.training.step_graphs import WARM, StepGraphs, why_not
    from headwise.lab.training.train import train_epoch

    device = torch.device("cuda")
    training, train, held_out = prepared(name, scale, device, cuda)
    told: list[str] = []

    def record(run: Any) -> Any:
        cuda.recording = True
        before = len(cuda.waits)
        try:
            result = run()
        finally:
            cuda.recording = False
        told.extend(cuda.waits[before:])
        return result, lambda: None

    with cuda:

        def epoch(steps: int) -> list[int]:
            training.last_step = training.step + steps
            cuda.clear()
            train_epoch(training, train, 1, lambda *_: None)
            return [cuda.kernels, cuda.on_cpu, len(cuda.waits)]

        # the first step makes the optimizer's state; what an epoch does besides its steps is left out
        _, one, all_steps = epoch(1), epoch(1), epoch(STEPS)
        row: dict[str, Any] = {
            name: (more - less) // (STEPS - 1) for name, less, more in zip(COUNTED, one, all_steps, strict=True)
        }
        row["step"] = why_not(training.task, device, 1)
        if not row["step"]:
            training.graphs = StepGraphs(training.optimizer, device, (), record)
            for _ in range(WARM + 2):
                epoch(1)
            row["step"] = "; ".join([training.graphs.told(), *told])
        training.evaluation_graphs = EvaluationGraphs(device, (), record)
        told.clear()
        for evaluation in evaluations_of(training.task):
            examples = held_out(evaluation.split)
            if examples is not None and size(examples) > WARM:
                evaluate(training, evaluation, examples)
        row["evaluations"] = "; ".join([training.evaluation_graphs.told(), *told])
    return row


def prepared(name: str, scale: str, device: Any, cuda: Any) -> tuple[Any, Any, Any]:
    """Return the training of the first phase of a study's plain model, its examples, and those of a split."""
    import torch

    from headwise.lab.comparing.choosing import choose_study
    from headwise.lab.comparing.request import Request
    from headwise.lab.studies.registry import Installed
    from headwise.lab.training.batches import make_batch, move, size, take
    from headwise.lab.training.optimizer import LearningRate, build_optimizer
    from headwise.lab.training.phases import part_of
    from headwise.lab.training.train import Training

    study = choose_study(Request(study=name, studies=Installed(), scale=scale, device="cpu"))
    # launches do not depend on the size of a batch
    task = part_of(study.task, 0).task.model_copy(update={"evaluation_batch_size": 1, "train_size": None})
    torch.manual_seed(0)
    model = task.model()
    train = take(task.data("train"), slice(0, EXAMPLES * task.accumulation))
    task = task.model_copy(update={"batch_size": size(train) // (STEPS * task.accumulation)})
    accelerator = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=device,
        reduce=lambda tensor, how: tensor,
        unwrap_model=lambda prepared: prepared,
    )

    def held_out(split: str) -> Any:
        examples = task.data(split)
        return None if examples is None else move(take(examples, slice(0, BATCHES)), device)

    with cuda:
        model.to(device)
        train = move(train, device)
        example = make_batch(task, take(train, slice(0, 2)), None).inputs
        if task.dtype == "bfloat16":
            # as Accelerate does
            model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
        optimizer = build_optimizer(task, model, example, device, [])
        training = Training(task, model, optimizer, accelerator, 0, reported=float("inf"))
        training.rates = LearningRate(task, optimizer, 100)
        # memory is measured in one step alone
        training.clock.memory.peak = 1
    return training, train, held_out


def grown(new: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """Return a line for each count that is larger than the kept one, and for each step that is taken otherwise."""
    known = {(row["study"], row["scale"]): row for row in before}
    lines = []
    for row in new:
        old = known.get((row["study"], row["scale"]))
        if old is None:
            lines.append(f"{row['study']} has no kept row")
            continue
        lines += [f"{row['study']}: {at} {old[at]} -> {row[at]}" for at in COUNTED if int(row[at]) > int(old[at])]
        lines += [f"{row['study']}: {at} {old[at]!r} -> {row[at]!r}" for at in COLUMNS[-2:] if row[at] != old[at]]
    return lines


def kept() -> list[dict[str, Any]]:
    """Return the kept rows; figures as text."""
    with KEPT.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def page(rows: list[dict[str, Any]]) -> str:
    """Return docs/gpu.md with the table of the rows."""
    head = ["study, scale", "launches", "operators on the CPU", "waits", "steps", "evaluations"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"`{row['study']}`, `{row['scale']}`", *(str(row[name]) for name in COLUMNS[2:])]
        lines.append(f"| {' | '.join(cells)} |")
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    return "\n".join([before + MARKS[0], *lines, MARKS[1]]) + rest.split(MARKS[1])[1]


def host(asked: list[tuple[str, str]], *, also_compiled: bool) -> None:
    """Print the processor time of a step of one example of each study, on this CPU with one thread."""
    from contextlib import nullcontext

    import dry_study
    import torch
    from timing import machine

    from headwise.lab.training.batches import take
    from headwise.lab.training.compiled_forward import CompiledForward

    torch.set_num_threads(1)
    dry_study.pretend()
    print(
        f"{machine(1)}; processor time of a step of one example, "
        f"forward, backward and optimizer, the shortest of {ROUNDS}"
    )
    for name, scale in asked:
        training, train, _ = prepared(name, scale, torch.device("cpu"), nullcontext())
        one = take(train, slice(0, 2))
        training.model.train()
        plain = seconds_of_a_step(training, one)
        line = f"{name:16} {1e3 * plain:6.1f} ms"
        if also_compiled:
            training.compiled = CompiledForward()
            seconds = seconds_of_a_step(training, one)
            line += f"; compiled {1e3 * seconds:6.1f} ms, {seconds / plain:.2f} of it"
        print(line, flush=True)


def seconds_of_a_step(training: Any, examples: Any) -> float:
    """Return the shortest processor time of a step on the first example."""
    import time

    import torch

    from headwise.lab.training.train import _step

    draws, index, seconds = torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.long), []
    for at in range(ROUNDS):
        start = time.process_time()
        _step(training, examples, (index,), [training.task.draw(1, draws)], at + 1)
        seconds.append(time.process_time() - start)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="these studies alone; what is counted is printed")
    parser.add_argument("--page", action="store_true", help="write the page from the kept rows")
    parser.add_argument("--host", action="store_true", help="time steps of one example here")
    parser.add_argument("--compile", action="store_true", help="time compiled steps too")
    parser.add_argument("--counted-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asked = [one for one in studies() if not options.only or one[0] in options.only.split(",")]
    if options.counted_here:
        counted_here()
    elif options.host:
        host(asked, also_compiled=options.compile)
    elif options.only:
        for row in count(asked):
            print(json.dumps(row, indent=1))
    else:
        if not options.page:
            rows = count(studies())
            with KEPT.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
        PAGE.write_text(page(kept()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
