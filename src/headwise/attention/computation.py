"""The one attention computation: fused where no matrix is needed, explicit where it is, in blocks where it is large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise.attention.row_readings import MatrixFreeReadings
from headwise.attention.softmax import fused, logits, normalize
from headwise.core.call import Call
from headwise.core.method import Method

# Entries of one head's matrix up to which, on a CPU in fp32, the explicit form is the faster one, by what a method's matrix-free
# form is. Time explicit / matrix-free, forward + backward, 320 maps, D = 64, T = 33, 50, 65, 80 (AMD EPYC, one thread, interleaved,
# medians of 15), non-causal, by ATEN_CPU_CAPABILITY; causal calls and D = 32 lie as near (docs/log.md):
#                                        avx512                 avx2
#   DropKey, a mask                      1.15 1.33 1.44 1.54    1.14 1.13 1.44 1.53
#   DropAttention, a mask afterwards     0.89 0.97 1.21 1.36    0.95 1.01 1.45 1.42
#   DropColumn, an edit of the values    0.80 0.87 0.98 0.95    0.83 0.86 0.97 0.95
#   EntropyPenalty, row statistics       0.79 0.90 0.99 1.06    0.79 0.90 0.88 0.97
# With fewer entries in all than WORTH there is nothing to gain, and the fused kernel's bits are the host's own.
SMALL = {"scores": 0, "mask": 0, "mask after": 48 * 48, "edit": 66 * 66}
WORTH = 1 << 19

# Entries of the matrix (B H T N) up to which it is made whole; above, blocks of queries are made and made again in backward.
WHOLE = 1 << 24


def attention(call: Call, active: Sequence[Method], *, need_weights: bool = False, form: str = "fast") -> tuple[Tensor, Tensor | None]:
    """Compute one call through the methods' stages from `inputs` to `output`.

    Args:
        call: the pass; its q, k and v are replaced as methods edit them.
        active: the methods that act, in order.
        need_weights: also give the attention weights (B, H, T, N).
        form: "fast" picks matrix-free forms where they are exact; "textbook" runs every method as in its paper.

    Returns:
        The per-head output (B, H, T, Dv) and the weights or None.
    """
    for method in active:
        if method.overrides("inputs"):
            call.q, call.k, call.v = method.inputs(call.q, call.k, call.v, call)
    # Made before attention, its gradient is made after that of attention, when attention's own tensors are gone.
    ahead = [m.ahead(call) if m.overrides("ahead") else None for m in active]
    if any(m.draws() or m.penalizes for m in active):
        call.open_pass()  # before any block, for a block may be run again
    out, weights, made = None, None, len(call.penalties)
    matrix = need_weights or call.softcap is not None or call.sinks is not None
    if form == "fast" and not matrix and not _small(call, active):
        out = _fast(call, active)
    if out is None:
        del call.penalties[made:]
        call.norms.clear()
        out, weights = _explicit(call, active, need_weights)
        call.context.ran("explicit")
    for method, call.ahead in zip(active, ahead, strict=True):
        if method.overrides("output"):
            out = method.output(out, call)
    return out, weights


def _fast(call: Call, active: Sequence[Method]) -> Tensor | None:
    """Compute without the matrix, or give None where some method's matrix-free form is not exact here."""
    q, k, keep = call.q, call.k, None
    edits: list[Method] = []
    kept_after: Tensor | None = None
    for method in active:
        if method.overrides("logits"):
            if method.overrides("scores"):
                edited_scores = method.scores(q, k, call)
                if edited_scores is None:
                    return None
                q, k = edited_scores
                continue
            kept = method.keep(call) if method.overrides("keep") else None
            if kept is None:
                return None
            keep = kept if keep is None else keep & kept
        elif method.overrides("weights"):
            if method.overrides("keep"):
                # Renormalised dropping is a mask only where nothing edited the weights before it.
                kept = None if edits or kept_after is not None else method.keep(call)
                if kept is None:
                    return None
                kept_after = kept
            elif not method.overrides("attend") or (call.dropout > 0 and not method.commutes_with_dropout):
                return None
            else:
                edits.append(method)
    rows = MatrixFreeReadings(call, q, k, keep)
    if not _read(call, active, rows):
        return None
    if rows.output() is not None and not edits and kept_after is None and call.dropout == 0:
        call.context.ran("rows")
        return rows.output()
    both = keep if kept_after is None else kept_after if keep is None else keep & kept_after
    attend = Fused(call, q, k, both)
    call.context.ran("fused, one coordinate wider" if attend.width else "fused")
    step: Callable[[Tensor], Tensor] = attend
    for method in edits:
        edited = method.attend(step, call)
        if edited is None:
            return None
        step = edited
    return step(call.v)


