"""The time of a training step of every entry relative to the plain model's, measured alternately in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from headwise.lab.experiments.arm import read_arm
from headwise.lab.training.batches import epoch_steps, first_batch, lengths_of, make_batch, move, size
from headwise.lab.training.fit import fit, parameters_of
from headwise.lab.training.job import Order
from headwise.lab.training.measuring import now
from headwise.lab.training.optimizer import build_optimizer
from headwise.lab.training.phases import part_of
from headwise.lab.training.splits import training_examples
from headwise.lab.training.task_code import build_model
from headwise.lab.training.train import bare_step
from headwise_papers.league.cell import Cell
from headwise_papers.league.world_folder import STEP_TIMES, step_times
from headwise_verdict.files.durable import write_json
from headwise_verdict.results.answer import count

# rounds, alternating between the models, of which the first is a warm-up; steps per round
ROUNDS, STEPS = 8, 2


def time_steps(cells: Sequence[Cell], tell: Callable[[str], None]) -> None:
    """Time the steps of every cell with a choice, and write the ratios to the plain model into each world's folder.

    A round is two steps of each model; the ratio is the median over seven rounds of the entry's time divided by the
    plain model's time just before. On a CPU it is the processor time of one thread, on which other work on the machine
    has little influence.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for folder in dict.fromkeys(cell.place.folder for cell in cells):
            in_world = [cell for cell in cells if cell.place.folder == folder and cell.choice is not None]
            plain = next((cell for cell in in_world if cell.record.kind == "plain"), None)
            if plain is None:
                continue
            plain_step = _stepper(_order(plain))
            ratios = {
                cell.entry.name: _ratio(plain_step, _stepper(_order(cell))) for cell in in_world if cell is not plain
            }
            plain.place.claim()
            write_json(folder / STEP_TIMES, {**step_times(folder), plain.entry.name: 1.0, **ratios})
            tell(f"{plain.place.world.name}: {count(len(ratios), 'step')} timed against the plain model's")
    finally:
        torch.set_num_threads(threads)


def _order(cell: Cell) -> Order:
    assert cell.choice is not None
    return cell.place.order(cell.choice, cell.place.seeds[0])


def _ratio(plain: Callable[[], float], entry: Callable[[], float]) -> float:
    rounds = [(sum(plain() for _ in range(STEPS)), sum(entry() for _ in range(STEPS))) for _ in range(ROUNDS)]
    return statistics.median(entry_time / plain_time for plain_time, entry_time in rounds[1:])


def _stepper(order: Order) -> Callable[[], float]:
    """Return a function that trains a model, built as in a run, for one step on one batch and returns the seconds."""
    part, configuration, device = part_of(order.task(), 0), order.configuration, torch.device(order.device)
    task = part.task
    train, _ = training_examples(task, configuration, part.phase.data)
    torch.manual_seed(0)
    model = build_model(task).to(device)
    example = make_batch(task, move(first_batch(task, train, 2), device), None).inputs
    steps = task.steps or task.epochs * epoch_steps(task, size(train), lengths_of(task, train), configuration.draws)
    arm = read_arm(configuration.arm, task)
    handle = fit(arm, model, example=example, seed=configuration.draws, steps=steps)
    optimizer = build_optimizer(task, model, example, device, parameters_of(arm, handle))
    examples, generator = move(first_batch(task, train, task.batch_size), device), torch.Generator().manual_seed(0)
    clock = time.process_time if device.type == "cpu" else lambda: now(device)
    model.train()

    def step() -> float:
        start = clock()
        bare_step(task, model, handle, optimizer, examples, generator)
        return clock() - start

    return step
