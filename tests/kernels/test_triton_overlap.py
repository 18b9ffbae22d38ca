"""The kernels of the overlap of heads, without a GPU: interpreted beside the matrix, called by the method, compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_overlap_cases.py"
# of each kind one
SOME = (
    "causal, in strips",
    "one sample after the other",
    "padding, causal, some queries",
    "additive mask",
    "sinks",
    "bf16",
)


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_values_and_gradients_are_those_of_all_pairs_of_heads(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) == (len(SOME) if which == "some" else 17)
    for line in found:
        # Gradients of logits are rounded to bf16.
        bound = 1e-2 if "16" in line["case"] else 1e-5
        # false for nan too
        assert all(error <= bound for error in line["errors"]), line


def test_the_method_runs_on_the_kernels_wherever_the_mask_has_no_gradient():
    found = {line["kind"]: line for line in lines(SCRIPT, "method", TRITON_INTERPRET="1")}
    assert len(found) >= 8
    for line in found.values():
        assert line["error"] < 2e-5 and line["again"] == line["launched"], line
    assert all(found[kind]["launched"] for kind in ("plain", "causal", "padded", "cross", "grouped"))


def test_a_compiled_graph_has_the_gradients_of_an_eager_call():
    assert lines(SCRIPT, "graph", TRITON_INTERPRET="1") == [{"same": True}]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    # stored weights, and four strips of computed ones
    assert len(made) == 6 * (5 + 4 * 4)
    for line in made:
        assert line["shared"] <= SHARED[capability], line
        assert line["spilled"] <= 512, line
