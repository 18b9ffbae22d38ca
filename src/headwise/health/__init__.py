"""Health of attention heads: statistics, watching a training, auditing a checkpoint.

This is the door: what files of other parts take from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.files.doors import door

if TYPE_CHECKING:
    from headwise.health.auditing.audit import audit as audit
    from headwise.health.auditing.commands import add_commands as add_commands
    from headwise.health.statistics import STATISTICS as STATISTICS
    from headwise.health.statistics.sharpness import sharpness as sharpness
    from headwise.health.statistics.weights import WEIGHT_STATISTICS as WEIGHT_STATISTICS
    from headwise.health.watching.callbacks import WatchCallback as WatchCallback
    from headwise.health.watching.held_out import check_statistics as check_statistics
    from headwise.health.watching.held_out import first_maps as first_maps
    from headwise.health.watching.held_out import read as read
    from headwise.health.watching.logs import JsonLines as JsonLines
    from headwise.health.watching.losses import Spikes as Spikes
    from headwise.health.watching.rules import Thresholds as Thresholds
    from headwise.health.watching.watch import Watch as Watch
    from headwise.health.watching.watch import watch as watch

# each name with its module, imported on first use
_DOOR = {
    # every statistic of activations by name
    "STATISTICS": "statistics",
    # every statistic of weights by name
    "WEIGHT_STATISTICS": "statistics.weights",
    # the sharpness of a loss
    "sharpness": "statistics.sharpness",
    # read the health of a model while it trains
    "watch": "watching.watch",
    # what watch returns
    "Watch": "watching.watch",
    # the limits of alerts
    "Thresholds": "watching.rules",
    # a log of readings as lines of JSON
    "JsonLines": "watching.logs",
    # watch in a transformers Trainer
    "WatchCallback": "watching.callbacks",
    # deviations of losses from those before, and the limit of a spike
    "Spikes": "watching.losses",
    # figures of a model over given forwards, by statistic and place
    "read": "watching.held_out",
    # softmax maps of two layers on one sample
    "first_maps": "watching.held_out",
    # refuse a name that is no statistic, and tell whether one is of the loss
    "check_statistics": "watching.held_out",
    # the health of a checkpoint
    "audit": "auditing.audit",
    # add audit, alarms and replay to a command line
    "add_commands": "auditing.commands",
}
__getattr__, __all__ = door(__name__, _DOOR)
