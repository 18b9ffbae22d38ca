"""Optimizers that know the heads of each weight, and constraints and decays for any optimizer."""

from headwise.attend.optimizers.alpha_decay import AlphaDecay
from headwise.attend.optimizers.cautious_decay import CautiousDecay
from headwise.attend.optimizers.hyperball import Hyperball
from headwise.attend.optimizers.muon import Muon
from headwise.attend.optimizers.stiefel import Stiefel

__all__ = ["AlphaDecay", "CautiousDecay", "Hyperball", "Muon", "Stiefel"]
