"""Regularize, watch, audit and compare the attention layers of transformers.

Public names are resolved when they are first used, so that importing the package, and starting the command line, do not
import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Written out, because type checkers read it; what `_HOME` does not name is a method.
__all__ = [
    "GFSA",
    "LSA",
    "XSA",
    "AttentionDropout",
    "AttentionNormPenalty",
    "AttentionSink",
    "AttnScale",
    "BranchDrop",
    "ByDepth",
    "ContraNorm",
    "Decorrelation",
    "DifferentialAttention",
    "Disagreement",
    "DropAttention",
    "DropColumn",
    "DropHead",
    "DropKey",
    "EntropyPenalty",
    "FeatScale",
    "ForgettingAttention",
    "GatedOutput",
    "InputNoise",
    "InterleavedHeads",
    "JsonLines",
    "LayerScale",
    "LinearAttention",
    "MLflowRun",
    "Method",
    "NeuTRENO",
    "NuclearDecay",
    "ProductDecay",
    "QKClip",
    "QKNorm",
    "QKRates",
    "Ramp",
    "ReAttention",
    "Regularized",
    "RelaxedAttention",
    "SSMax",
    "SigmaReparam",
    "Site",
    "SoftCap",
    "SpectralCap",
    "SpectralNorm",
    "SymmetricAttention",
    "Temperature",
    "TensorBoard",
    "Thresholds",
    "VShape",
    "ValueResidual",
    "WeightNorm",
    "ZLoss",
    "__version__",
    "audit",
    "compress",
    "handle",
    "load_compressed",
    "parameter_groups",
    "parse",
    "regularize",
    "sharpness",
    "sites",
    "watch",
]

_HOME = {
    "Method": "core.method",
    "Site": "core.site",
    "Regularized": "regularizing.handle",
    "regularize": "regularizing.regularize",
    "handle": "regularizing.handle",
    "sites": "hosts.finding",
    "parse": "methods.text",
    "parameter_groups": "regularizing.parameter_groups",
    "VShape": "core.schedule",
    "ByDepth": "core.schedule",
    "Ramp": "core.schedule",
    "watch": "watching.watch",
    "JsonLines": "watching.logs",
    "TensorBoard": "watching.logs",
    "MLflowRun": "watching.loggers",
    "Thresholds": "watching.rules",
    "audit": "auditing.audit",
    "compress": "compressing.compress",
    "load_compressed": "compressing.record",
    "sharpness": "statistics.curvature.sharpness",
}

# Out of `from headwise import *`, which must work without transformers.
_OPTIONAL = {"WatchCallback": "watching.callbacks", "HeadwiseCallback": "watching.callbacks"}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name) or _OPTIONAL.get(name) or "methods"
    if name not in __all__ and name not in _OPTIONAL:
        # with these two Python itself says what was meant
        raise AttributeError(f"module 'headwise' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_OPTIONAL])


# For type checkers, which do not run `__getattr__`: a test holds these names against `__all__`.
if TYPE_CHECKING:
    from headwise.auditing.audit import audit as audit
    from headwise.compressing.compress import compress as compress
    from headwise.compressing.record import load_compressed as load_compressed
    from headwise.core.method import Method as Method
    from headwise.core.schedule import ByDepth as ByDepth
    from headwise.core.schedule import Ramp as Ramp
    from headwise.core.schedule import VShape as VShape
    from headwise.core.site import Site as Site
    from headwise.hosts.finding import sites as sites
    from headwise.methods import GFSA as GFSA
    from headwise.methods import LSA as LSA
    from headwise.methods import XSA as XSA
    from headwise.methods import AttentionDropout as AttentionDropout
    from headwise.methods import AttentionNormPenalty as AttentionNormPenalty
    from headwise.methods import AttentionSink as AttentionSink
    from headwise.methods import AttnScale as AttnScale
    from headwise.methods import BranchDrop as BranchDrop
    from headwise.methods import ContraNorm as ContraNorm
    from headwise.methods import Decorrelation as Decorrelation
    from headwise.methods import DifferentialAttention as DifferentialAttention
    from headwise.methods import Disagreement as Disagreement
    from headwise.methods import DropAttention as DropAttention
    from headwise.methods import DropColumn as DropColumn
    from headwise.methods import DropHead as DropHead
    from headwise.methods import DropKey as DropKey
    from headwise.methods import EntropyPenalty as EntropyPenalty
    from headwise.methods import FeatScale as FeatScale
    from headwise.methods import ForgettingAttention as ForgettingAttention
    from headwise.methods import GatedOutput as GatedOutput
    from headwise.methods import InputNoise as InputNoise
    from headwise.methods import InterleavedHeads as InterleavedHeads
    from headwise.methods import LayerScale as LayerScale
    from headwise.methods import LinearAttention as LinearAttention
    from headwise.methods import NeuTRENO as NeuTRENO
    from headwise.methods import NuclearDecay as NuclearDecay
    from headwise.methods import ProductDecay as ProductDecay
    from headwise.methods import QKClip as QKClip
    from headwise.methods import QKNorm as QKNorm
    from headwise.methods import QKRates as QKRates
    from headwise.methods import ReAttention as ReAttention
    from headwise.methods import RelaxedAttention as RelaxedAttention
    from headwise.methods import SigmaReparam as SigmaReparam
    from headwise.methods import SoftCap as SoftCap
    from headwise.methods import SpectralCap as SpectralCap
    from headwise.methods import SpectralNorm as SpectralNorm
    from headwise.methods import SSMax as SSMax
    from headwise.methods import SymmetricAttention as SymmetricAttention
    from headwise.methods import Temperature as Temperature
    from headwise.methods import ValueResidual as ValueResidual
    from headwise.methods import WeightNorm as WeightNorm
    from headwise.methods import ZLoss as ZLoss
    from headwise.methods.text import parse as parse
    from headwise.regularizing.handle import Regularized as Regularized
    from headwise.regularizing.handle import handle as handle
    from headwise.regularizing.parameter_groups import parameter_groups as parameter_groups
    from headwise.regularizing.regularize import regularize as regularize
    from headwise.statistics.curvature.sharpness import sharpness as sharpness
    from headwise.watching.callbacks import HeadwiseCallback as HeadwiseCallback
    from headwise.watching.callbacks import WatchCallback as WatchCallback
    from headwise.watching.loggers import MLflowRun as MLflowRun
    from headwise.watching.logs import JsonLines as JsonLines
    from headwise.watching.logs import TensorBoard as TensorBoard
    from headwise.watching.rules import Thresholds as Thresholds
    from headwise.watching.watch import watch as watch
