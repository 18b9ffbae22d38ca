"""Claims: the depths a config names, held against the tensors that exist before anything is built from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from headwise.auditing.errors import CheckpointError

DEPTH = re.compile(r"^(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^num_(en|de)coder_layers$|^depths?$")
# Parts of a model that come in numbers too, and may lie stacked in one tensor.
EXPERTS = re.compile(r"^(num|n|moe_num)_(local_|routed_)?experts$")


def check_depths(
    folder: Path, config: Any, shapes: dict[str, tuple[int, ...]], build: Callable[[Any], nn.Module]
) -> None:
    """Refuse a config that claims more layers or experts than the files can hold.

    A model of thousands of layers takes a minute to build before its first missing weight would be named.

    Args:
        folder: the checkpoint's, for the message.
        config: the config, and its parts.
        shapes: the shape of every tensor that exists.
        build: makes the structure of a config on no device.

    Raises:
        CheckpointError: naming the setting, its value and how many layers the tensors are numbered for.
    """
    numbered = 1 + max((int(n) for name in shapes for n in re.findall(r"(?:^|\.)(\d+)(?=\.|$)", name)), default=-1)
    longest = max((size for shape in shapes.values() for size in shape), default=0)
    for path, name, claimed in _claims(config):
        held = numbered if DEPTH.match(name) else max(numbered, longest)
        if claimed > held and _builds_as_many(config, path, name, build):
            what = "layers" if DEPTH.match(name) else "experts"
            raise CheckpointError(
                f"{folder / 'config.json'} claims {'.'.join((*path, name))}={claimed:,}, and the tensors of {folder} are numbered "
                f"for {numbered} {what} at most: weights and config do not belong together"
            )


def _claims(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, int]]:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and len(path) < 3:
            yield from _claims(value, (*path, name))
        elif DEPTH.match(name) or EXPERTS.match(name):
            numbers = value if isinstance(value, list | tuple) else [value]
            if numbers and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
                yield path, name, max(numbers)


def _builds_as_many(config: Any, path: tuple[str, ...], name: str, build: Callable[[Any], nn.Module]) -> bool:
    """Tell whether the setting makes weights of its own: ALBERT's layers share theirs, and some parts are not built at all."""
    try:
        one, two = (len(build(_small(config, path, name, count)).state_dict()) for count in (1, 2))
    except Exception:
        # What is wrong with the config is told where it is built as it stands.
        return False
    return two > one


def _small(config: Any, path: tuple[str, ...], name: str, count: int) -> Any:
    small = copy.deepcopy(config)
    for place, key, claimed in list(_claims(small)):
        part = small
        for step in place:
            part = getattr(part, step)
        value = getattr(part, key)
        # Two of all others: of two layers one may be sparse.
        chosen = count if (place, key) == (path, name) else min(claimed, 2)
        setattr(part, key, [chosen] * len(value) if isinstance(value, list | tuple) else chosen)
        _cut_lists(part, value, chosen)
    return small


def _cut_lists(part: Any, claimed: Any, kept: int) -> None:
    """Cut lists with an entry per layer, such as the kinds of the layers."""
    for key, value in list(vars(part).items()):
        if isinstance(claimed, int) and isinstance(value, list) and len(value) == claimed:
            setattr(part, key, value[:kept])
