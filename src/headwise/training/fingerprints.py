"""Fingerprints: digests of initial weights and of the order of batches, which show that arms are pairs."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# numbers of a tensor that are read: all of a smaller one, evenly spread ones of a larger
SAMPLE = 16_384


def of_weights(model: nn.Module) -> str:
    """Return the digest of a model's parameters and buffers: names, shapes, types, values (of large ones a sample)."""
    found = hashlib.blake2b(digest_size=12)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(name.encode())
        _add(found, tensor)
    return found.hexdigest()


class Order:
    """Digest batches in their order: after each, `digest` stands for all so far."""

    def __init__(self) -> None:
        self.count, self._found = 0, hashlib.blake2b(digest_size=12)

    def add(self, batch: Any) -> str | None:
        """Add a batch; give the digest where the count is a power of two: a run that is cut shows how far it came.

        Raises:
            TypeError: where a batch holds nothing that can be told from another.
        """
        held = list(_leaves(batch))
        if not held:
            raise TypeError(
                f"run.saw() was given {type(batch).__name__}, which holds no tensor, number or text. Give the batch."
            )
        for leaf in held:
            _add(self._found, leaf)
        self.count += 1
        return self._found.hexdigest() if self.count & (self.count - 1) == 0 else None


def _leaves(found: Any) -> Iterator[Any]:
    if isinstance(found, Mapping):
        for name in sorted(found, key=str):
            yield str(name)
            yield from _leaves(found[name])
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _leaves(item)
    elif isinstance(found, (str, bytes, int, float)) or _is_tensor(found):
        yield found
    elif hasattr(found, "__array__"):
        array = found.__array__()
        yield f"{array.shape} {array.dtype}"
        yield array.reshape(-1)[:: max(1, array.size // SAMPLE)].tobytes()


def _is_tensor(found: Any) -> bool:
    # a script that trains elsewhere need not have torch
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.Tensor)


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
