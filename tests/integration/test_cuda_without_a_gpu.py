"""Training on CUDA, shown without a GPU: fake tensors on "cuda" find tensors of two devices, and every wait for the
device.

Not seen so: numbers, Triton's and inductor's kernels, and what CUDA's own solvers wait for inside. test_cuda.py asks a
real device.
"""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from grids import part_of_grid, requested
from integration import fake_device

HERE = Path(__file__).parent
GROUPS = {
    **{f"{host}-{dtype}": 30 for host in ("sdpa", "torch", "transformers") for dtype in ("fp32", "bf16")},
    # of each kind of stage one, as the first of sdpa-fp32
    "kinds": 8,
    "compiled": 40,
    "named": 40,
    "captured": 40,
    "evaluations": 40,
    "readings": 6,
    "penalties": 3,
    "loop": 2,
}

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(sys.platform != "linux", reason="the device is preloaded as Linux does it"),
    pytest.mark.skipif(
        fake_device.COMPILER is None, reason="there is no C++ compiler: install g++, or name one in CXX"
    ),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own: test_cuda.py asks it"),
]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """Run the cases of all chosen groups in one process that has the device, and give what is wrong by group and
    case."""
    environment = fake_device.environment(tmp_path_factory.mktemp("device"))
    groups = [group for (group,) in requested(request, "group")]
    command = [sys.executable, str(HERE / "fake_cuda_cases.py"), *groups]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    cases = defaultdict(dict)
    for line in ran.stdout.splitlines():
        case = json.loads(line)
        cases[case["group"]][case["case"]] = case["wrong"]
    return cases


@pytest.mark.parametrize("group", part_of_grid(GROUPS, ("loop",)))
def test_nothing_waits_for_the_device_and_no_tensor_lies_on_another(found, group):
    cases = found[group]
    assert len(cases) >= GROUPS[group], f"only {len(cases)} cases ran: {list(cases)}"
    wrong = {name: told for name, told in cases.items() if told}
    assert not wrong, "\n".join(f"{group}, {name}:\n  " + "\n  ".join(told) for name, told in wrong.items())
