"""What each method adds to a training step on a GPU: counted without one, and measured where there is one.

make cuda-costs                            # count all, write benchmarks/cuda_costs.csv and docs/cuda_costs.md
make cuda-costs ARGS="--only DropKey,watch"  # count some and print them
make cuda-costs ARGS="--only watch --keep"  # count some, keep them in place of their rows, and write the page
make cuda-costs ARGS=--page                # write docs/cuda_costs.md from the kept rows
python benchmarks/cuda_costs.py --host     # on this CPU: the time of Python and of calls of operators; kept
python benchmarks/cuda_costs.py --measure  # on a GPU: measured steps next to the counted ones

Counted, on fake tensors: operators that launch kernels, the bytes that they read and write, their matrix products, the
largest tensor, tensors of the CPU, and waits for the device. The least time of an operator is the largest of 2 µs, its
bytes at 2.85 TB/s, and its products at the rate of an H100; a step is the sum.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import host_costs
from training_models import LAYERS, MODELS

ROOT = Path(__file__).parents[1]

KEPT, PAGE = ROOT / "benchmarks" / "cuda_costs.csv", ROOT / "docs" / "cuda_costs.md"
COUNTED_LAYERS = 2
# methods whose forms differ by their settings
FORMS = (
    "DropKey(unit='column')",
    "DropAttention(unit='element')",
    "Decorrelation(probes=4)",
    "Decorrelation(rows=16)",
    "EntropyPenalty(rows=128)",
    "AttentionNormPenalty(rows=128)",
    "Disagreement(on='position', rows=16)",
    "GatedOutput(per='element', source='both', rank=16)",
)
# the step if one of the three bounds of an operator's time alone counted
ALONE = ("by_kernels", "by_bytes", "by_products")
PHASES = ("forward", "backward", "after")
COLUMNS = (*PHASES, "megabytes", "gigaflops", "largest", "on_cpu", "waits", "step")
# largest step over the plain one: every method, and those that must meet every pair of heads or tokens
BUDGET, BUDGET_OF_PAIRS = 1.05, 1.3
OF_PAIRS = ("Decorrelation", "ReAttention", "DifferentialAttention")
# most kernels of a layer: of every method, of penalties, and of those whose kernels serve the whole model
KERNELS, KERNELS_OF_PENALTIES, KERNELS_OF_A_MODEL = 6, 8, 16
OF_A_MODEL = ("SigmaReparam", "SpectralNorm", "WeightNorm", "SpectralCap")
MEGABYTE = 1 << 20
INTRODUCTION = """
Each figure is what a method adds to **one layer** in a training step, counted on fake tensors without a device (eager,
bf16, two layers, the second step):

- *kernels*: operators that launch them, in forward, in backward and after the step. One that serves all layers at once
  counts with a twelfth in each;
