"""Refusals: why a product of a site cannot be cut, as far as the site itself says."""

from __future__ import annotations

from collections import Counter

from torch import nn

from headwise.compressing.site_cut import FACTORS
from headwise.core.site import Site
from headwise.projections import Block, ProjectionError, Projections

ROTARY = (
    "rotary positions stand between queries and keys, so that their product depends on the distance of two tokens: "
    "cut values "
    'and output alone, parts="vo"'
)
NORMED = (
    "queries and keys are normalised, so that the scores are not their weights' product: cut values and output "
    'alone, parts="vo"'
)
MULTIHEAD = (
    "nn.MultiheadAttention reads its weights itself and has no smaller form: use a layer that calls "
    "F.scaled_dot_product_attention on projections of its own"
)


def reason(site: Site, found: Projections, part: str, shared: Counter[int]) -> str:
    """Say why a product cannot be cut; empty where nothing speaks against it.

    `shared` counts how often each parameter stands in the model.
    """
    if isinstance(site.module, nn.MultiheadAttention):
        return MULTIHEAD
    if part == "qk" and site.rope:
        return ROTARY
    if part == "qk" and site.qk_norm:
        return NORMED
    try:
        blocks = found.need("".join(FACTORS[part]), "compress")
    except ProjectionError as error:
        return str(error)
    return next(filter(None, (_of_block(block, shared) for block in blocks)), "")


def _of_block(block: Block, shared: Counter[int]) -> str:
    module = block.module
    if type(module) is not nn.Linear and not block.transposed:
        return (
            f"{block.maker} is a {type(module).__name__}: only a plain linear layer is cut; fold or merge what stands "
            "on it first"
        )
    if block.bias_module is not None and block.bias_module is not module:
        return f"{block.maker} has its bias outside of it, as {type(block.bias_module).__name__}.{block.bias_name}"
    if module._forward_hooks or module._forward_pre_hooks:
        return f"{block.maker} has hooks on it, which a smaller layer would lose: remove them first"
    if not all(bool(parameter.detach().isfinite().all()) for parameter in module.parameters()):
        return f"{block.maker} has weights that are not finite"
    if any(shared[id(parameter)] > 1 for parameter in module.parameters()):
        return f"{block.maker} shares its weights with another layer"
    return ""
