"""Projections: find the weights that compute the queries, keys, values and output of an attention layer."""

from headwise.projections.block import Block, ProjectionError, whole
from headwise.projections.finding import find, of, output
from headwise.projections.site_projections import Projections

__all__ = ["Block", "ProjectionError", "Projections", "find", "of", "output", "whole"]
