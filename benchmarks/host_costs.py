"""What each method costs the host: the time in which Python and torch call operators, without their arithmetic.

`cuda_costs.py --host` runs it on a CPU: twelve layers of 16 channels and two heads, and one token, for which a step
computes next to nothing. Time is that of the processor, and the shortest of many steps beside plain ones in the same
loop, since whatever else the machine does only makes steps longer. Two counts depend on no clock: the operators of
torch in a step, and the calls that Python makes. The same step with 96 channels says how much of a row is arithmetic.
"""

from __future__ import annotations

import csv
import gc
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import training_models

# The first line names the machine and the versions.
KEPT = Path(__file__).parent / "host_costs.csv"
COLUMNS = ("method", "step", "plain", "wide_step", "wide_plain", "operators", "calls", "path")
# microseconds of the host a layer and method
BUDGET = 60
LAYERS, HEADS, NARROW, WIDE, ROUNDS = training_models.LAYERS, 2, 16, 96, 50
Row = dict[str, str]
INTRODUCTION = """
The time in which Python and torch call operators, measured on a CPU ({machine}): 12 layers of 16 channels and two
heads, and one token, for which a step computes next to nothing; forward, backward and what follows the step. *Step /
plain* divides the shortest of many steps by the shortest plain one of the same loop, in time of the processor. *µs a
layer* is what that adds to a plain layer, which takes {plain} µs in the fastest loop. *With 96 channels* is the same
for wider layers: what it has more is arithmetic, which a GPU does meanwhile. *Operators* of torch that call no
others, and *calls of Python*, of its own functions and of those in C, are counted, and depend on no clock: a test fails
when they grow. A CPU computes some methods by other operators than a GPU: a draw takes some 30 and there one kernel,
a decomposition stands for one kernel of all layers. Where *kernels on a GPU* are far fewer than operators, the row is a
bound from above. The last column names what computed attention. {within} of {rows} rows keep the budget of 60 µs for
each layer. By least squares over the rows an operator takes {operator} µs and a call of Python, with what it does,
{call} µs on this machine: the {least} calls that even the row with the fewest makes, hooks of modules, the way of a
call to its layer and what follows a step, bound all rows from below, and operators most of them.
"""


@contextmanager
def channels(width: int) -> Iterator[None]:
    """Make and run layers with so many channels inside."""
    before = training_models.WIDTH, training_models.HEADS
    training_models.WIDTH, training_models.HEADS = width, HEADS
    try:
        yield
    finally:
        training_models.WIDTH, training_models.HEADS = before


def stepping(method: str) -> tuple[Callable[[], None], Any]:
    """Return a training step of the layers with a method, and the handle; None for "plain"."""
    import torch

    import headwise
    from headwise.attend.core.method import REGISTRY

    torch.manual_seed(0)
    x = torch.randn(1, 1, training_models.WIDTH)
    net = torch.nn.Sequential(*(training_models.Block(False) for _ in range(LAYERS)))
    if method == "plain":
        return lambda: net(x).square().mean().backward(), None
    handle = headwise.regularize(net, eval(method, {}, dict(REGISTRY)), example=x.expand(1, 4, -1))

    def step() -> None:
        (net(x).square().mean() + handle.loss()).backward()
        handle.after_step()

    return step, handle


