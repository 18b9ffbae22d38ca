"""What each Triton kernel takes of a GPU, as compiled on a machine that has none: registers, spills, shared memory, and
instructions for 1,000 logits.

python benchmarks/kernel_resources.py          # compile all, write docs/kernel_resources.md and kernel_resources.csv
python benchmarks/kernel_resources.py --page   # the page from the kept table
"""

from __future__ import annotations

import argparse
import collections
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "kernels"
TABLE = Path(__file__).with_suffix(".csv")
PAGE = ROOT / "docs" / "kernel_resources.md"
# where `make test` puts Triton; with a CUDA build of torch it is installed anyway
FOLDER = Path(sys.prefix) / "triton-only"
CAPABILITIES = (80, 90, 100)
COUNTED = (80, 90)
MOST = ("registers", "spilled", "shared")
KINDS = {
    "tensor cores": r"[HQ]G?MMA|IMMA|DMMA|IGMMA|WARPGROUP",
    "exponentials": r"MUFU",
    "fp32": r"F(FMA|MUL|ADD|MNMX|SEL|SETP|SET|CHK)\d*|F2F\w*|HADD2|HMUL2|HFMA2|PACK",
    "integers": r"U?I(MAD|ADD3?|SETP|MNMX|ABS)\w*|U?LOP3|U?LEA|U?SHF|P?LOP3|PRMT|SEL|I2F\w*|F2I\w*|VIADD\w*",
    "memory": r"LD[GSCLM]?\w*|ST[GSL]?\w*|UBLKCP|UTMA\w*|ATOM\w*|RED\w*",
}
HEAD = """# What the kernels take of a GPU

Written by `python benchmarks/kernel_resources.py` with the Triton of `make test` (3.7), without a device: every
kernel is compiled with the specialisations that its launches ask for, in the data types, head sizes and masks of
`tests/kernels/triton_*cases.py`, and read with NVIDIA's `cuobjdump`. Nothing here is measured.
"""
INSTRUCTIONS = """
## Instructions for 1,000 logits

What a warp executes in the loop over whole tiles, divided by the logits of a tile, of kernels that go over pairs of
queries and keys, in bf16 with heads of 64. *products* are matrix products of the size of a tile, from the instructions
of tensor cores on sm_80: where it is not a whole number, tiles are cut. Draws of dropped elements are integers.

| kernel | case | tile | warps | products |{columns} sm_80 | sm_90 |
|---|---|---|---|---|{dashes}---|---|
"""
RESOURCES = """
## Registers, spills and shared memory

For each kernel the most of all its specialisations: registers of a thread, bytes that a thread spills, and KiB of
shared memory of a block, on sm_80, sm_90 and sm_100. Tests hold shared memory below what the GPU has, and spills below
a limit for each kernel (`make test-all`). The largest spills are of fp32, whose products take operands from registers.

| kernel | compiled | registers | spilled bytes | shared KiB |
|---|---|---|---|---|
"""


