"""The kernels that drop single weights, without a GPU: interpreted against the textbook, and compiled.

The blocks in Python, which a CPU runs, compute the same cases.
"""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_dropped_cases.py"
# of each kind one
SOME = (
    "dropout, causal",
    "dropout, windows of two samples",
    "keys, causal, padding",
    "keys, forbidden by numbers",
    "keys, windows of three",
    "keys, bf16",
)


def rounding(case):
    """Return the error that the dtype allows; products of sharp logits lose what softmax cancels."""
    return 2e-2 if "bf16" in case else 2e-3 if "fp16" in case else 5e-4 if "large" in case else 1e-5


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_cases_have_the_textbooks_values_and_gradients(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) == 2 * len(SOME) if which == "some" else len(found) >= 48
    for line in found:
        case, form = line.pop("case"), line.pop("form")
        # false for nan too
        wrong = {part: error for part, error in line.items() if not error <= rounding(case)}
        assert not wrong, (case, form)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    assert len(made) == 5 * 2 * 3
    for line in made:
        assert line["shared"] <= SHARED[capability], line
        # a few registers, not a tile
        assert line["spilled"] <= 256, line
