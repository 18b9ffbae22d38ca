"""The attention computation: fused if no matrix is needed, else explicit, and in blocks if the matrix is large."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attend.attention.matrix import on_matrix
from headwise.attend.attention.matrix_free import read_without_matrix, without_matrix
from headwise.attend.attention.matrix_free_readings import MatrixFreeReadings, sink_share
from headwise.attend.attention.softmax import fused
from headwise.attend.core import Call, Method
from headwise.attend.core.acting import Acting
from headwise.borders import in_transform
from headwise.files.errors import OWN_ATTENTION

# Entries of one head's matrix up to which the explicit form is faster on a CPU in fp32, by the kind of the matrix-free
# form. Time explicit / matrix-free, forward + backward, 320 maps, D = 64, T = 33, 50, 65, 80 (AMD EPYC, one thread,
# interleaved, medians of 15), non-causal, by ATEN_CPU_CAPABILITY; causal calls and D = 32 are similar (log, Attend):
#                                        avx512                 avx2
#   DropKey, a mask                      1.15 1.33 1.44 1.54    1.14 1.13 1.44 1.53
#   DropAttention, a mask afterwards     0.89 0.97 1.21 1.36    0.95 1.01 1.45 1.42
#   DropColumn, an edit of the values    0.80 0.87 0.98 0.95    0.83 0.86 0.97 0.95
#   EntropyPenalty, row statistics       0.79 0.90 0.99 1.06    0.79 0.90 0.88 0.97
# With fewer entries in total than WORTH nothing is gained, and the fused kernel gives the same bits as the host.
SMALL = {"scores": 0, "mask": 0, "mask after": 48 * 48, "edit": 66 * 66, "edit by each head": 1024 * 1024}
WORTH = 1 << 19

# Entries of the matrix (B H T N) up to which it is computed whole; larger ones are computed in blocks of queries, which
# are recomputed in backward.
WHOLE = 1 << 24


def attention(
    call: Call, acting: Acting, *, need_weights: bool = False, form: str = "fast", whole: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the result of one call through the methods' stages from `inputs` to `output`.

    Args:
        call: the call; its q, k and v are replaced by the edited ones.
        acting: the methods that act.
        need_weights: also return the attention weights (B, H, T, N).
        form: "fast" uses matrix-free forms where they are exact; "textbook" runs every method as in its paper.
        whole: entries of the matrix up to which it is computed whole; `WHOLE` by default.

    Returns:
        The per-head output (B, H, T, Dv) and the weights or None.
    """
    sinks = call.sinks
    for method in acting.inputs:
        call.q, call.k, call.v = method.inputs(call.q, call.k, call.v, call)
    # Computed before attention, so that the gradient is computed after attention's tensors have been freed.
    ahead = [m.ahead(call) if m.overrides("ahead") else None for m in acting.output] if acting.ahead else None
    if acting.keyed:
        # Opened here and not in a block, because blocks are recomputed.
        call.open_pass()
    values, undo = call.v, []
    for method in acting.around:
        call.v, back = method.around(call.v, call)
        undo.append(back)
    out, weights = _attend(call, acting, sinks, need_weights, form, _limit(whole))
    for back in reversed(undo):
        out = back(out)
    call.v = values
    return _after(call, acting, ahead, out), weights


def _attend(
    call: Call, acting: Acting, sinks: Tensor | None, need_weights: bool, form: str, limit: int
) -> tuple[Tensor, Tensor | None]:
    """Return the output of the host's kernel, of a matrix-free form, or of the matrix, before the `output` stages.

    `sinks` are those of the host; the other arguments are those of `attention`.
    """
    active = acting.methods
    if call.kernel is not None:
        return by_kernel(call, active, sinks, limit), None
    out, weights, before = None, None, len(call.penalties)
    matrix = need_weights or call.softcap is not None or in_transform()
    if form == "fast" and not matrix and not (acting.inside and _small(call, active)):
        out = without_matrix(call, active) if acting.inside or call.sinks is not None else _plain(call)
    if out is None:
        # An abandoned matrix-free attempt may have added penalties, which the matrix form adds again.
        del call.penalties[before:]
        call.norms.clear()
        out, weights = on_matrix(call, active, need_weights, limit)
        call.layer.ran.explicit = True
    return out, weights


def _limit(whole: int | None) -> int:
    """Return the entries of the matrix up to which it is computed whole."""
    if torch.compiler.is_exporting():
        # A number of blocks would fix the length of the exported program.
        return sys.maxsize
    return WHOLE if whole is None else whole


def _plain(call: Call) -> Tensor:
    """Return the attention of a call in which no method edits or reads anything."""
    call.layer.ran.fused = True
    return fused(
        call.q, call.k, call.v, attn_mask=call.mask, dropout_p=call.dropout, is_causal=call.causal, scale=call.scale
    )


def _after(call: Call, acting: Acting, ahead: Sequence[Tensor | None] | None, out: Tensor) -> Tensor:
    """Return the output per head (B, H, T, Dv) after the `output` stages."""
    for index, method in enumerate(acting.output):
        call.ahead = None if ahead is None else ahead[index]
        out = method.output(out, call)
    return out


def _small(call: Call, active: Sequence[Method]) -> bool:
    """Return whether the matrix is so small that the explicit form is faster."""
    kinds = {kind for method in active for kind in _kinds(method)}
    plain = call.q.device.type == "cpu" and call.q.dtype == torch.float32 and call.dropout == 0
    if not kinds or not plain:
        return False
    # Among several kinds, the one that is fastest without the matrix decides.
    matrix = call.queries * call.keys
    return matrix <= min(SMALL[kind] for kind in kinds) and matrix * call.batch * call.heads >= WORTH


def _kinds(method: Method) -> list[str]:
    """Return the kinds of the method's matrix-free forms, the keys of `SMALL`."""
    kinds = []
    if method.overrides("logits"):
        kinds.append("scores" if method.overrides("scores") else "mask")
    if method.overrides("weights"):
        kinds.append("mask after" if method.overrides("keep") else method.cost)
    if method.overrides("read"):
        kinds.append("edit")
    return kinds


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
