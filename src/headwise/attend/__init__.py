"""Regularizing: methods, the attention that they act on, and the hosts by which models reach it. Needs torch alone.

This is the door: what files of other parts take from here. `core`, `projections`, `hosts` and `optimizers` are doors of
their own, to the vocabulary of methods, weights, layers and optimizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.files.doors import door

if TYPE_CHECKING:
    from headwise.attend.attention.fitted_layer import FittedLayer as FittedLayer
    from headwise.attend.core import schedule as schedule
    from headwise.attend.core.call import Call as Call
    from headwise.attend.core.method import Method as Method
    from headwise.attend.core.passes import HeldKeys as HeldKeys
    from headwise.attend.core.shared_state import Entered as Entered
    from headwise.attend.core.site import Site as Site
    from headwise.attend.hosts.finding import sites as sites
    from headwise.attend.methods.text import parse as parse
    from headwise.attend.regularizing.handle import Regularized as Regularized
    from headwise.attend.regularizing.handle import handle as handle
    from headwise.attend.regularizing.loop_checks import OptimizerSteps as OptimizerSteps
    from headwise.attend.regularizing.plan import Where as Where
    from headwise.attend.regularizing.plan import watchable as watchable
    from headwise.attend.regularizing.regularize import regularize as regularize

# each name with its module, imported on first use
_DOOR = {
    # one regularizer: what each method derives from
    "Method": "core.method",
    # one pass through a site, with mask, draws and penalties
    "Call": "core.call",
    # one attention layer of a model
    "Site": "core.site",
    # the function in a fitted layer, which calls its observer
    "FittedLayer": "attention.fitted_layer",
    # a value that a layer's input leaves for its output, in any thread
    "Entered": "core.shared_state",
    # the keys of a step's draws on the device, for steps that are captured
    "HeldKeys": "core.passes",
    # strengths that change during training: Ramp, VShape and ByDepth
    "schedule": "core",
    # all attention layers of a model
    "sites": "hosts.finding",
    # methods from their text
    "parse": "methods.text",
    # which sites a user chooses
    "Where": "regularizing.plan",
    # the layers that a watch can be on
    "watchable": "regularizing.plan",
    # fit methods onto a model
    "regularize": "regularizing.regularize",
    # the handle of a regularized model
    "Regularized": "regularizing.handle",
    # the handle that a model has already
    "handle": "regularizing.handle",
    # counts the steps of optimizers that hold a model
    "OptimizerSteps": "regularizing.loop_checks",
}
__getattr__, __all__ = door(__name__, _DOOR)
