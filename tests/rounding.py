"""One tolerance for figures that two kernels give, or one kernel on two layouts: their bits differ between processors."""

import torch
from torch import Tensor


def assert_same_to_rounding(got: Tensor, wanted: Tensor) -> None:
    """Compare to 1e-6 of the largest number, or of 1 where all are smaller."""
    largest = max(1.0, float(wanted.detach().abs().max()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6 * largest)
