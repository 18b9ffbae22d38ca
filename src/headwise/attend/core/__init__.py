"""The types that methods are written with: method, call, site, state, schedules, random draws, recompute.

This is a door: what files of other rooms, and of other parts, take from here.
"""

from headwise.attend.core.call import Call
from headwise.attend.core.matrix_free_forms import Dropping, LogitEdit, RowReadings
from headwise.attend.core.method import Attend, Method
from headwise.attend.core.method_state import MethodState
from headwise.attend.core.packed import Packed
from headwise.attend.core.schedule import Schedule
from headwise.attend.core.shared_state import SharedState
from headwise.attend.core.site import Site

__all__ = [
    # a map of the values: a head's attention, or its edit
    "Attend",
    # one pass through a site
    "Call",
    # single weights that a method drops
    "Dropping",
    # an edit of the logits that kernels know
    "LogitEdit",
    # one regularizer
    "Method",
    # what a method keeps on a site
    "MethodState",
    # sequences that share rows
    "Packed",
    # readings of the attention weights
    "RowReadings",
    # a strength that changes during training
    "Schedule",
    # what the fitted layers of one model share
    "SharedState",
    # one attention layer
    "Site",
]
