"""Projections: find the weights that compute the queries, keys, values and output of an attention layer."""

from headwise.attend.projections.block import Block, ProjectionError, whole
from headwise.attend.projections.finding import find, of, output
from headwise.attend.projections.site_projections import Projections

__all__ = ["Block", "ProjectionError", "Projections", "find", "of", "output", "whole"]
