"""A tape of operators, which stands for a CUDA graph on a CPU."""

import torch
from torch.utils._pytree import tree_leaves

from headwise.borders import DispatchMode


class Tape(DispatchMode):
    """Records the operators of a function, and runs them again on the same memory, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if old.untyped_storage().data_ptr() not in given:
                    old.copy_(new)


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def on_tape(run):
    with Tape() as tape:
        result = run()
    return result, tape.replay
