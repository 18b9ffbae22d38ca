"""What a device computed, brought to the CPU by one copy: each copy holds the training up until the device has caught
up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, in their dtypes and shapes; those of one device travel together."""
    found = list(tensors)
    for device in {tensor.device for tensor in found if tensor.device.type != "cpu"}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        # fp64 holds fp32, flags and counts exactly; Apple's devices have none, and no figure in it either
        wide = torch.float32 if device.type == "mps" else torch.float64
        together = torch.cat([found[place].detach().flatten().to(wide) for place in places]).cpu()
        parts = together.split([found[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view(found[place].shape).to(found[place].dtype)
    return found
