"""Defines torchvision's operators as stubs, so that timm imports where torch is the CPU build and torchvision is not.

Import it before timm, and before transformers once torchvision is installed; subprocesses through PYTHONPATH.
"""

import importlib.util

import torch

OPERATORS = (
    "nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward ps_roi_pool "
    "_ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"
).split()


def _kernels_are_missing() -> bool:
    if importlib.util.find_spec("torchvision") is None or torch.cuda.is_available():
        return False
    return not hasattr(torch.ops.torchvision, "nms")


if _kernels_are_missing():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in OPERATORS:
        _library.define(f"{_name}(Tensor input) -> Tensor")
