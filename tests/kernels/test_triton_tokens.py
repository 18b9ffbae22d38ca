"""The Triton kernels of the figures of tokens, without a GPU: interpreted against their definitions, and compiled."""

import pytest
from triton_process import SHARED, lines

SCRIPT = "triton_token_cases.py"


def test_cases_have_the_figures_of_all_pairs_of_tokens():
    found = {line.pop("case"): line for line in lines(SCRIPT, "run", TRITON_INTERPRET="1")}
    assert len(found) == 16
    # Shares are roots of differences; false for nan too.
    wrong = {case: errors for case, errors in found.items() if not max(errors.values()) <= 1e-6}
    assert not wrong


@pytest.mark.grid
@pytest.mark.slow
def test_every_launch_compiles_without_spilling():
    compiled = lines(SCRIPT, "compile")
    assert {line["kernel"] for line in compiled} == {"tokens_kernel", "figures_kernel"}
    for line in compiled:
        assert line["shared"] <= SHARED[line["capability"]], line
        # Tokens of 8,192 numbers in fp64 are more than the registers of a thread hold.
        assert line["spilled"] == 0 or line["case"].endswith("8192"), line
