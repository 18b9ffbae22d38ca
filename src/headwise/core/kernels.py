"""The choice between a Triton kernel and the PyTorch form of the same computation."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

# "0" computes everything by the PyTorch forms, to compare them or to work around a fault of a kernel.
SWITCH = "HEADWISE_KERNELS"


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device: on CUDA, with Triton, unless `HEADWISE_KERNELS` is 0."""
    return device.type == "cuda" and os.environ.get(SWITCH) != "0" and has_triton()


@functools.cache
def has_triton() -> bool:
    """Return whether Triton, which comes with the CUDA builds of torch, is installed."""
    return importlib.util.find_spec("triton") is not None
