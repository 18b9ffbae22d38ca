"""Hosts: one package or module for each way in which models call attention.

This is a door too: what files of other parts take of layers.
"""

from headwise.attend.hosts.finding import find
from headwise.attend.hosts.layers import branch_ends
from headwise.attend.hosts.layers.declared import Candidate, forward_of, names_used, reached
from headwise.attend.hosts.layers.refusal import refusal

__all__ = [
    # a layer that was found, with its adapter or why it has none
    "Candidate",
    # where the branches of a block end
    "branch_ends",
    # all layers of a model
    "find",
    # the forward of a module, below what wraps it
    "forward_of",
    # the names that a forward reads
    "names_used",
    # the modules that a forward reaches
    "reached",
    # why methods do not act on a layer
    "refusal",
]
