"""Remedies: what hosts advise where the attention that a model was loaded with cannot be reached."""

from __future__ import annotations

LOAD_SDPA = "load the model with attn_implementation='sdpa'"
SET_SDPA = "call model.set_attn_implementation('sdpa')"
