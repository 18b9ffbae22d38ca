"""The error of checkpoints, and the remedies that messages of several rooms share, nearest names among them."""

from __future__ import annotations

import difflib


class CheckpointError(ValueError):
    """A checkpoint is corrupt, truncated, pickled, unknown or does not fit; the message has the file and the remedy."""


LOAD_SDPA = "load the model with attn_implementation='sdpa'"
SET_SDPA = "call model.set_attn_implementation('sdpa')"
OWN_ATTENTION = (
    'pass attention="headwise" to regularize(), by which headwise computes the attention of these layers itself, or '
    "load the model with attn_implementation='sdpa'"
)
LEAVE_OUT = "leave the layer out with where="


def suggest(name: str, known: list[str]) -> str:
    """Return " Did you mean ...?" with the nearest known name, or an empty string."""
    lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f" Did you mean {lower[near[0]]!r}?" if near else ""
