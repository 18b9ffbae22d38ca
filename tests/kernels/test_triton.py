"""The Triton kernels without a GPU: interpreted against the textbook, and compiled for three kinds of GPU.

In processes of their own: the interpreter is chosen when Triton is imported, and no other test should find it
installed.
"""

import pytest
import triton_process
from grids import part_of_grid
from triton_process import SHARED, races


def lines(*what, **environment):
    """Run triton_cases.py and read its lines."""
    return triton_process.lines("triton_cases.py", *what, **environment)


def rounding(case):
    """What the dtype rounds to; products of sharp logits lose what softmax cancels."""
    return 2e-2 if "bf16" in case else 2e-3 if "fp16" in case else 5e-4 if case == "large logits" else 1e-5


# of each kind one
SOME = (
    "grouped heads, causal, padding",
    "rows of the lowest number",
    "a row without any key",
    "bf16",
    "packed rows with a window",
)


@pytest.mark.parametrize("which", part_of_grid(("some", "all"), ("some",)))
def test_cases_have_the_textbooks_values_and_gradients(which):
    cases = SOME if which == "some" else ()
    interpreted = {line.pop("case"): line for line in lines("run", *cases, TRITON_INTERPRET="1")}
    assert len(interpreted) == len(SOME) if which == "some" else len(interpreted) >= 24
    wrong = {
        (case, part): error
        for case, errors in interpreted.items()
        for part, error in errors.items()
        # false for nan too
        if not error <= rounding(case)
    }
    assert not wrong


def test_a_launch_fits_cudas_grid_and_runs_on_the_device_of_its_tensors():
    """Windows make more heads than a grid's second axis takes; a model spread over GPUs calls on others than the
    current one."""
    launched = lines("launch")
    assert [line["kernel"] for line in launched] == ["forward_kernel", "queries_kernel", "keys_kernel"]
    for line in launched:
        first, *others = line["grid"]
        assert 72_000 <= first < 2**31
        assert all(axis < 2**16 for axis in others)
        assert line["device"] == "cpu"


@pytest.mark.grid
@pytest.mark.slow
def test_every_kernel_compiles_within_the_shared_memory_of_its_gpu():
    compiled = lines("compile")
    assert len(compiled) == 3 * 7 * 3
    for line in compiled:
        assert line["shared"] <= SHARED[line["capability"]], line
        # products of fp32 have more operands than registers
        assert line["spilled"] <= (4096 if line["case"].startswith("float32") else 128), line


# Of the kernel of keys as Triton 3.6 and 3.7 compiled it for sm_90: its gradients of the keys were wrong by 0.1.
LOOP = """
    %q = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x32x64xbf16, #shared, #smem, mutable>
    %first = ttg.memdesc_index %q[%c0] : !ttg.memdesc<{buffers}x32x64xbf16> -> !ttg.memdesc<32x64xbf16>
    %copy = ttg.async_copy_global_to_local %pointers, %first mask %seen : tensor<32x64x!tt.ptr<bf16>> -> <32x64xbf16>
    %sums:2 = scf.for %i = %c0 to %end step %c1 iter_args(%dk = %zero, %place = %c0)  : i32 {{
      %this = ttg.memdesc_index %q[%place] : !ttg.memdesc<{buffers}x32x64xbf16> -> !ttg.memdesc<32x64xbf16>
      %half = ttg.memdesc_subslice %this[16, 0] : !ttg.memdesc<32x64xbf16> -> !ttg.memdesc<16x64xbf16>
      %scores = ttng.warp_group_dot %k, %half, %none {{isAsync = true}} : tensor<128x16xbf16>
      %done:2 = ttng.warp_group_dot_wait %scores, %half {{pendings = 0 : i32}} : tensor<128x64xf32>
      %new = ttng.warp_group_dot %weights, %half, %dk {{isAsync = true}} : tensor<128x16xbf16>
      %known:2 = ttng.warp_group_dot_wait %new, %half {{pendings = {pending} : i32}} : tensor<128x64xf32>
      %next = ttg.memdesc_index %q[%to] : !ttg.memdesc<{buffers}x32x64xbf16> -> !ttg.memdesc<32x64xbf16>
      %later = ttg.async_copy_global_to_local %pointers, %next mask %seen : tensor<32x64x!tt.ptr<bf16>> -> <32x64xbf16>
      scf.yield %known#0, %to : tensor<128x64xf32>, i32
    }}
"""


@pytest.mark.parametrize(("buffers", "pending", "found"), [(1, 1, ["%q"]), (1, 0, []), (2, 1, [])])
def test_a_buffer_that_a_product_may_still_read_is_found(buffers, pending, found):
    assert races(LOOP.format(buffers=buffers, pending=pending)) == found
