"""Regularize, watch, audit and compare the attention layers of transformers.

Public names are resolved when they are first used, so that importing the package, and starting the command line, do not
import torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The module of each public name; names of methods are not listed here, but in headwise.methods.
_HOME = {
    "Method": "core.method",
    "Site": "core.site",
    "Regularized": "regularizing.handle",
    "regularize": "regularizing.regularize",
    "handle": "regularizing.handle",
    "load_pretrained": "regularizing.load_pretrained",
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
    "sharpness": "statistics.sharpness",
    "Muon": "optimizers.muon",
    "Hyperball": "optimizers.hyperball",
    "Stiefel": "optimizers.stiefel",
    "CautiousDecay": "optimizers.cautious_decay",
    "AlphaDecay": "optimizers.alpha_decay",
    "judge": "judging.from_python",
    "run": "training.script_run",
    "Run": "training.script_run",
}

# Not in `from headwise import *`, which must work with only torch installed.
_OPTIONAL = {
    "WatchCallback": "watching.callbacks",
    "HeadwiseCallback": "training.trainer_callback",
    "compare": "studies.from_python",
    "StudyReport": "studies.from_python",
    "StudyResult": "studies.from_python",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(["__version__", *_HOME, *_methods()])
    module = _HOME.get(name) or _OPTIONAL.get(name)
    # Python also calls this for submodules before it imports them. Methods are classes, so that headwise.methods, which
    # imports torch, is only imported for a name that begins with a capital.
    if module is None and name[:1].isupper() and name in _methods():
        module = "methods"
    if module is None:
        # The message has its own suggestion, because Python adds one only in tracebacks.
        names = [*_HOME, *_OPTIONAL, *(_methods() if name[:1].isupper() else ())]
        near = [] if name.startswith("_") else difflib.get_close_matches(name, names, n=1)
        suggestion = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'headwise' has no attribute {name!r}{suggestion}", obj=sys.modules[__name__])
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def _methods() -> list[str]:
    names: list[str] = importlib.import_module(".methods", __name__).__all__
    return names


def __dir__() -> list[str]:
    return sorted([*__getattr__("__all__"), *_OPTIONAL])


# For type checkers, which do not run `__getattr__`; a test compares these names with its own.
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
    from headwise.judging.from_python import judge as judge
    from headwise.methods import *  # noqa: F403
    from headwise.methods.text import parse as parse
    from headwise.optimizers.alpha_decay import AlphaDecay as AlphaDecay
    from headwise.optimizers.cautious_decay import CautiousDecay as CautiousDecay
    from headwise.optimizers.hyperball import Hyperball as Hyperball
    from headwise.optimizers.muon import Muon as Muon
    from headwise.optimizers.stiefel import Stiefel as Stiefel
    from headwise.regularizing.handle import Regularized as Regularized
    from headwise.regularizing.handle import handle as handle
    from headwise.regularizing.load_pretrained import load_pretrained as load_pretrained
    from headwise.regularizing.parameter_groups import parameter_groups as parameter_groups
    from headwise.regularizing.regularize import regularize as regularize
    from headwise.statistics.sharpness import sharpness as sharpness
    from headwise.studies.from_python import StudyReport as StudyReport
    from headwise.studies.from_python import StudyResult as StudyResult
    from headwise.studies.from_python import compare as compare
    from headwise.training.script_run import Run as Run
    from headwise.training.script_run import run as run
    from headwise.training.trainer_callback import HeadwiseCallback as HeadwiseCallback
    from headwise.watching.callbacks import WatchCallback as WatchCallback
    from headwise.watching.loggers import MLflowRun as MLflowRun
    from headwise.watching.logs import JsonLines as JsonLines
    from headwise.watching.logs import TensorBoard as TensorBoard
    from headwise.watching.rules import Thresholds as Thresholds
    from headwise.watching.watch import watch as watch
