"""A CUDA device of fake tensors: what runs on it is checked for tensors of two devices and for waits, and computes
nothing.

Needs the library made from cuda_without_a_gpu.cpp, preloaded into the process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headwise
from headwise.numerics import kernels

SOURCE = str(Path(headwise.__file__).parent)
aten = torch.ops.aten
ASKS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
# operators whose results are as large as the numbers say
SIZED_BY_NUMBERS = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


class Waits(RuntimeError):
    """Says that an operator needs the device's numbers to go on."""


class FakeCuda(TorchDispatchMode):
    """Runs operators on tensors of the CPU as they are, and those on "cuda" on fake tensors.

    Tensors of two devices in one operator raise, as on the device; so does indexing by a mask, whose result has no size
    here. What can go on with any number does, and is noted: questions such as `.item()`, copies to the CPU, and copies
    from there that hold up the program. Waits inside of CUDA's own solvers (singular values, eigenvalues) cannot be
    seen.

    Attributes:
        waits: the operators that waited and the lines of headwise that called them, since `forget()`.
        recording: whether the step is captured, whose replays would find no tensor of the CPU again: then every copy
            from there is noted.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self.recording = False
        self.operators: set[str] = set()

    def forget(self) -> list[str]:
        """Return the waits so far, and begin anew."""
        found, self.waits = self.waits, []
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        target = kwargs.get("device")
        goes_there = target is not None and torch.device(target).type == "cuda"
        if not there and not goes_there:
            return func(*args, **kwargs)
        if func.namespace == "headwise":
            self.operators.add(func._schema.name.removeprefix("headwise::"))
        if func in ASKS:
            self._note(func)
            return True if func is not ASKS[0] else torch.ones((), dtype=there[0].dtype).item()
        if func is aten._to_copy.default and (target is not None or not there):
            if there and not goes_there:
                self._note(func)
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            if not there and (self.recording or not kwargs.get("non_blocking")):
                self._note(func)
        if func is aten.copy_.default and not all(isinstance(x, FakeTensor) for x in args[:2]):
            waits = not (args[2:] == (True,) or kwargs.get("non_blocking"))
            if waits or self.recording or not isinstance(args[0], FakeTensor):
                self._note(func)
            if not isinstance(args[0], FakeTensor):
                return args[0]
        if func in INDEXING:
            self._check_index(func, args)
        if func in SIZED_BY_NUMBERS or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            raise Waits(f"{func} at {_line()} waits for the device")
        with self.fake:
            return func(*args, **kwargs)

    def _check_index(self, func: Any, args: Any) -> None:
        for index in (x for x in args[1] if isinstance(x, Tensor)):
            # one number is written by masked_fill, which needs no size
            if index.dtype in (torch.bool, torch.uint8) and (func is aten.index.Tensor or args[2].numel() != 1):
                raise Waits(f"{func} by a mask at {_line()} waits for the device")
            if not isinstance(index, FakeTensor):
                self._note(func)

    def _note(self, func: Any) -> None:
        line = _line()
        # A model's own copies, such as those of a mask it makes, are not ours.
        if line:
            self.waits.append(f"{func} at {line}")


def _tolist(tensor: FakeTensor) -> Any:
    # one copy, where fake tensors ask for number after number
    return tensor.to("cpu").tolist()


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if (name := frame.f_code.co_filename).startswith(SOURCE):
            return f"{name.removeprefix(SOURCE)[1:]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def believe_in_cuda() -> None:
    """Take away what torch's Python asks of a real device: its start, generators, clock and memory counters."""
    torch.cuda._lazy_init = lambda: None
    # Our operators stand for kernels; none is launched, so Triton need not be installed.
    kernels.operators_run_on = lambda device: device.type == "cuda"
    # torch.tensor(..., device="cuda") is made on the CPU and copied, where the copy can be seen
    torch._C._set_only_lift_cpu_tensors(True)
    for name in ("synchronize", "reset_peak_memory_stats", "set_rng_state", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("memory_allocated", "max_memory_allocated", "get_rng_state"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    FakeTensor.tolist = _tolist
    # A fake tensor cannot be put into the place of a real parameter's numbers: the module gets a new parameter.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
