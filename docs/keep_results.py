"""Keep the results of a study as small files: tables as Markdown, the analysis as JSON.

    python docs/keep_results.py results/digits docs/results/digits
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

# the outcomes whose tables are kept beside the primary one, where they were recorded
KEPT = ("test/loss", "train/loss", "train/accuracy", "gap/accuracy")


def table(analysis: dict, name: str) -> list[str]:
    """Give the lines of one outcome's table."""
    outcome = analysis["outcomes"][name]
    factor, unit = (100, "%") if outcome["unit"] == "%" else (1, outcome["unit"])
    lines = [f"## {outcome['label']}{f' ({unit})' if unit else ''}", ""]
    lines += ["| arm | mean [95 %] | paired difference [95 %] | corrected p | verdict |", "|---|---|---|---|---|"]
    for arm in analysis["arms"]:
        mean, difference = arm["metrics"].get(name), arm["differences"].get(name)
        cells = [f"`{arm['label']}`", _interval(mean, factor, ""), _interval(difference, factor, "+")]
        p = (difference or {}).get("p_corrected")
        cells += ["–" if p is None else f"{p:.3f}", (difference or {}).get("verdict_text") or "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _interval(found: dict | None, factor: float, sign: str) -> str:
    if not found or found.get("mean") is None:
        return "–"
    digits = 2 if factor == 100 else 3
    mean = f"{found['mean'] * factor:{sign}.{digits}f}"
    if found.get("low") is None:
        return mean
    return f"{mean} [{found['low'] * factor:{sign}.{digits}f}, {found['high'] * factor:{sign}.{digits}f}]"


def page(folder: Path, note: str = "") -> str:
    """Give the page of a study: answer, what is to be said of it, tables, cost, settings and how to repeat it."""
    study = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    analysis = json.loads((folder / "analysis.json").read_text(encoding="utf-8"))
    lines = [f"# {study['title']}", "", study["question"], "", analysis["answer"], ""]
    lines += [note, ""] if note else []
    for name in (analysis["primary"], *(name for name in KEPT if name in analysis["outcomes"])):
        lines += table(analysis, name)
    lines += ["## Cost", "", "| arm | time per step (ms) | memory of a step (MiB) | parameters |", "|---|---|---|---|"]
    for arm in analysis["arms"]:
        cost = arm["costs"]
        figures = (cost["seconds_per_step"] * 1e3, cost["peak_memory_bytes"] / 2**20, cost["parameters"])
        lines.append("| `{}` | {:.1f} | {:.1f} | {:.0f} |".format(arm["label"], *figures))
    settings = ", ".join(f"{name} {value}" for name, value in study["settings"].items())
    versions = ", ".join(f"{name} {version}" for name, version in study["versions"].items())
    # Where somebody kept results and data is no part of the result.
    command = re.sub(r" --(out|data) \S+", "", study["command"])
    hardware = study["hardware"]
    lines += ["", *(f"{note}" for note in study.get("notes", ())), "", f"Settings: {settings}.", ""]
    lines += [f"Command: `{command}`. Versions: {versions}. Hardware: {hardware['processor']}, {hardware['cores']} cores. Commit {study['commit'][:12]}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line and write README.md, analysis.json, table.csv and runs.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a finished study")
    parser.add_argument("kept", type=Path, help="where to keep its results")
    parser.add_argument("--note", default="", help="what is to be said of the result, below its answer")
    given = parser.parse_args()
    given.kept.mkdir(parents=True, exist_ok=True)
    (given.kept / "README.md").write_text(page(given.folder, given.note), encoding="utf-8")
    for name in ("analysis.json", "table.csv", "runs.csv"):
        shutil.copyfile(given.folder / name, given.kept / name)


if __name__ == "__main__":
    main()
