"""Shallow: a small-depth copy of a structure with real numbers, on which fused layouts can be seen."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

from headwise import hosts, projections
from headwise.core.site import Site
from headwise.projections import Block, ProjectionError, Projections
from headwise.projections.leaves import leaves

DEPTH = re.compile(r"^(num_|n_)?(hidden_|encoder_|decoder_)?layers?$|^num_(en|de)coder_layers$|^depth$")
LAYERS, VOCABULARY = 2, 64


class Shallow:
    """A model of the same config with two layers per stack and a small vocabulary, its weights drawn at random.

    A layer of the checkpoint has the layout of the shallow model's layer of the same class, sizes and place.
    """

    def __init__(self, config: Any, cls: type[nn.Module]) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = cls(_small(config)).eval()
        self._seen: dict[Any, tuple[Site, Projections]] = {}
        self._hidden: dict[Any, str] = {}
        for found in hosts.find(self.model):
            if found.adapter is None:
                self._hidden[_key(found.site)] = type(found.site.module).__name__
            else:
                self._seen.setdefault(_key(found.site), (found.site, None))  # type: ignore[arg-type]

    def projections(self, site: Site, model: nn.Module) -> Projections:
        """Return the projections of a site, seen on the shallow model's layer of the same kind.

        Raises:
            ProjectionError: where the layout cannot be seen there either, with the reason.
        """
        key = _key(site)
        if key in self._hidden:
            raise ProjectionError(
                f"{site.name} ({self._hidden[key]}) keeps queries, keys and values together and computes its attention "
                "by itself, so that which rows are whose cannot be seen. Load the model yourself, split them into "
                "q_proj, k_proj and v_proj, and pass it as module.py:factory"
            )
        if key not in self._seen:
            raise ProjectionError(f"{site.name} has no like in a model of the same config with {LAYERS} layers")
        twin, found = self._seen[key]
        if found is None:
            found = projections.find(twin, self.model)
            self._seen[key] = (twin, found)
        return _moved(found, twin, site, model)


def _key(site: Site) -> tuple[Any, ...]:
    shapes = tuple((leaf.name[len(site.name) :], leaf.rows, leaf.columns) for leaf in leaves(site.module, site.name))
    return type(site.module), site.is_cross, re.sub(r"\d+", "#", site.name), shapes


def _moved(found: Projections, twin: Site, site: Site, model: nn.Module) -> Projections:
    moved = Projections(site.name, found.layout, missing=dict(found.missing), verified=found.verified)
    for block in found.blocks:
        setattr(moved, block.kind, _block(block, twin, site, model))
    return moved


def _block(block: Block, twin: Site, site: Site, model: nn.Module) -> Block:
    where = _renamed(block.where, twin.name, site.name)
    made = copy.copy(block)
    made.where, made.module = where, model.get_submodule(where.rpartition(".")[0])
    if block.bias_module is not None:
        made.bias_module = made.module if block.bias_module is block.module else site.module
    return made


def _renamed(where: str, twin: str, site: str) -> str:
    """Take a name from the twin's layer to the site's: below it, or beside it below the same parent."""
    if where.startswith(f"{twin}."):
        return site + where[len(twin) :]
    return site.rpartition(".")[0] + where[len(twin.rpartition(".")[0]) :]


def _small(config: Any) -> Any:
    small = copy.deepcopy(config)
    for part in [small, *(v for v in vars(small).values() if hasattr(v, "to_dict"))]:
        depths = {v for k, v in vars(part).items() if DEPTH.match(k) and isinstance(v, int)}
        for key, value in list(vars(part).items()):
            if DEPTH.match(key) and isinstance(value, int):
                setattr(part, key, min(value, LAYERS))
            elif isinstance(value, list) and len(value) in depths:
                setattr(part, key, value[:LAYERS])
            elif key == "vocab_size" and isinstance(value, int):
                setattr(part, key, min(value, VOCABULARY))
            elif key.endswith("token_id") and isinstance(value, int):
                setattr(part, key, min(value, VOCABULARY - 1))
    return small
