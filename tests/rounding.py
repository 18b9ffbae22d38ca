"""One tolerance for figures from two kernels, or from one kernel on two layouts: their bits differ between
processors."""

import torch
from torch import Tensor

# Without headwise, the eager and the fused attention of the tiny models here differ by up to 1.0e-6 of the largest
# output (Qwen3, ATEN_CPU_CAPABILITY=avx2; 0.9e-6 under default and 0.7e-6 under avx512): twice that is rounding.
TOLERANCE = 2e-6


def assert_same_to_rounding(got: Tensor, expected: Tensor) -> None:
    """Compare to 2e-6 of the largest number, or of 1 if all are smaller."""
    largest = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE * largest)
