"""Regularize, watch, audit and compare the attention layers of transformers.

Public names are resolved when they are first used, so that importing the package, and starting the command line, do not
import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_METHODS = (
    "AttentionNormPenalty AttnScale Decorrelation Disagreement DropAttention DropColumn DropHead DropKey EntropyPenalty FeatScale "
    "GatedOutput InputNoise NeuTRENO NuclearDecay ProductDecay QKClip QKNorm RelaxedAttention SigmaReparam SoftCap "
    "SpectralNorm SymmetricAttention Temperature ValueResidual WeightNorm"
).split()

_WHERE = {
    "Method": "method",
    "Site": "site",
    "Regularized": "regularize",
    "regularize": "regularize",
    "handle": "plan",
    "sites": "regularize",
    "parse": "text",
    "parameter_groups": "parameter_groups",
    "VShape": "schedule",
    "ByDepth": "schedule",
    "Ramp": "schedule",
    "watch": "watch",
    "JsonLines": "watching.logs",
    "TensorBoard": "watching.logs",
    "WatchCallback": "watching.callback",
    "Thresholds": "watching.alerts",
    "audit": "audit",
    **dict.fromkeys(_METHODS, "methods"),
}

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


class _Package(ModuleType):
    """Keeps `headwise.regularize`, `watch` and `audit` the functions, though modules of the same names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WHERE and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from .audit import audit as audit
    from .method import Method as Method
    from .parameter_groups import parameter_groups as parameter_groups
    from .plan import handle as handle
    from .regularize import Regularized as Regularized
    from .regularize import regularize as regularize
    from .regularize import sites as sites
    from .schedule import ByDepth as ByDepth
    from .schedule import Ramp as Ramp
    from .schedule import VShape as VShape
    from .site import Site as Site
    from .text import parse as parse
    from .watch import watch as watch
    from .watching.alerts import Thresholds as Thresholds
