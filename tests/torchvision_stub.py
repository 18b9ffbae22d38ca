"""Define torchvision's operators as stubs if its own kernels do not load, so that timm and transformers import.

With the CPU build of torch and a CUDA build of torchvision, `import timm` raises `operator
torchvision::nms does not exist`. Import this file before timm, and before transformers once torchvision is installed;
subprocesses find it through PYTHONPATH. If torchvision works, or is not installed, nothing is done. timm itself
needs torchvision installed: its data loading imports it.
"""

import importlib.machinery
import importlib.util
from pathlib import Path

import tests_only
import torch

# torchvision is there; again here, because pytest-xdist sets a new path for its workers after they have started.
tests_only.on_path()

OPERATORS = (
    "nms qnms roi_align _roi_align_backward roi_pool _roi_pool_backward ps_roi_align _ps_roi_align_backward "
    "ps_roi_pool "
    "_ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"
).split()


def kernels_load() -> bool:
    """Return whether torchvision's compiled operators match the installed torch."""
    spec = importlib.util.find_spec("torchvision")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None:
        return False
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        library = folder / f"_C{suffix}"
        if library.exists():
            try:
                torch.ops.load_library(library)
            except OSError:
                continue
    return hasattr(torch.ops.torchvision, "nms")


def define_stubs() -> torch.library.Library | None:
    """Define each operator with a schema and no kernel, unless torchvision is absent or brings its own."""
    if importlib.util.find_spec("torchvision") is None or kernels_load():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor input) -> Tensor")
    return library


LIBRARY = define_stubs()
