"""Fingerprints: digests of initial weights and of the order of batches, which show that arms are paired."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# values read of each tensor: all of a smaller one, evenly spaced ones of a larger one
SAMPLE = 16_384


def of_weights(model: nn.Module) -> str:
    """Return the digest of a model's parameters and buffers: names, shapes, dtypes and values (sampled if large)."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


class Order:
    """The digest of batches in their order: after each batch, it covers all batches so far."""

    def __init__(self) -> None:
        self.count, self._digest = 0, hashlib.blake2b(digest_size=12)

    def add(self, batch: Any) -> str | None:
        """Add a batch; return the digest if the count is a power of two, so that short runs can be compared.

        Raises:
            TypeError: if a batch holds no tensor, number or text.
        """
        values = list(_leaves(batch))
        if not values:
            raise TypeError(
                f"run.saw() was given {type(batch).__name__}, which holds no tensor, number or text. Give the batch."
            )
        for leaf in values:
            _add(self._digest, leaf)
        self.count += 1
        return self._digest.hexdigest() if self.count & (self.count - 1) == 0 else None


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for name in sorted(batch, key=str):
            yield str(name)
            yield from _leaves(batch[name])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    elif isinstance(batch, (str, bytes, int, float)) or _is_tensor(batch):
        yield batch
    elif hasattr(batch, "__array__"):
        array = batch.__array__()
        yield f"{array.shape} {array.dtype}"
        yield array.reshape(-1)[:: max(1, array.size // SAMPLE)].tobytes()


def _is_tensor(value: Any) -> bool:
    # a script need not use torch
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _add(digest: Any, leaf: Any) -> None:
    if not _is_tensor(leaf):
        digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
        return
    digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
    local = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # a part of a sharded tensor
    if local.device.type == "meta" or local.numel() == 0:
        return
    flat = local.detach().reshape(-1)
    if len(flat) > SAMPLE:
        flat = flat[:: len(flat) // SAMPLE]
    values = flat.cpu().contiguous()
    digest.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))
