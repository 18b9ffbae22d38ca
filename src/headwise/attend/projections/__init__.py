"""Projections: find the weights that compute the queries, keys, values and output of an attention layer.

This is a door too: what files of other parts take of weights.
"""

from headwise.attend.projections.adapted import effective, is_adapted, obstacle
from headwise.attend.projections.block import Block, ProjectionError, whole
from headwise.attend.projections.finding import find, of, output
from headwise.attend.projections.latent import MAKES
from headwise.attend.projections.leaves import Leaf, still
from headwise.attend.projections.products import product_of
from headwise.attend.projections.site_projections import Projections

__all__ = [
    # of which kinds of attention one weight makes the input of another
    "MAKES",
    # the part of a weight that makes one kind of heads
    "Block",
    # a matrix of a model, and where it stands
    "Leaf",
    # says why the weights of a site cannot be told
    "ProjectionError",
    # the weights that make queries, keys, values and the output of a site
    "Projections",
    # a weight with its adapter
    "effective",
    # find the projections of a site, running an example if need be
    "find",
    # whether a layer has an adapter
    "is_adapted",
    # why a weight cannot be read
    "obstacle",
    # the projections of a site
    "of",
    # the output projection alone
    "output",
    # the product of two projections, by heads
    "product_of",
    # keep reads of weights from changing the state of parametrizations
    "still",
    # a block that is all of its weight
    "whole",
]
