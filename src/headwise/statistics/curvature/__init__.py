"""Curvature: the sharpness of a loss, and the largest sharpness at which an optimizer is stable."""

from headwise.statistics.curvature.sharpness import Sharpness, Underway, sharpness, sharpness_underway
from headwise.statistics.curvature.stability import Stability, stability

__all__ = ["Sharpness", "Stability", "Underway", "sharpness", "sharpness_underway", "stability"]
