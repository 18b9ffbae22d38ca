"""Curvature: the sharpness of a loss, and the largest sharpness at which an optimizer is stable."""

from headwise.statistics.curvature.sharpness import Sharpness, sharpness
from headwise.statistics.curvature.stability import Stability, stability

__all__ = ["Sharpness", "Stability", "sharpness", "stability"]
