"""What a refused call may not change, written down and compared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from small_models import HOSTS, Own
from torch import nn


def fresh(host: str = "own") -> nn.Module:
    """Make a model of three layers, the same every time."""
    torch.manual_seed(0)
    return Own(depth=3) if host == "own" else HOSTS[host].make()


def untouched(model: nn.Module) -> tuple[Any, ...]:
    """Write down everything that a refused call may not change."""
    return (
        {key: value.clone() for key, value in model.state_dict().items()},
        [(name, type(m), m.training, sorted(vars(m)), list(m._modules)) for name, m in model.named_modules()],
        [(name, p.requires_grad, p.grad, id(p)) for name, p in model.named_parameters()],
        [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._load_state_dict_pre_hooks))
            for m in model.modules()
        ],
        torch.get_rng_state(),
        F.scaled_dot_product_attention,
    )


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    """Compare what two calls of `untouched` wrote down."""
    keys, modules, parameters, hooks, rng, function = zip(a, b, strict=True)
    assert list(keys[0]) == list(keys[1])
    assert all(torch.equal(keys[0][k], keys[1][k]) for k in keys[0])
    for before, after in (modules, parameters, hooks):
        assert before == after
    assert torch.equal(*rng)
    assert function[0] is function[1]
