"""Remedies that the error messages of several packages share."""

from __future__ import annotations

LOAD_SDPA = "load the model with attn_implementation='sdpa'"
SET_SDPA = "call model.set_attn_implementation('sdpa')"
OWN_ATTENTION = (
    'pass attention="headwise" to regularize(), by which headwise computes the attention of these layers itself, or '
    "load the model with attn_implementation='sdpa'"
)
LEAVE_OUT = "leave the layer out with where="
