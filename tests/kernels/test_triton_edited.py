"""The kernels that edit logits, without a GPU: interpreted against the textbook, called in each way, and compiled."""

import pytest
from grids import part_of_grid
from triton_process import SHARED, lines

SCRIPT = "triton_edited_cases.py"
# of each kind one
SOME = (
    "cap, causal, padding, grouped",
    "cap, rows of the lowest number",
    "cap, bf16",
    "past, grouped",
    "between, a row without any key",
    "stable, fp16, repeated",
    "pick, causal, padding, grouped",
)


def rounding(case):
    """Return the error that the dtype allows; products of sharp logits lose what softmax cancels."""
    return 2e-2 if "bf16" in case else 2e-3 if "fp16" in case else 5e-4 if "large" in case else 1e-5


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_cases_have_the_textbooks_values_and_gradients(which):
    found = lines(SCRIPT, "run", *(SOME if which == "some" else ()), TRITON_INTERPRET="1")
    assert len(found) == len(SOME) if which == "some" else len(found) >= 48
    for line in found:
        case = line.pop("case")
        # false for nan too
        wrong = {part: error for part, error in line.items() if not error <= rounding(case)}
        assert not wrong, case


def test_tanh_is_exact_in_fp32_and_a_row_knows_whether_its_largest_logit_repeats():
    (found,) = lines(SCRIPT, "parts", TRITON_INTERPRET="1")
    assert found["error"] < 1e-6
    assert found["nan"] and found["references"]


@pytest.mark.grid
@pytest.mark.slow
def test_methods_run_on_the_kernels_and_compute_what_the_matrix_does():
    found = lines(SCRIPT, "methods", TRITON_INTERPRET="1")
    assert len(found) > 50
    for line in found:
        assert line["kernel"] and line["error"] < 2e-5, line


def test_graphs_and_modes_see_one_operator_and_second_derivatives_say_what_computes_them():
    *ways, again = lines(SCRIPT, "calls", TRITON_INTERPRET="1")
    assert len(ways) == 3
    for way in ways:
        assert way["counted"] == 1.0, way
        assert way["seen"] and way["again"] and way["compiled"], way
    assert again["same"] and again["inside"] and not again["outside"]
    assert "no second derivative" in again["said"] and "SDPBackend.MATH" in again["said"]


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_kernel_compiles_within_the_memory_of_its_gpu(capability):
    made = lines(SCRIPT, "compile", str(capability))
    assert len(made) == 11 * 3
    for line in made:
        assert line["shared"] <= SHARED[capability], line
        # Products of fp32 as wide as this have more operands than registers.
        assert line["spilled"] <= (4096 if "float32 256" in line["case"] else 512), line
