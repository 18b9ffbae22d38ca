"""The Triton kernels of medians without a GPU: torch's medians to the bit, and code for three kinds of GPU."""

from triton_process import lines

SCRIPT = "triton_median_cases.py"


def test_the_kernels_give_the_medians_of_torch():
    found = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(found) == 7 * 3 * 3 * 2
    for line in found:
        assert line["error"] == 0 and line["nans"], line


def test_the_kernels_compile_for_each_gpu_without_spilling():
    made = lines(SCRIPT, "compile")
    assert {line["capability"] for line in made} == {80, 90, 100}
    assert len(made) == 3 * (2 + 1 + 4 + 1)
    for line in made:
        assert line["kernel"] in ("count_kernel", "median_kernel") and line["spilled"] == 0, line
