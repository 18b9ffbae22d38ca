"""The Triton kernel of draws without a GPU: the bits of the CPU, and code for three kinds of GPU."""

from triton_process import lines

SCRIPT = "triton_draw_cases.py"


def test_the_kernel_draws_the_numbers_of_the_cpu():
    drawn = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(drawn) == 3 * (3 * 3 + 3)
    for line in drawn:
        # the hash is exact, the logarithm and the cosine of a normal number are not
        assert line["error"] <= (2e-6 if line["kind"] == "normal" else 0.0), line
        assert line["draw"] == "one number" or line["differ"] > 1, line


def test_the_kernel_compiles_for_each_gpu_without_spilling():
    made = lines(SCRIPT, "compile")
    assert {line["capability"] for line in made} == {80, 90, 100}
    assert len(made) == 12
    for line in made:
        assert line["kernel"] == "draw_kernel" and line["spilled"] == 0 and line["registers"] <= 64, line
