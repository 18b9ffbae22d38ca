"""The provenance of results: versions, commit, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("headwise", "torch", "accelerate", "numpy", "scikit-learn", "scipy", "optuna", "ray")


def describe_environment() -> dict[str, Any]:
    """Return the versions, commit and hardware that every result file carries."""
    return {"versions": versions(), "commit": commit(), "hardware": hardware()}


def versions(*more: str) -> dict[str, str]:
    """Return the versions of Python, of the packages that affect numbers and of `more`; a missing one is left out."""
    by_name = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            by_name[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_name


def commit() -> str | None:
    """Return the commit of headwise's source tree, with "-changed" if it has changes; None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        # an installed copy may be inside another repository
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)
        sources = [here.parent, *here.parents[2].glob("verdict/src")]
        head = _git(here, "rev-parse", "HEAD")
        return head + ("-changed" if _git(here, "status", "--porcelain", "--", *map(str, sources)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


def hardware() -> dict[str, Any]:
    """Return processor with its instruction set, usable cores, memory in bytes and operating system."""
    facts: dict[str, Any] = {"processor": _processor(), "cores": usable_cores(), "system": platform.platform()}
    try:
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        facts["memory_bytes"] = None
    return facts


def device_hardware(device: Any) -> dict[str, str]:
    """Return the name of the device of a run."""
    if device.type != "cuda":
        return {"device": device.type}
    import torch

    return {"device": torch.cuda.get_device_name(device)}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    name = facts.get("model name") or platform.processor() or platform.machine()
    instructions = _instructions(set(facts.get("flags", "").split()))
    return f"{name} ({instructions})" if instructions else name


def _instructions(flags: set[str]) -> str:
    """Return the instruction set that torch uses on this processor; others round differently."""
    requested = os.environ.get("ATEN_CPU_CAPABILITY", "").lower()
    if {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= flags and requested in ("", "avx512"):
        return "AVX512"
    if "avx2" in flags:
        return "DEFAULT" if requested == "default" else "AVX2"
    return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
