"""The kernels that mix weights over heads, without a GPU: interpreted, called by the method, compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_mixing_cases.py"
# of each kind one
SOME = (
    "no norm",
    "one sample after the other",
    "batch, causal, in strips",
    "a mask of each head",
    "padding, causal, some queries",
    "bf16",
)


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_values_figures_and_gradients_are_those_of_a_batch_norm_behind_a_convolution(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) == (len(SOME) if which == "some" else 23)
    for line in found:
        # Weights and their gradients are stored in half precision.
        bound = 2e-2 if "bf16" in line["case"] else 4e-3 if "fp16" in line["case"] else 1e-5
        # false for nan too
        assert all(error <= bound for error in line["errors"]), line


def test_the_method_runs_on_the_kernels_and_says_so():
    found = lines(SCRIPT, "method", TRITON_INTERPRET="1")
    assert {line["kind"] for line in found} >= {"plain", "causal", "padded", "cross", "grouped", "sinks"}
    for line in found:
        assert line["error"] < 1e-5 and line["launched"] == 1 and line["told"], line


def test_a_compiled_graph_has_the_gradients_of_an_eager_call():
    assert lines(SCRIPT, "graph", TRITON_INTERPRET="1") == [{"same": True}]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    assert {line["kernel"] for line in made} == {
        "weights_kernel", "mix_kernel", "rows_kernel", "norm_kernel", "combine_kernel", "dots_kernel",
        "norm_back_kernel", "unmix_kernel", "columns_kernel",
    }  # fmt: skip
    for line in made:
        assert line["shared"] <= SHARED[capability], line
        assert line["spilled"] <= 512, line
