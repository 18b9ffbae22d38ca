"""The kernels of rows, means and pairs of heads, without a GPU: interpreted beside the PyTorch form, and compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_head_rows_cases.py"
# of each kind one
SOME = (
    "gates of two sources",
    "one gate for each row",
    "gates of low rank",
    "gates of low rank of two sources",
    "rows and their inner ones",
    "tokens and their inner ones",
    "exponentials",
    "logarithms",
    "rms, one gain for two heads",
    "without its own value, by a tanh",
    "mixed",
    "from the running mean",
    "by channel",
    "difference",
    "earlier tokens like it, in blocks",
    "norm of pairs",
    "agreement of heads",
)


def rounding(of):
    """Return the error that the dtype allows; a gradient that is a long sum loses what cancels."""
    return 2e-2 if of == "bf16" else 3e-3 if of == "fp16" else 1e-5


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_results_and_gradients_are_those_of_the_pytorch_form(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) >= 5 * len(SOME)
    for line in found:
        # false for nan too
        assert all(error <= rounding(line["of"]) for error in line["errors"]), line


def test_second_derivatives_are_those_of_the_pytorch_form():
    found = lines(SCRIPT, "second", TRITON_INTERPRET="1")
    assert len(found) > 20
    for line in found:
        assert line["error"] <= 1e-5, line


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    assert {line["size"] for line in made} == {64, 80, 256}
    for line in made:
        # gates of two sources keep two parts of gradients in registers
        spilled = 320 if line["case"] == "gates of low rank of two sources" else 0
        assert line["shared"] <= SHARED[capability] and line["spilled"] <= spilled, line
