"""Regularize, watch, audit and compare the attention layers of transformers.

Public names are resolved when they are first used, so that importing the package, and starting the command line, do not
import torch.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from headwise.files.optional_imports import needing

__version__ = "0.2.0"

# The module of each public name; names of methods are not listed here, but in headwise.attend.methods.
_HOME = {
    "Method": "attend.core.method",
    "Site": "attend.core.site",
    "Regularized": "attend.regularizing.handle",
    "regularize": "attend.regularizing.regularize",
    "handle": "attend.regularizing.handle",
    "load_pretrained": "attend.regularizing.load_pretrained",
    "sites": "attend.hosts.finding",
    "parse": "attend.methods.text",
    "parameter_groups": "attend.regularizing.parameter_groups",
    "importance": "attend.regularizing.importance",
    "VShape": "attend.core.schedule",
    "ByDepth": "attend.core.schedule",
    "Ramp": "attend.core.schedule",
    "watch": "health.watching.watch",
    "JsonLines": "health.watching.logs",
    "TensorBoard": "health.watching.logs",
    "MLflowRun": "health.watching.loggers",
    "Thresholds": "health.watching.rules",
    "audit": "health.auditing.audit",
    "compress": "attend.compressing.compress",
    "load_compressed": "attend.compressing.record",
    "sharpness": "health.statistics.sharpness",
    "Muon": "attend.optimizers.muon",
    "Hyperball": "attend.optimizers.hyperball",
    "Stiefel": "attend.optimizers.stiefel",
    "CautiousDecay": "attend.optimizers.cautious_decay",
    "AlphaDecay": "attend.optimizers.alpha_decay",
}

# Not in `from headwise import *`, which must work with only torch installed.
_OPTIONAL = {
    "alarms": "health.auditing.log_alarms",
    "judge": "headwise_verdict.judging.from_python",
    "run": "lab.training.script_run",
    "Run": "lab.training.script_run",
    "WatchCallback": "health.watching.callbacks",
    "HeadwiseCallback": "lab.training.trainer_callback",
    "compare": "lab.studies.from_python",
    "StudyReport": "headwise_verdict.reporting.study_result",
    "StudyResult": "headwise_verdict.reporting.study_result",
}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(["__version__", *_HOME, *_methods()])
    module = _HOME.get(name) or _OPTIONAL.get(name)
    # Python also calls this for submodules before it imports them. Methods are classes, so that headwise.methods, which
    # imports torch, is only imported for a name that begins with a capital.
    if module is None and name[:1].isupper() and name in _methods():
        module = "attend.methods"
    if module is None:
        # The message has its own suggestion, because Python adds one only in tracebacks.
        names = [*_HOME, *_OPTIONAL, *(_methods() if name[:1].isupper() else ())]
        near = [] if name.startswith("_") else difflib.get_close_matches(name, names, n=1)
        suggestion = f". Did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'headwise' has no attribute {name!r}{suggestion}", obj=sys.modules[__name__])
    with needing(f"headwise.{name}", "study"):
        absolute = module if module.startswith("headwise_verdict.") else f"{__name__}.{module}"
        value = getattr(importlib.import_module(absolute), name)
    globals()[name] = value
    return value


def _methods() -> list[str]:
    names: list[str] = importlib.import_module(".attend.methods", __name__).__all__
    return names


def __dir__() -> list[str]:
    return sorted([*__getattr__("__all__"), *_OPTIONAL])


# For type checkers, which do not run `__getattr__`; a test compares these names with its own.
if TYPE_CHECKING:
    from headwise.attend.compressing.compress import compress as compress
    from headwise.attend.compressing.record import load_compressed as load_compressed
    from headwise.attend.core.method import Method as Method
    from headwise.attend.core.schedule import ByDepth as ByDepth
    from headwise.attend.core.schedule import Ramp as Ramp
    from headwise.attend.core.schedule import VShape as VShape
    from headwise.attend.core.site import Site as Site
    from headwise.attend.hosts.finding import sites as sites
    from headwise.attend.methods import *  # noqa: F403
    from headwise.attend.methods.text import parse as parse
    from headwise.attend.optimizers.alpha_decay import AlphaDecay as AlphaDecay
    from headwise.attend.optimizers.cautious_decay import CautiousDecay as CautiousDecay
    from headwise.attend.optimizers.hyperball import Hyperball as Hyperball
    from headwise.attend.optimizers.muon import Muon as Muon
    from headwise.attend.optimizers.stiefel import Stiefel as Stiefel
    from headwise.attend.regularizing.handle import Regularized as Regularized
    from headwise.attend.regularizing.handle import handle as handle
    from headwise.attend.regularizing.importance import importance as importance
    from headwise.attend.regularizing.load_pretrained import load_pretrained as load_pretrained
    from headwise.attend.regularizing.parameter_groups import parameter_groups as parameter_groups
    from headwise.attend.regularizing.regularize import regularize as regularize
    from headwise.health.auditing.audit import audit as audit
    from headwise.health.auditing.log_alarms import alarms as alarms
    from headwise.health.statistics.sharpness import sharpness as sharpness
    from headwise.health.watching.callbacks import WatchCallback as WatchCallback
    from headwise.health.watching.loggers import MLflowRun as MLflowRun
    from headwise.health.watching.logs import JsonLines as JsonLines
    from headwise.health.watching.logs import TensorBoard as TensorBoard
    from headwise.health.watching.rules import Thresholds as Thresholds
    from headwise.health.watching.watch import watch as watch
    from headwise.lab.studies.from_python import compare as compare
    from headwise.lab.training.script_run import Run as Run
    from headwise.lab.training.script_run import run as run
    from headwise.lab.training.trainer_callback import HeadwiseCallback as HeadwiseCallback
    from headwise_verdict import StudyResult as StudyResult
    from headwise_verdict import judge as judge
    from headwise_verdict.reporting.study_result import StudyReport as StudyReport
