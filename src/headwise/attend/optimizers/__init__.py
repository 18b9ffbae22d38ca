"""Optimizers that know the heads of each weight, constraints and decays for any optimizer, and groups of parameters."""

from headwise.attend.optimizers.alpha_decay import AlphaDecay
from headwise.attend.optimizers.cautious_decay import CautiousDecay
from headwise.attend.optimizers.hyperball import Hyperball
from headwise.attend.optimizers.muon import Muon
from headwise.attend.optimizers.stiefel import Stiefel
from headwise.attend.regularizing.parameter_groups import ParameterGroups, parameter_groups, undecayed

__all__ = [
    "AlphaDecay",
    "CautiousDecay",
    "Hyperball",
    "Muon",
    # a model's parameters in groups of an optimizer
    "ParameterGroups",
    "Stiefel",
    "parameter_groups",
    # those that must not decay
    "undecayed",
]
