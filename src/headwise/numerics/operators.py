"""How headwise's own operators are called: as registered ones where operators are seen, else without the registry.

A call of an operator that is registered with `torch.library` costs some 100 µs of the host, and its gradient more; a
plain `torch.autograd.Function` costs a third (docs/log.md). Small models are bound by the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from headwise.borders import in_transform, modes_see_operators

PLAIN = (Tensor, nn.Parameter)
_nothing = nullcontext()


def calls_are_seen(*tensors: Tensor) -> bool:
    """Return whether a call must be one registered operator.

    So it must for compilers and exports, for transforms of torch.func, for modes that count or trace operators, and for
    subclasses of tensors, such as fake or distributed ones.
    """
    if torch.compiler.is_compiling():
        return True
    traced = modes_see_operators() or in_transform() or torch.jit.is_tracing()
    return traced or any(type(x) not in PLAIN for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast, which would compute products of fp32 in half precision, is off.

    Where it is off anyway nothing is entered, which would cost more than a small kernel.
    """
    on = torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else _nothing
