"""Operations: torch's counter of floating-point operations, taught the fused attention of the CPU, which it leaves out."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


OF_THE_CPU = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counter() -> FlopCounterMode:
    """Give a counter of the operations of matrix products, convolutions and attention."""
    return FlopCounterMode(display=False, custom_mapping=OF_THE_CPU)
