"""The Triton kernels without a GPU: interpreted against the textbook, and compiled for three kinds of GPU.

In processes of their own: the interpreter is chosen when Triton is imported, and no other test should find it
installed.
"""

import pytest
import triton_process
from grids import part_of_grid
from triton_process import SHARED


def lines(*what, **environment):
    """Run triton_cases.py and read its lines."""
    return triton_process.lines("triton_cases.py", *what, **environment)


def rounding(case):
    """What the dtype rounds to; products of sharp logits lose what softmax cancels."""
    return 2e-2 if "bf16" in case else 2e-3 if "fp16" in case else 5e-4 if case == "large logits" else 5e-6


# of each kind one
SOME = (
    "grouped heads, causal, padding",
    "rows of the lowest number",
    "a row without any key",
    "bf16",
    "packed rows with a window",
)


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_cases_have_the_textbooks_values_and_gradients(which):
    cases = SOME if which == "some" else ()
    interpreted = {line.pop("case"): line for line in lines("run", *cases, TRITON_INTERPRET="1")}
    assert len(interpreted) == len(SOME) if which == "some" else len(interpreted) >= 24
    wrong = {
        (case, part): error
        for case, errors in interpreted.items()
        for part, error in errors.items()
        # false for nan too
        if not error <= rounding(case)
    }
    assert not wrong


def test_a_launch_fits_cudas_grid_and_runs_on_the_device_of_its_tensors():
    """Windows make more heads than a grid's second axis takes; a model spread over GPUs calls on others than the
    current one."""
    launched = lines("launch")
    assert [line["kernel"] for line in launched] == ["forward_kernel", "queries_kernel", "keys_kernel"]
    for line in launched:
        first, *others = line["grid"]
        assert 72_000 <= first < 2**31
        assert all(axis < 2**16 for axis in others)
        assert line["device"] == "cpu"


@pytest.mark.grid
@pytest.mark.slow
def test_every_kernel_compiles_within_the_shared_memory_of_its_gpu():
    compiled = lines("compile")
    assert len(compiled) == 3 * 7 * 3
    for line in compiled:
        assert line["shared"] <= SHARED[line["capability"]], line
        # products of fp32 have more operands than registers
        assert line["spilled"] <= (4096 if line["case"].startswith("float32") else 128), line