def compiled(script: Path, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each launch that a script of cases compiles; what it compiled is in the folder."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(CASES), str(CASES.parent), str(FOLDER)])
    environment = {**os.environ, "PYTHONPATH": path, "KEEP_KERNELS": str(folder)}
    done = subprocess.run(
        [sys.executable, script, "compile"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def loops(cubin: Path, cuobjdump: str) -> Iterator[collections.Counter[str]]:
    """Yield the instructions of each innermost loop of a kernel, counted by name."""
    text = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), what.strip()) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", text)]
    jumps = [(at, re.search(r"\bBRA\b.*?0x([0-9a-f]+)", what)) for at, what in code]
    spans = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    for start, end in spans:
        if not any(start <= a and b <= end for a, b in spans if (a, b) != (start, end)):
            names = [
                re.sub(r"^@!?\w+\s+", "", what).split()[0].split(".")[0] for at, what in code if start <= at <= end
            ]
            yield collections.Counter(names)


def of_logits(row: dict[str, Any], folder: Path, cuobjdump: str) -> dict[str, float]:
    """Return the instructions of a warp for 1,000 logits by kind, or nothing if no loop multiplies tiles."""
    tensor = re.compile(KINDS["tensor cores"])
    turns = [loop for loop in loops(folder / row["file"], cuobjdump) if any(map(tensor.fullmatch, loop))]
    if not turns or None in row["tile"]:
        return {}
    # whole tiles, of which masks and ends ask nothing
    loop = min(turns, key=lambda turn: turn.total())
    scale = 1000 * row["warps"] / (row["tile"][0] * row["tile"][1])
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, count in loop.items():
        kind = next((kind for kind, names in KINDS.items() if re.fullmatch(names, name)), "other")
        found[kind] += count * scale
    # an HMMA.16816 multiplies 16 x 16 by 16 x 8
    return found | {"all": sum(found.values()), "products": loop["HMMA"] * 2048 * scale / 1000 / 64}


def add(kept: dict[tuple[str, ...], dict[str, Any]], row: dict[str, Any], folder: Path, cuobjdump: str) -> None:
    """Add a launch to the rows that are kept: of several launches of one kernel and case the most that one takes."""
    case = str(row.get("case", "")).translate(str.maketrans("", "", "[]'\",")) or "-"
    key = row["module"], row["kernel"], str(row["capability"]), case
    new = {field: row[field] for field in MOST}
    if key in kept:
        known = kept[key]
        known |= {field: max(known[field], new[field]) for field in MOST} | {"launches": known["launches"] + 1}
        return
    counts: dict[str, float] = {}
    if {"bfloat16", "64"} <= set(case.split()) and row["capability"] in COUNTED:
        counts = of_logits(row, folder, cuobjdump)
    counted = {kind: round(counts[kind], 2) if counts else "" for kind in (*KINDS, "other", "all", "products")}
    fields = dict(zip(("module", "kernel", "capability", "case"), key, strict=True))
    tile = "x".join(map(str, row["tile"]))
    kept[key] = fields | {"launches": 1} | new | {"warps": row["warps"], "tile": tile} | counted


def measure() -> None:
    """Compile all cases, write the table and the page."""
    sys.path.append(str(FOLDER))
    from triton import knobs

    cuobjdump, kept = knobs.nvidia.cuobjdump.path, dict[tuple[str, ...], dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for script in sorted(CASES.glob("triton_*cases.py")):
            rows = compiled(script, folder)
            print(f"{script.name}: {len(rows)} launches", flush=True)
            for row in rows:
                add(kept, row, folder, cuobjdump)
    table = list(kept.values())
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    write_page()


def write_page() -> None:
    """Write the page from the kept table."""
    with TABLE.open(newline="") as file:
        table = list(csv.DictReader(file))
    PAGE.write_text(HEAD + instructions(table) + resources(table))
    print(PAGE)


def instructions(table: list[dict[str, str]]) -> str:
    """Return the table of instructions of kernels that go over pairs of queries and keys."""
    rows = [row for row in table if row["all"]]
    on_80 = {(r["module"], r["kernel"], r["case"]): r for r in rows if r["capability"] == "80"}
    on_90 = {(r["module"], r["kernel"], r["case"]): r for r in rows if r["capability"] == "90"}
    kinds = [*KINDS, "other"]
    text = INSTRUCTIONS.format(columns="".join(f" {kind} |" for kind in kinds), dashes="---|" * len(kinds))
    for key, row in on_80.items():
        counts = " | ".join(f"{float(row[kind]):.1f}" for kind in kinds)
        other = on_90.get(key)
        both = f"{float(row['all']):.0f} | {float(other['all']):.0f}" if other else f"{float(row['all']):.0f} | "
        text += (
            f"| `{key[0]}.{key[1]}` | {key[2]} | {row['tile']} | {row['warps']} | {float(row['products']):g} "
            f"| {counts} | {both} |\n"
        )
    return text


def resources(table: list[dict[str, str]]) -> str:
    """Return the table of registers, spills and shared memory."""
    groups: dict[tuple[str, str], list[dict[str, str]]] = collections.defaultdict(list)
    for row in table:
        groups[row["module"], row["kernel"]].append(row)

    def most(rows: list[dict[str, str]], field: str, unit: int = 1) -> str:
        by = {c: [int(r[field]) for r in rows if r["capability"] == str(c)] for c in CAPABILITIES}
        return ", ".join(f"{round(max(found) / unit, 1):,.10g}" if found else "-" for found in by.values())

    text = RESOURCES
    for (module, kernel), rows in sorted(groups.items()):
        launches = sum(int(row["launches"]) for row in rows)
        figures = most(rows, "registers"), most(rows, "spilled"), most(rows, "shared", 1024)
        text += f"| `{module}.{kernel}` | {launches} | {' | '.join(figures)} |\n"
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write the page from the kept table")
    write_page() if parser.parse_args().page else measure()
