"""Remedies: what the errors of several rooms advise, written once."""

from __future__ import annotations

LEAVE_OUT = "leave the layer out with where="
