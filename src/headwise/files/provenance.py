"""Where a result came from: versions, commit, hardware."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGES = ("headwise", "torch", "accelerate", "numpy", "scikit-learn", "scipy", "optuna", "ray")


def describe_environment() -> dict[str, Any]:
    """Return versions, commit and hardware of this machine, as every result file carries them."""
    return {"versions": versions(), "commit": commit(), "hardware": hardware()}


def distinct_environments(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """List what results say of their commit, versions and hardware, each with its number of runs, the most frequent
    first."""
    found: dict[str, dict[str, Any]] = {}
    for result in results:
        one = {name: result.get(name) for name in ("commit", "versions", "hardware")}
        found.setdefault(json.dumps(one, sort_keys=True), {"runs": 0, **one})["runs"] += 1
    return sorted(found.values(), key=lambda environment: -environment["runs"])


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that make the numbers; a missing package is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of headwise's own source tree, marked when it has changes; None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        # an installed copy may lie inside somebody else's repository
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        head = _git(here, "rev-parse", "HEAD")
        return head + ("-changed" if _git(here, "status", "--porcelain", "--", str(here.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Return processor with its instruction set, usable cores, memory in bytes and operating system."""
    found: dict[str, Any] = {"processor": _processor(), "cores": usable_cores(), "system": platform.platform()}
    try:
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        found["memory_bytes"] = None
    return found


def device_hardware(device: Any) -> dict[str, str]:
    """Name the device a run used."""
    if device.type != "cuda":
        return {"device": device.type}
    import torch

    return {"device": torch.cuda.get_device_name(device)}


def usable_cores() -> int:
    """Count the cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    told: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            told.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    name = told.get("model name") or platform.processor() or platform.machine()
    instructions = _instructions(set(told.get("flags", "").split()))
    return f"{name} ({instructions})" if instructions else name


def _instructions(flags: set[str]) -> str:
    """Name the instruction set that torch takes on this processor: another one rounds otherwise, and trains to other
    numbers."""
    asked = os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= flags and asked in ("", "avx512"):
        return "AVX512"
    if "avx2" in flags:
        return "DEFAULT" if asked == "default" else "AVX2"
    return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
