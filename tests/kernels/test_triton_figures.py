"""The Triton kernels of a reading, without a GPU: interpreted against the PyTorch form in fp64, and compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_figures_cases.py"
# of each kind one
SOME = ("left padded causal, all queries", "biased, 9 queries", "grouped, 9 queries", "text", "values alike", "bf16")


def bound(case, figure):
    """What fp32 rounds, logits of 450 lose, and values in fp16 keep."""
    if case in ("bf16", "fp16", "values alike") and figure in ("roughness", "descent", "likeness", "crossing"):
        return 5e-4
    return 1e-4 if case.startswith("collapsed") else 1e-5


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_cases_have_the_figures_of_the_pytorch_form(which):
    cases = SOME if which == "some" else ()
    found = {line.pop("case"): line for line in lines(SCRIPT, "run", *cases, TRITON_INTERPRET="1")}
    assert len(found) == len(SOME) if which == "some" else len(found) == 33
    wrong = {
        (case, figure): error
        for case, errors in found.items()
        for figure, error in errors.items()
        # false for nan too
        if not error <= bound(case, figure)
    }
    assert not wrong


@pytest.mark.grid
@pytest.mark.slow
def test_every_launch_compiles_within_the_shared_memory_of_its_gpu():
    compiled = lines(SCRIPT, "compile")
    assert {line["kernel"] for line in compiled} == {
        "middles_kernel", "rows_kernel", "columns_kernel", "products_kernel",
    }  # fmt: skip
    for line in compiled:
        assert line["shared"] <= SHARED[line["capability"]], line
        # all figures at once keep more sums of a row than sm_100 has registers for
        assert line["spilled"] <= 320, line
