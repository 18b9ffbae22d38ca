"""The input tokens of a layer's queries, and the width of its output."""

from __future__ import annotations

from torch import Tensor

from headwise.attend import projections
from headwise.attend.core import Call, Method, Site
from headwise.attend.methods.real_tokens import whole_of
from headwise.attend.projections import ProjectionError


def branch_channels(site: Site, method: str) -> int:
    """Return the number of output channels of the layer, which may differ from its inputs in hierarchical models."""
    try:
        return projections.output(site, method).width
    except ProjectionError:
        assert site.hidden is not None  # the plan refuses sites without what `shapes` names
        return site.hidden


JOINT = "reads the input tokens of a layer, and here image and text tokens enter separately"


def tokens_of_queries(method: Method, call: Call) -> Tensor:
    """Return the layer's input (B, t, C), one token for each query of this call or block.

    Raises:
        ValueError: if the layer's input is unknown, or its tokens are not those of the queries.
    """
    x, whole = call.hidden, whole_of(call)
    if x is None or x.shape[:2] != (whole.batch, whole.queries):
        shape = None if x is None else tuple(x.shape)
        raise ValueError(
            f"{type(method).__name__} needs the layer's input (B, T, C) with one token a query at {call.site.name}, "
            f"got {shape} for {whole.batch} rows of {whole.queries} queries: the layer cuts windows, or pools its "
            "queries; leave it out with where="
        )
    return x if call.query_block is None else x[:, call.query_block]
