"""Runs scripts with Triton in processes of their own, and compiles what a launch would compile for GPUs that are not
here.

In processes of their own: the interpreter is chosen when Triton is imported, and no other test should find it
installed.
"""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# where `make test` puts it; with a CUDA build of torch it is installed anyway
FOLDER = Path(sys.prefix) / "triton-only"
# shared memory of one block, in bytes
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def lines(script, *what, **environment):
    """Run a script of this folder and read the JSON lines that it prints."""
    if not FOLDER.is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with the CUDA builds of torch")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(HERE), str(HERE.parent), str(FOLDER)])
    done = subprocess.run(
        [sys.executable, HERE / script, *what],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextlib.contextmanager
def compiled_instead_of_launched(capability):
    """Compile each launch for a GPU of this capability, with the specialisation of its very arguments, and run none.

    Yields a list that gets a dict for each launch: kernel, shared memory in bytes, registers and spilled bytes of a
    thread.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    made, original = [], JITFunction.run

    class Device:
        """A driver without a device."""

        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            # Triton keeps what it compiled by device: with one number for all, only the first GPU's would be compiled.
            return capability

        def get_current_stream(self, device=None):
            return 0

    def run(kernel, *given, grid, warmup, **fixed):
        compiled = original(kernel, *given, grid=grid, warmup=True, **fixed)
        made.append({"kernel": compiled.name, "shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])})
        return compiled

    driver.set_active(Device())
    JITFunction.run = run
    try:
        yield made
    finally:
        JITFunction.run = original


def usage(cubin):
    """Return the registers of a thread and the bytes of local memory that it spills to."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, *memory = (int(re.search(rf"{what}:(\d+)", told)[1]) for what in ("REG", "STACK", "LOCAL"))
    return {"registers": registers, "spilled": sum(memory)}
