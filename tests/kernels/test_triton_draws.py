"""The Triton kernel of draws without a GPU: the bits of the CPU, and code for three kinds of GPU."""

from triton_process import lines

SCRIPT = "triton_draw_cases.py"


def test_the_kernel_draws_the_numbers_of_the_cpu():
    drawn = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(drawn) == 3 * (4 * 3 + 3)
    for line in drawn:
        # the hash is exact, the logarithm and the cosine of a normal number are not
        assert line["error"] <= (2e-6 if line["kind"] == "normal" else 0.0), line
        assert line["draw"] == "one number" or line["differ"] > 1, line


def test_the_kernel_of_heads_gives_the_factors_of_the_cpu():
    drawn = lines(SCRIPT, "heads", TRITON_INTERPRET="1")
    assert len(drawn) == 3 * 2 * 3 * 2
    for line in drawn:
        assert line["error"] == 0, line
        assert line["p"] == 0 or line["differ"] > 1, line


def test_the_kernel_of_noise_gives_the_noise_of_the_cpu():
    drawn = lines(SCRIPT, "noise", TRITON_INTERPRET="1")
    assert len(drawn) == 4
    for line in drawn:
        # a number between two of bf16 may be rounded to either
        assert line["error"] <= (2**-7 if "bfloat16" in line["dtype"] else 2e-6), line


def test_the_kernel_of_keys_gives_those_of_the_host_and_counts():
    passes = lines(SCRIPT, "keys", TRITON_INTERPRET="1")
    assert len(passes) == 3
    for line in passes:
        assert line["found"] == line["right"] and len(set(line["right"])) == 3 and line["replays"] == 3, line


def test_the_kernel_compiles_for_each_gpu_without_spilling():
    made = lines(SCRIPT, "compile")
    assert {line["capability"] for line in made} == {80, 90, 100}
    assert len(made) == 24
    for line in made:
        assert line["kernel"] in ("draw_kernel", "heads_kernel", "noise_kernel", "key_kernel"), line
        assert line["spilled"] == 0 and line["registers"] <= 64, line
