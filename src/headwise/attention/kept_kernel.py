"""Kept kernel: the host's own kernel computes the attention, and methods read its weights in a computation beside
it."""

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
    """Compute one call by the host's kernel: the output per head (B, H, T, Dv), before the `output` stages.

    What methods read of the weights is made from the same q and k in code of our own: the log-sum-exp and what follows
    from it without the matrix, or the matrix in blocks, where a method, a soft cap or a learned bias needs it.

    Args:
        host_sinks: the sinks that the host's kernel knows of; others were brought by a method.
        limit: entries of the matrix up to which it is made whole.

    Raises:
        RuntimeError: where a method edits logits or weights, which nobody reaches inside the kernel.
    """
    assert call.kernel is not None
    editing = next((m for m in active if m.overrides("logits") or m.overrides("weights")), None)
    if editing is not None:
        raise RuntimeError(f"{call.site.name}: {editing!r} {edits(editing, call.site.kernel)}")
    readings = MatrixFreeReadings(call, call.q, call.k, None)
    readers = [m for m in active if m.overrides("read") or m.overrides("read_free")]
    if readers:
        made = len(call.penalties)
        if call.softcap is not None or not read_without_matrix(call, readers, readings):
            # A reading that gave up half-way may have penalised already; the matrix does it again.
            del call.penalties[made:]
            call.norms.clear()
            beside = copy.copy(call)
            # The host drops weights after they are read.
            beside.dropout = 0.0
            on_matrix(beside, readers, False, limit)
    out = call.kernel(call.q, call.k, call.v)
    call.layer.ran.host = True
    if call.sinks is not host_sinks and call.sinks is not None:
        out = out * _share_beside(call, readings).unsqueeze(-1).to(out.dtype)
    return out


def edits(method: Method, kernel: str) -> str:
    """Say why a method that edits logits or weights does not go with a host's kernel."""
    stage = "logits" if method.overrides("logits") else "weights"
    return f"edits the {stage} inside of {kernel!r}, a kernel of the host's that is kept: {OWN_ATTENTION}"


def _share_beside(call: Call, readings: MatrixFreeReadings) -> Tensor:
    """Return what a sink that a method brought leaves to the keys, (B, H, T): one factor a row of what the kernel
    gives."""
    assert call.sinks is not None
    if call.softcap is not None or call.dropout > 0:
        why = "caps the logits" if call.softcap is not None else "drops weights"
        raise RuntimeError(
            f"{call.site.name}: the host's kernel {why}, and beside it a sink's share is not known: {OWN_ATTENTION}"
        )
    return sink_share(readings.lse(), call.sinks)