def _read(call: Call, active: Sequence[Method], rows: MatrixFreeReadings) -> bool:
    readers = [m for m in active if m.overrides("read") or m.overrides("read_free")]
    if readers and call.mask is not None and call.mask.requires_grad:
        return False
    return all(m.overrides("read_free") and m.read_free(rows, call) is not NotImplemented for m in readers)


def _small(call: Call, active: Sequence[Method]) -> bool:
    """Tell whether the matrix is so small that computing on it is the faster way."""
    kinds = {kind for method in active for kind in _kinds(method)}
    plain = call.q.device.type == "cpu" and call.q.dtype == torch.float32 and call.dropout == 0
    if not kinds or not plain:
        return False
    # Where several act, what is quickest without the matrix decides.
    matrix = call.queries * call.keys
    return matrix <= min(SMALL[kind] for kind in kinds) and matrix * call.batch * call.heads >= WORTH


def _kinds(method: Method) -> list[str]:
    """Say what a method's matrix-free form is, for each of the stages in which it has one."""
    found = []
    if method.overrides("logits"):
        found.append("scores" if method.overrides("scores") else "mask")
    if method.overrides("weights"):
        found.append("mask after" if method.overrides("keep") else "edit")
    if method.overrides("read"):
        found.append("edit")
    return found


class Fused:
    """The map v -> A v by the fused kernel, for q, k, a mask and columns that are kept."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, keep: Tensor | None) -> None:
        self.q, self.k, self.scale, self.dropout = q, k, call.scale, call.dropout
        self.mask, self.causal, self.width = call.mask, call.causal, 0
        if keep is None:
            return
        if self.mask is None and not self.causal:
            self.mask = keep
        elif self.mask is None and keep.shape[2] == 1:
            self._widen(keep)
        else:
            allowed = call.allowed()
            self.causal = False
            if self.mask is not None and self.mask.dtype != torch.bool:
                self.mask = self.mask.masked_fill(~(keep & allowed), float("-inf"))
            else:
                self.mask = keep & allowed

    def _widen(self, keep: Tensor) -> None:
        # Causal with dropped columns: one more coordinate puts them at -infinity, so no T x N mask is needed.
        self.width = 8 - self.q.shape[-1] % 8
        far = -6e4 if self.k.dtype == torch.float16 else -1e9
        extra = torch.where(keep[:, :, 0, :, None], 0.0, far).to(self.k.dtype)
        self.k = torch.cat([self.k, F.pad(extra, (0, self.width - 1)).expand(*self.k.shape[:3], self.width)], dim=-1)
        one = torch.ones_like(self.q[..., :1])
        self.q = torch.cat([self.q, F.pad(one, (0, self.width - 1))], dim=-1)

    def __call__(self, v: Tensor) -> Tensor:
        size = v.shape[-1]
        if self.width:
            v = F.pad(v, (0, self.q.shape[-1] - size))
        o = fused(self.q, self.k, v, attn_mask=self.mask, dropout_p=self.dropout, is_causal=self.causal, scale=self.scale)
        return o[..., :size] if self.width else o


def _explicit(call: Call, active: Sequence[Method], need_weights: bool) -> tuple[Tensor, Tensor | None]:
    """Compute on the matrix, as the papers write it; in blocks of queries where it is large."""
    size = call.batch * call.heads * call.keys
    whole = need_weights or any(m.overrides("read") and not m.rowwise for m in active) or size * call.queries <= WHOLE
    if whole:
        return _matrix(call, active, call.q, call.k, call.v)[:2]
    step = max(1, WHOLE // size)
    outs, sums = [], []
    for start in range(0, call.queries, step):
        part = call.block(slice(start, min(start + step, call.queries)))
        run = partial(_part, part, active)
        if torch.is_grad_enabled():
            out, *found = checkpoint(run, part.q, call.k, call.v, use_reentrant=False)
        else:
            out, *found = run(part.q, call.k, call.v)
        outs.append(out)
        sums.append(found)
    merged = [torch.stack(terms).sum(0) for terms in zip(*sums, strict=True)]
    call.penalties.extend(zip(merged[::2], merged[1::2], strict=True))
    return torch.cat(outs, dim=2), None


def _part(part: Call, active: Sequence[Method], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    part.penalties = []
    out = _matrix(part, active, q, k, v)[0]
    return (out, *(x for pair in part.penalties for x in pair))


def _matrix(call: Call, active: Sequence[Method], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    s = logits(call, q, k)
    for method in active:
        if method.overrides("logits"):
            s = method.logits(s, call)
    a = normalize(s, call.sinks, empty=call.mask is not None or any(m.overrides("logits") for m in active))
    for method in active:
        if method.overrides("read"):
            method.read(a, call)
        elif method.overrides("read_free"):
            method.read_free(MatrixFreeReadings(call, q, k, None), call)
    for method in active:
        if method.overrides("weights"):
            a = method.weights(a, call)
    if call.dropout > 0:
        a = F.dropout(a, call.dropout)
    return a.to(v.dtype) @ v, a