- *MiB* and *GFLOP*: the bytes that they read and write, and their matrix products;
- *step / plain*: the step of the whole model over the plain one, where an operator takes the largest of 2 µs, its bytes
  at 2.85 TB/s and its products at the rate of an H100. *By kernels*, *by bytes* and *by products*: the same if one of
  these three alone counted, which tells [what bounds a row](#what-bounds-the-rows).

The time in which Python launches kernels is left out; the last table has it. `make cuda-costs` writes this page, and a
test fails when a figure grows (`tests/kernels/test_cuda_costs.py`). `benchmarks/cuda_costs.csv` has further columns:
the largest tensor in MiB, operators on tensors of the CPU, and waits for the device.
""".strip().splitlines()
BOUNDS = """
Where a kernel of ours computes attention, it multiplies nine matrices and fused attention seven, since its gradients
are sums in a fixed order, at 0.45 of that kernel's rate. That alone makes a step of GPT-2 small 1.09 and one of
ViT-B/16 1.04 of the plain one, and bounds SoftCap, Softpick and StableSoftmax. Seven products, with the gradient of
queries summed by atomic additions in no fixed order, would leave 1.06 at that rate. Those additions in fp32, 4.5 for
each number where blocks of keys have 128, move 216 MiB a layer, or twice that where memory is read too: 0.02 to 0.05 of
a step, against 0.03 saved. Partial sums for each block of keys, in a fixed order, move as much. 1.05 needs half of
fused attention's rate.

ForgettingAttention is computed by that kernel, and adds the gradient of the layer's input through its gates. Corrected
on 29 November 2026: flash attention takes heads of one size. Where values are narrower than queries and keys, torch
runs another kernel, which is now counted at 0.55 of flash attention's rate, as with a mask. By that rate a causal
ForgettingAttention, which widened queries and keys then and stood here with 1.083, took 1.135 (GPT-2 small).
`Decorrelation(probes=4)`, whose signs are narrower than a head, rose from 1.078 to 1.110 and for ViT-B/16 from 1.094 to
1.115. By estimate, padding them to the head size for flash attention would take as long as that saves.

A full reading's products of rows, columns and pairs of heads alone make 1.19 (GPT-2) and 1.14 (ViT); most of the rest
is some 180 small kernels a layer, sums over what those leave. What follows from the mask alone is counted once for all
layers where there is neither mask nor padding. With `every=50` a reading adds 0.6 % to training.

What else bounds rows above the budget: GFSA attends twice, and the second map's products alone make 1.05 (GPT-2) and
1.04 (ViT), to which it adds gradients of q, k and v and its mixture. ContraNorm's head is as wide as the model, whose
products alone make 1.09 and 1.03; the rest is its matrix by blocks. Gates read and write the layer's input and output,
24 or 37 MiB a layer, once for each product, gate and gradient, and the gradient of the input twice more. Disagreement's
and the penalties' `rows=` gather queries of every head, and adding their gradients to the whole ones reads and writes
all of q.

What SpectralCap adds depends on the weights. Counted is a step in which every matrix has singular values near the limit
and is cut once, in fewer than 13 directions: one program for each matrix, which reads it some 50 times from L2, at 75
GB/s. A matrix far below the limit takes 8 readings, and 16 further directions above it take some 40, 1 ms for all.

ReAttention needs all heads of an entry and whole rows of each head. No kernel's registers hold both, so weights of some
samples or queries are written to memory of a fixed size, half of the matrix where the call is causal, mixed over heads
in place and read by products: their bytes bound it.

Decorrelation multiplies each query's weights with each other's over all keys that both see, once for the value and once
for the gradients: 275 GFLOP in a layer of GPT-2 small, counted at 0.7 of fused attention's rate. That alone takes 1.22
of the plain step, and what it reads and writes, mostly Gram matrices of all heads, twice, alone 1.34. It is 0.13 over
its budget. The Gram matrices are symmetric: with half of them it would take about 1.37, by estimate. `rows=` and
`probes=` need neither.

Columns that a causal call drops get lower logits by one more coordinate. Its wider copies of q, k and v, and their
gradients, alone make 1.047 (GPT-2); a head of 64 then runs the tiles of 96 of flash attention, half as much work again,
1.026 alone. By estimate, not by count, our own kernel would take 1.11, and keys gathered for it would save only the
dropped share of that.
""".strip().splitlines()


def subjects() -> list[str]:
    """Return every method at its defaults, the forms of some, and a reading of every statistic."""
    from headwise.attend import methods as shelf
    from headwise.attend.core.method import REGISTRY

    known = [form for form in FORMS if _accepted(form, REGISTRY)]
    return [*(f"{name}()" for name in shelf.__all__), *known, "watch"]


def _accepted(form: str, registry: dict[str, Any]) -> bool:
    try:
        eval(form, {}, dict(registry))
    except TypeError:
        return False
    return True


def count(pairs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Count training steps of (model, method) pairs; each model's plain step comes first."""
    sys.path.append(str(ROOT / "tests"))
    from integration import fake_device

    asked = [(model, "plain") for model in dict.fromkeys(model for model, _ in pairs)] + pairs
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "cuda_counter.py")],
            input="".join(f"{model}\t{method}\n" for model, method in asked),
            text=True,
            capture_output=True,
            env={**fake_device.environment(Path(folder)), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return rows([json.loads(line) for line in done.stdout.splitlines()])


def rows(counts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a method adds to each layer, and its least step over the plain one's."""
    plain = {c["model"]: c for c in counts if c["method"] == "plain"}
    found = []
    for c in counts:
        row: dict[str, Any] = {"model": c["model"], "method": c["method"]}
        if "refused" in c or "failed" in c:
            found.append(row | {"note": c.get("refused") or f"failed: {c['failed']}"})
            continue
        base = plain[c["model"]]
        if c["method"] == "plain":
            continue

        def added(name: str, c: dict[str, Any] = c, base: dict[str, Any] = base) -> float:
            return (c[name] - base[name]) / COUNTED_LAYERS

        row |= {phase: added(phase) for phase in (*PHASES, "on_cpu", "waits")}
        row |= {
            "megabytes": round(added("bytes") / MEGABYTE, 1),
            "gigaflops": round(added("flops") / 1e9, 1),
            # of both layers together: what a method keeps or makes beyond the largest tensor of a plain layer
            "largest": round(c["largest"] / MEGABYTE, 1),
            "step": round(1 + LAYERS * added("seconds") / base["whole"], 3),
            **{name: round(1 + LAYERS * added(name) / base["whole"], 3) for name in ALONE},
            "note": "",
        }
        found.append(row)
    return found


def grown(new: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[str]:
    """Return a line for each figure that is larger than the kept one, and for each row that is not kept."""
    before = {(row["model"], row["method"]): row for row in kept}
    lines = []
    for row in new:
        old = before.get((row["model"], row["method"]))
        if old is None:
            lines.append(f"{row['method']} on {row['model']} has no kept row")
        elif row["note"] != old["note"]:
            lines.append(f"{row['method']} on {row['model']}: {row['note'] or 'counted now'!r}, kept: {old['note']!r}")
        elif not row["note"]:
            lines += [
                f"{row['method']} on {row['model']}: {name} {old[name]} -> {row[name]}"
                for name in COLUMNS
                if float(row[name]) > float(old[name]) + 0.001 * abs(float(old[name])) + 1e-9
            ]
    return lines


def kept() -> list[dict[str, Any]]:
    """Return the kept rows; figures as text."""
    with KEPT.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(found: list[dict[str, Any]]) -> None:
    """Write the kept rows."""
    with KEPT.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("model", "method", *COLUMNS, *ALONE, "note"), lineterminator="\n", restval="")
        writer.writeheader()
        writer.writerows(
            {name: f"{value:g}" if isinstance(value, float) else value for name, value in row.items()} for row in found
        )


def page(found: list[dict[str, Any]]) -> str:
    """Return docs/cuda_costs.md."""
    lines = ["# What each method adds to a training step on a GPU", "", *INTRODUCTION, ""]
    for model, training in MODELS.items():
        of = [row for row in found if row["model"] == model]
        counted = [row for row in of if not row["note"]]
        within = [row for row in counted if float(row["step"]) <= budget(row["method"])]
        lines += [
            f"## {model}, batch of {training.size}",
            "",
            f"{len(within)} of {len(counted)} rows keep the budget of {BUDGET} ({BUDGET_OF_PAIRS} for "
            f"{', '.join(OF_PAIRS)}); **bold** rows do not.",
            "",
            "| method | kernels: forward | backward | after the step | MiB | GFLOP | step / plain | by kernels "
            "| by bytes | by products |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in sorted(counted, key=lambda row: -float(row["step"])):
            step = f"{float(row['step']):.3f}"
            step = step if float(row["step"]) <= budget(row["method"]) else f"**{step}**"
            cells = [f"{float(row[name]):g}" for name in (*PHASES, "megabytes", "gigaflops")]
            cells += [step, *(f"{float(row[name]):.3f}" for name in ALONE)]
            lines.append(f"| {shown(row['method'])} | {' | '.join(cells)} |")
        lines += [f"- {shown(row['method'])}: {row['note']}" for row in of if row["note"]]
        # A reading is no method, and has a budget in forwards of attention.
        methods = [row for row in counted if row["method"] != "watch"]
        few = [row for row in methods if kernels_of(row) <= budget_of_kernels(row["method"])]
        lines += [
            "",
            *textwrap.wrap(
                f"{len(few)} of {len(methods)} methods keep the budget of kernels: {KERNELS} a layer, "
                f"{KERNELS_OF_PENALTIES} of a penalty, and for {', '.join(OF_A_MODEL)} {KERNELS_OF_A_MODEL} in the "
                "whole model. *By kernels* is what the launches of the others would take alone.",
                120,
            ),
        ]
        lines.append("")
    # The last model, whose layers are not causal, as those of the host's table are not.
    of_host = host_costs.page({row["method"]: kernels_of(row) for row in counted})
    lines += ["## What bounds the rows", "", *BOUNDS, "", *of_host]
    return "\n".join(lines).replace("|\n- ", "|\n\n- ").rstrip() + "\n"


def shown(method: str) -> str:
    """Return the name of a row."""
    return "`watch`, a full reading in every step" if method == "watch" else f"`{method}`"


def budget(method: str) -> float:
    """Return the largest step over the plain one that a method may take."""
    return BUDGET_OF_PAIRS if method.partition("(")[0] in OF_PAIRS else BUDGET


def kernels_of(row: dict[str, Any]) -> float:
    """Return the kernels that a method adds to a layer."""
    return sum(float(row[phase]) for phase in PHASES)


def budget_of_kernels(method: str) -> float:
    """Return the most kernels that a method may add to a layer."""
    from headwise.attend import methods as shelf

    name = method.partition("(")[0]
    if name in OF_A_MODEL:
        return KERNELS_OF_A_MODEL / LAYERS
    kind = getattr(shelf, name)
    penalty = kind.penalizes or "penalty" in vars(kind)
    return KERNELS_OF_PENALTIES if penalty else KERNELS


def measure(only: list[str]) -> None:
    """Print measured steps next to the counted ones, on a GPU."""
    import torch
    from timing import interleave, machine, ratio

    import headwise
    from headwise.attend.core.method import REGISTRY

    counted = {(row["model"], row["method"]): row for row in kept()}
    print(f"{machine(1)}; {COUNTED_LAYERS} layers, bf16, eager")
    print("| model | method | measured step / plain | counted for these layers |\n|---|---|---|---|")
    for model, training in MODELS.items():
        batch = training.batch(training.size)
        inputs = [x.cuda().to(torch.bfloat16 if x.is_floating_point() else x.dtype) for x in batch]

        def fitted(method: str, training: Any = training, inputs: Any = inputs) -> Any:
            torch.manual_seed(0)
            net = training.layers(COUNTED_LAYERS)
            handle: Any = None
            if method == "watch":
                handle = headwise.watch(net, every=1, on_alert=None)
            elif method != "plain":
                handle = headwise.regularize(net, eval(method, {}, dict(REGISTRY)), example=training.example())
            net.cuda().to(torch.bfloat16)
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

            def step() -> None:
                loss = net(*inputs)
                regularized = isinstance(handle, headwise.Regularized)
                (loss + handle.loss() if regularized else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                if handle is not None:
                    handle.after_step() if regularized else handle.step()

            return step

        plain = fitted("plain")
        for method in only or subjects():
            if counted.get((model, method), {"note": "not kept"})["note"]:
                continue
            times = interleave({"plain": plain, method: fitted(method)}, 7)
            print(
                f"| {model} | `{method}` | {ratio(times, method, 'plain'):.3f} | {counted[model, method]['step']} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="methods by name, separated by commas: print them, write nothing")
    parser.add_argument("--keep", action="store_true", help="with --only: write these rows and the page")
    parser.add_argument("--page", action="store_true", help="write the page from the kept rows")
    parser.add_argument("--check", action="store_true", help="check that the page is that of the kept rows")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = options.only.split(",") if options.only else []
    chosen = [s for s in subjects() if not names or s.partition("(")[0] in names or s in names]
    if options.host:
        from timing import machine

        measured = {row["method"]: row for row in host_costs.measure([s for s in chosen if s != "watch"])}
        if not names or options.keep:
            rows = [measured.get(row["method"], row) for row in host_costs.kept()[1]] if names else measured.values()
            host_costs.write(list(rows), machine(1))
            PAGE.write_text(page(kept()), encoding="utf-8")
    elif options.measure:
        measure(chosen if names else [])
    elif options.check:
        sys.exit(0 if PAGE.read_text(encoding="utf-8") == page(kept()) else f"{PAGE.name} is not that of the kept rows")
    elif options.page:
        PAGE.write_text(page(kept()), encoding="utf-8")
    else:
        found = count([(model, method) for model in MODELS for method in chosen])
        for line in grown(found, kept()) if KEPT.exists() else []:
            print(f"larger: {line}")
        if names:
            for row in found:
                print(json.dumps(row))
            if not options.keep:
                return
            new = {(row["model"], row["method"]): row for row in found}
            found = [new.get((row["model"], row["method"]), row) for row in kept()]
        write(found)
        PAGE.write_text(page(kept()), encoding="utf-8")


if __name__ == "__main__":
    main()
