"""The error of checkpoints, and the remedies that messages of several rooms share."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is corrupt, truncated, pickled, unknown or does not fit; the message has the file and the remedy."""


LOAD_SDPA = "load the model with attn_implementation='sdpa'"
SET_SDPA = "call model.set_attn_implementation('sdpa')"
OWN_ATTENTION = (
    'pass attention="headwise" to regularize(), by which headwise computes the attention of these layers itself, or '
    "load the model with attn_implementation='sdpa'"
)
LEAVE_OUT = "leave the layer out with where="
