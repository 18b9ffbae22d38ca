"""The choice between a Triton kernel and the PyTorch form of the same computation."""

from __future__ import annotations

import importlib.util
import os

import torch

# "0" computes everything by the PyTorch forms, to compare them or to work around a fault of a kernel.
SWITCH = "HEADWISE_KERNELS"
# Triton comes with the CUDA builds of torch. Looked up here, because torch.compile traces neither the search for a
# module nor a cached function, and compiled calls ask.
HAS_TRITON = importlib.util.find_spec("triton") is not None


def kernels_run_on(device: torch.device) -> bool:
    """Return whether Triton kernels compute on this device: on CUDA, with Triton, unless `HEADWISE_KERNELS` is 0."""
    return HAS_TRITON and device.type == "cuda" and os.environ.get(SWITCH) != "0"
