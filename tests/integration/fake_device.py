"""Builds the library that makes a CPU build of torch believe in a CUDA device; `fake_cuda` runs on it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")


def environment(folder: Path) -> dict[str, str]:
    """Build the library into a folder, and return the environment of processes that have the device.

    Torch asks once whether there is CUDA, while it is imported: the device must be there before.
    """
    device, libraries = folder / "cuda_without_a_gpu.so", Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [str(COMPILER), "-std=c++20", "-O0", "-shared", "-fPIC", abi, f"-I{libraries.parent / 'include'}"]
    command += [str(HERE / "cuda_without_a_gpu.cpp"), "-o", str(device), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    built = subprocess.run([*command, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, timeout=300, check=False)
    if built.returncode:
        raise RuntimeError(built.stderr)
    return {**os.environ, "LD_PRELOAD": str(device)}
