"""Attention by a host's own kernel, with the weights that methods read computed separately."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import Tensor

from headwise.attention.matrix import on_matrix
from headwise.attention.matrix_free import read_without_matrix
from headwise.attention.matrix_free_readings import MatrixFreeReadings, sink_share
from headwise.core.call import Call
from headwise.core.method import Method
from headwise.core.remedies import OWN_ATTENTION


def by_kernel(call: Call, active: Sequence[Method], host_sinks: Tensor | None, limit: int) -> Tensor:
    """Return the output per head (B, H, T, Dv) of the host's kernel, before the `output` stages.

    Readings of the weights are computed separately from the same q and k: row statistics without the matrix, or the
    matrix in blocks if a method, a soft-cap or a learned bias needs it.

    Args:
        call: the call.
        active: the methods that act, in order.
        host_sinks: the sinks that the host's kernel applies itself; other sinks come from a method.
        limit: entries of the matrix up to which it is computed whole.

    Raises:
        RuntimeError: if a method edits logits or weights, which are inaccessible inside the kernel.
    """
    assert call.kernel is not None
    editing = next((m for m in active if m.overrides("logits") or m.overrides("weights")), None)
    if editing is not None:
        raise RuntimeError(f"{call.site.name}: {editing!r} {edits(editing, call.site.kernel)}")
    readings = MatrixFreeReadings(call, call.q, call.k, None)
    readers = [m for m in active if m.overrides("read") or m.overrides("read_free")]
    if readers:
        before = len(call.penalties)
        if call.softcap is not None or not read_without_matrix(call, readers, readings):
            # An abandoned reading may have added penalties, which the matrix form adds again.
            del call.penalties[before:]
            call.norms.clear()
            reading = copy.copy(call)
            # Methods read the weights before dropout.
            reading.dropout = 0.0
            on_matrix(reading, readers, False, limit)
    out = call.kernel(call.q, call.k, call.v)
    call.layer.ran.host = True
    if call.sinks is not host_sinks and call.sinks is not None:
        out = out * _share_of_keys(call, readings).unsqueeze(-1).to(out.dtype)
    return out


def edits(method: Method, kernel: str) -> str:
    """Return the reason why a method that edits logits or weights does not work with a host's kernel, and a remedy."""
    stage = "logits" if method.overrides("logits") else "weights"
    return f"edits the {stage} inside of {kernel!r}, a kernel of the host's that is kept: {OWN_ATTENTION}"


def _share_of_keys(call: Call, readings: MatrixFreeReadings) -> Tensor:
    """Return the share of weight that a method's sink leaves to the keys, (B, H, T), a factor of the kernel's rows."""
    assert call.sinks is not None
    if call.softcap is not None or call.dropout > 0:
        why = "caps the logits" if call.softcap is not None else "drops weights"
        raise RuntimeError(
            f"{call.site.name}: the host's kernel {why}, so the share of a sink cannot be computed: {OWN_ATTENTION}"
        )
    return sink_share(readings.lse(), call.sinks)
