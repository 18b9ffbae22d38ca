"""Runs scripts with Triton in processes of their own, and compiles what a launch would compile for GPUs that are not
here.

In processes of their own: the interpreter is chosen when Triton is imported, and no other test should find it
installed.
"""

import collections
import contextlib
import hashlib
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
    thread. A kernel in which `races` finds a buffer fails.
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
        overwritten = races(compiled.asm["ttgir"])
        assert not overwritten, f"{compiled.name} on sm_{capability} overwrites {overwritten}, which a product reads"
        row = {"kernel": compiled.name, "shared": compiled.metadata.shared, **usage(compiled.asm["cubin"])}
        made.append(row | (_kept(kernel, compiled, fixed) if "KEEP_KERNELS" in os.environ else {}))
        return compiled

    driver.set_active(Device())
    JITFunction.run = run
    try:
        yield made
    finally:
        JITFunction.run = original


def _kept(kernel, compiled, fixed):
    """Write what was compiled into the folder that KEEP_KERNELS names; return its file, and the tile of its loop."""
    cubin = compiled.asm["cubin"]
    name = f"{hashlib.sha256(cubin).hexdigest()[:16]}.cubin"
    (Path(os.environ["KEEP_KERNELS"]) / name).write_bytes(cubin)
    return {
        "file": name,
        "module": kernel.fn.__module__.rsplit(".", 1)[-1],
        "warps": compiled.metadata.num_warps,
        "tile": [fixed.get("BT"), fixed.get("BN")],
    }


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


def races(ttgir):
    """Return the buffers in shared memory that a loop overwrites while an asynchronous product may still read them.

    Triton's pipeliner fills the buffers of later iterations while products of this one run, and must wait for those
    that read what it overwrites. The interpreter cannot see that it forgot to.
    """
    root, depth, ahead, found = {}, {}, collections.Counter(), set()
    for line in _with_bodies(ttgir.splitlines()):
        if isinstance(line, str):
            _name_buffers(line, root, depth)
            if "ttg.async_copy_global_to_local" in line:
                ahead[root[_operands(line)[1]]] += 1
            continue
        for inner in line:
            _name_buffers(inner, root, depth)
        reads = []
        # By then each buffer of a ring was met with each product.
        for turn in range(2 + max(depth.values(), default=0)):
            for inner in line:
                if "ttng.warp_group_dot_wait" in inner:
                    left = int(re.search(r"pendings = (\d+)", inner)[1])
                    reads = reads[len(reads) - left :] if left < len(reads) else reads
                elif "ttng.warp_group_dot " in inner:
                    operands = [root[x] for x in _operands(inner) if x in root]
                    reads = [*reads, [(x, turn % depth[x]) for x in operands]] if "isAsync" in inner else []
                elif "ttg.async_copy_global_to_local" in inner:
                    name = root[_operands(inner)[1]]
                    place = (name, (turn + ahead[name]) % depth[name])
                    found |= {name for read in reads if place in read}
    return sorted(found)


def _with_bodies(lines):
    """Yield the lines of a module, and the innermost loops among them each as a list of its own."""
    body = None
    for line in lines:
        if " scf.for " in line:
            yield from body or ()
            body = [line]
        elif body is not None:
            body.append(line)
            if line.lstrip().startswith("scf.yield") and _indent(line) == _indent(body[0]) + 2:
                yield body
                body = None
        else:
            yield line


def _indent(line):
    return len(line) - len(line.lstrip())


def _operands(line):
    """Return the names of an operation's operands."""
    return re.findall(r"%[\w#]+", line.split(" = ", 1)[-1].split(" : ")[0])


def _name_buffers(line, root, depth):
    """Note the ring of buffers that a line makes, with its length, or takes a view of."""
    made = line.split(" = ")[0].strip()
    if "ttg.local_alloc" in line:
        shape = re.search(r"-> !ttg.memdesc<([\dx]+)x", line)[1].split("x")
        # A ring of buffers has one dimension more than the tile.
        root[made], depth[made] = made, int(shape[0]) if "ttg.local_alloc :" in line else 1
    elif "ttg.memdesc_" in line:
        root[made] = root[_operands(line)[0]]
