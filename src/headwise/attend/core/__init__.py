"""The types that methods are written with: method, call, site, state, schedules, random draws, recompute.

This is a door: what files of other rooms take from here by one line.
"""

from headwise.attend.core.acting import Acting
from headwise.attend.core.call import Call, Dropping, LogitEdit, RowReadings
from headwise.attend.core.forward import Entered
from headwise.attend.core.method import Attend, Method, touches_call
from headwise.attend.core.method_state import MethodState, strengths_on
from headwise.attend.core.packed import Packed
from headwise.attend.core.schedule import Schedule
from headwise.attend.core.shared_state import SharedState
from headwise.attend.core.site import Site

__all__ = [
    "Acting",
    "Attend",
    "Call",
    "Dropping",
    "Entered",
    "LogitEdit",
    "Method",
    "MethodState",
    "Packed",
    "RowReadings",
    "Schedule",
    "SharedState",
    "Site",
    "strengths_on",
    "touches_call",
]
