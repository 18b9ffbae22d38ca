"""Optimizers that know the heads of each weight, and constraints and decays for any optimizer."""

from headwise.optimizers.alpha_decay import AlphaDecay
from headwise.optimizers.cautious_decay import CautiousDecay
from headwise.optimizers.hyperball import Hyperball
from headwise.optimizers.muon import Muon
from headwise.optimizers.stiefel import Stiefel

__all__ = ["AlphaDecay", "CautiousDecay", "Hyperball", "Muon", "Stiefel"]
