"""Curvature: the sharpness of a loss, and what an optimizer bears of it."""

from headwise.statistics.curvature.sharpness import Sharpness, sharpness
from headwise.statistics.curvature.stability import Stability, stability

__all__ = ["Sharpness", "Stability", "sharpness", "stability"]
