"""The Triton kernel that cuts singular values without a GPU: the cut of a decomposition, and code for three GPUs."""

from triton_process import SHARED, lines

SCRIPT = "triton_cap_cases.py"
KEPT = {"far below", "just below", "cut before", "nothing"}
# Of directions whose singular values are close and far above the limit, the kernel tells one from another roughly.
CLOSE = {"most above", "a cold start", "tall", "stored in columns"}


def test_no_singular_value_stays_above_the_limit_and_what_is_below_keeps_its_bits():
    found = lines(SCRIPT, "run", TRITON_INTERPRET="1")
    assert len(found) == 24
    for line in found:
        assert line["same"] == (line["case"] in KEPT), line
        # half precision rounds the result
        rounded = 0 if line["dtype"] == "torch.float32" else 5e-3
        # false for nan too
        assert line["top"] <= 1.02 + rounded, line
        assert line["error"] <= (0.04 if line["case"] in CLOSE else 0.012) + rounded, line
    assert sum(line["before"] > 1.02 for line in found) >= 15


def test_the_kernel_compiles_for_each_gpu():
    made = lines(SCRIPT, "compile")
    assert [line["capability"] for line in made] == [80, 80, 90, 90, 100, 100]
    for line in made:
        assert line["shared"] <= SHARED[line["capability"]], line
        # where the small matrices are inverted, outside of the loops over a weight
        assert line["spilled"] <= 2048, line
