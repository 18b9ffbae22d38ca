"""The kernels of linear attention, without a GPU: interpreted beside the PyTorch form, and compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_linear_cases.py"
# of each kind one
SOME = ("all keys", "causal", "causal, padding on the left", "wider values", "bf16")


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_results_and_gradients_are_those_of_the_pytorch_form(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) == (len(SOME) if which == "some" else 10)
    for line in found:
        bound = 2e-2 if "bf16" in line["case"] else 2e-3 if "fp16" in line["case"] else 1e-5
        # false for nan too
        assert all(error <= bound for error in line["errors"]), line


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    assert len(made) == 4 * 3
    for line in made:
        assert line["shared"] <= SHARED[capability], line
        # some registers, not a tile; the sums of a head of 128 fit no program of an A100, which keeps them in memory
        assert line["spilled"] <= 400 or (capability == 80 and "128" in line["case"]), line
