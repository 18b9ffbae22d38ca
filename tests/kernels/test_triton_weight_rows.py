"""The Triton kernels of stacked rows without a GPU: the numbers of fp64, and code for three kinds of GPU."""

from triton_process import SHARED, lines

SCRIPT = "triton_weight_rows_cases.py"


def test_weights_and_gradients_are_those_of_fp64():
    found = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(found) == 4
    for line in found:
        stored = 8e-3 if line["dtype"] == "torch.bfloat16" else 1e-6
        for name in ("weights", "slopes", "inner"):
            # false for nan too
            assert line[name] <= (stored if name != "inner" else 2e-6), line


def test_the_kernels_compile_for_each_gpu_and_do_not_spill():
    made = lines(SCRIPT, "compile")
    assert {line["capability"] for line in made} == {80, 90, 100}
    assert len({line["kernel"] for line in made}) == 2
    for line in made:
        assert line["spilled"] == 0 and line["shared"] <= SHARED[line["capability"]], line