def measure(names: list[str]) -> list[Row]:
    """Return the rows of methods, and print them."""
    import torch

    torch.set_num_threads(1)
    rows = []
    for name in names:
        row = {"method": name}
        for prefix, width, rounds in (("", NARROW, ROUNDS), ("wide_", WIDE, ROUNDS // 2)):
            with channels(width):
                plain, ours = timed(name, rounds)
            row |= {f"{prefix}step": f"{ours / plain:.3f}", f"{prefix}plain": f"{plain / LAYERS * 1e6:.0f}"}
        rows.append(row | counted(name))
        print(*rows[-1].values(), flush=True)
    return rows


def timed(name: str, rounds: int) -> list[float]:
    """Return the seconds of the shortest plain step and of the shortest one with a method."""
    steps = stepping("plain")[0], stepping(name)[0]
    shortest = [float("inf")] * 2
    gc.disable()
    for turn in range(rounds):
        for index, step in enumerate(steps):
            start = time.process_time()
            step()
            if turn >= rounds // 10:
                shortest[index] = min(shortest[index], time.process_time() - start)
    gc.enable()
    return shortest


def counted(name: str) -> Row:
    """Return what a method adds to a layer, operators and calls of Python, and the kernels that computed attention."""
    with channels(NARROW):
        (plain, _), (ours, handle) = stepping("plain"), stepping(name)
        for step in (plain, ours):
            # Gradients are there from the second step on.
            step(), step()
        operators, calls = ((of(ours) - of(plain)) / LAYERS for of in (_operators, _calls))
    path = sorted({kernel for fitted in handle.fitted for kernel in fitted.kernels})
    return {"operators": f"{operators:.1f}", "calls": f"{calls:.1f}", "path": ", ".join(path)}


def _operators(step: Callable[[], None]) -> int:
    """Return the operators of torch in a step that call no others."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    ours = [event for event in profile.events() if event.name.startswith(("aten::", "headwise::"))]
    callers = {id(event.cpu_parent) for event in ours}
    return sum(id(event) not in callers for event in ours)


def _calls(step: Callable[[], None]) -> int:
    """Return the calls that Python makes in a step, of its own functions and of those in C."""
    made = 0

    def note(frame: FrameType, event: str, given: Any) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return made


def write(rows: list[Row], of_machine: str) -> None:
    """Keep rows."""
    with KEPT.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {of_machine}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def kept() -> tuple[str, list[Row]]:
    """Return the machine of the kept rows, and the rows."""
    of_machine, *lines = KEPT.read_text(encoding="utf-8").splitlines()
    return of_machine[2:], list(csv.DictReader(lines))


def grown(new: list[Row], old: list[Row]) -> list[str]:
    """Return a line for each count that is larger than the kept one."""
    before = {row["method"]: row for row in old}
    return [
        f"{row['method']}: {name} {before[row['method']][name]} -> {row[name]}"
        for row in new
        for name in ("operators", "calls")
        if float(row[name]) > 1.01 * float(before[row["method"]][name]) + 0.5
    ]


def page(kernels: dict[str, float]) -> list[str]:
    """Return the part of docs/cuda_costs.md on the time of the host; `kernels` are those on a GPU, by method."""
    of_machine, rows = kept()
    added = {row["method"]: microseconds(row, rows) for row in rows}
    within = sum(round(narrow) <= BUDGET for narrow, _ in added.values())
    operator, call = _shares(rows, added)
    figures = {
        "machine": of_machine,
        "plain": f"{min(float(row['plain']) for row in rows):.0f}",
        "within": within,
        "rows": len(rows),
        "operator": f"{operator:.1f}",
        "call": f"{call:.1f}",
        "least": f"{min(float(row['calls']) for row in rows):.0f}",
    }
    lines = textwrap.wrap(" ".join(INTRODUCTION.split()).format(**figures), 120)
    lines += ["", "| method | step / plain | µs a layer | with 96 channels | operators | calls of Python "]
    lines[-1] += "| kernels on a GPU | attention on the CPU |"
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: -float(row["step"])):
        narrow, wide = added[row["method"]]
        cells = [f"{float(row['step']):.2f}", f"{narrow:.0f}", f"{wide:.0f}", row["operators"], row["calls"]]
        cells += [f"{kernels[row['method']]:.3g}", row["path"] or "the host's own"]
        lines.append(f"| `{row['method']}` | {' | '.join(cells)} |")
    return ["## Time of the host", "", *lines, ""]


def _shares(rows: list[Row], added: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the µs of an operator and of a call that fit the rows with few channels best."""
    points = [(float(row["operators"]), float(row["calls"]), added[row["method"]][0]) for row in rows]
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    xz, yz = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    below = xx * yy - xy * xy
    return (xz * yy - yz * xy) / below, (yz * xx - xz * xy) / below


def microseconds(row: Row, rows: list[Row]) -> tuple[float, float]:
    """Return what a row adds to a layer with few channels and with more.

    Its ratio counts, at the time of the fastest plain step of all rows: other load makes both steps of a row longer.
    """
    fastest = (min(float(one[name]) for one in rows) for name in ("plain", "wide_plain"))
    plain, wide = fastest
    return (float(row["step"]) - 1) * plain, (float(row["wide_step"]) - 1) * wide
