"""Attention weights mixed over heads, and their gradients, as Triton kernels, in strips of bounded memory.

With A_g the weights of head g, M_h = sum over g of mix[h, g] A_g and the output f_h M_h V_h + c_h sum(V_h), where the
sum is over the keys that a query sees, and f and c are numbers of each head. Mixing needs all heads of an entry, and
products need rows of one head, so that both cannot be in one kernel's registers: a strip of weights is written
(`triton_strips`), mixed in place by a program for each few queries, which holds all heads, and multiplied. The strip
of M has its row sums and sums of squares taken, which a batch norm needs.

In backward, with M from recomputed weights and E = f_h dO_h V_h^T + (what sums give) + 2 (what squares give) M_h the
gradient of M_h, that of A_g is F_g = sum over h of mix[h, g] E_h, of the logits A_g (F_g - rowsum(A_g F_g)), and of
mix[h, g] the sum of E_h A_g. One pass over the rows gives the row sums, which a second one, from the cache, uses.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.attend.attention.strips import part_of, step_of, strips
from headwise.attend.attention.triton_strips import row_end, seen_of, times_columns, times_rows, write_weights
from headwise.numerics.kernels import as_hosts
from headwise.numerics.triton_tiles import head_of, padded, place, precision, tile

# Queries of a program of `unmix_kernel`, which adds up their part of the gradient of mix.
QUERIES = 4


@triton.jit
def _matrix(at, H, HP: tl.constexpr, TURNED: tl.constexpr):
    """Return a matrix (H, H) as (HP, HP) with zeros outside, transposed if TURNED."""
    i, j = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    places = j * H + i if TURNED else i * H + j
    return tl.load(at + places, mask=(i < H) & (j < H), other=0.0).to(tl.float32)


@triton.jit
def mix_kernel(
    x_at, mix_at, sums_at, squares_at, H, T, N, start, ROWS, STEP,
    CAUSAL: tl.constexpr, FIGURES: tl.constexpr, PRECISION: tl.constexpr, HP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Mix the weights of one query over heads, in place; FIGURES: write the sums of each row and of its squares."""
    i = tl.program_id(0) % ROWS
    b = (tl.program_id(0) // ROWS).to(tl.int64)
    h, n = tl.arange(0, HP), tl.arange(0, BN)
    mix = _matrix(mix_at, H, HP, False)
    sums, squares = tl.zeros([HP], tl.float32), tl.zeros([HP], tl.float32)
    x_at += (b * H * ROWS + i) * STEP
    end = row_end(start + i, N, CAUSAL)
    for key in range(0, end, BN):
        places = h.to(tl.int64)[:, None] * ROWS * STEP + (key + n)[None, :]
        there = (h[:, None] < H) & ((key + n)[None, :] < end)
        m = tl.dot(mix, tl.load(x_at + places, mask=there, other=0.0).to(tl.float32), input_precision=PRECISION)
        tl.store(x_at + places, m.to(x_at.dtype.element_ty), mask=there)
        if FIGURES:
            sums += tl.sum(m, 1)
            squares += tl.sum(m * m, 1)
    if FIGURES:
        at = (b * H + h) * T + start + i
        tl.store(sums_at + at, sums, mask=h < H)
        tl.store(squares_at + at, squares, mask=h < H)


@triton.jit
def _row_seen(seen_at, b, query, key, sb, st, sn, end, SEEN: tl.constexpr, CAUSAL: tl.constexpr, BN: tl.constexpr):
    """Return which keys from `key` on a query sees, (1, BN)."""
    n = key + tl.arange(0, BN)[None, :]
    seen = n < end
    if CAUSAL:
        seen = seen & (n <= query)
    if SEEN != 0:
        entries = tl.load(seen_at + b * sb + query.to(tl.int64) * st + n.to(tl.int64) * sn, mask=seen, other=0)
        if SEEN == 1:
            seen = seen & (entries != 0)
        else:
            seen = seen & (entries.to(tl.float32) > -9000.0)
    return seen


@triton.jit
def _gradients(
    x_at, e_at, places, there, mix, turned, seen, factor, of_sums, of_squares, NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of the weights A, the mixed M, and the gradients E of M and F of A, each (HP, BN)."""
    a = tl.load(x_at + places, mask=there, other=0.0).to(tl.float32)
    e = tl.load(e_at + places, mask=there, other=0.0).to(tl.float32)
    m = tl.dot(mix, a, input_precision=PRECISION)
    if NORM:
        e = tl.where(seen, factor[:, None] * e + of_sums[:, None], 0.0) + of_squares[:, None] * m
    return a, m, e, tl.dot(turned, e, input_precision=PRECISION)


@triton.jit
def unmix_kernel(
    x_at, e_at, mix_at, numbers_at, real_at, seen_at, delta_at, part_at, sb, st, sn, rb, rt, H, T, N, start, ROWS, STEP,
    CAUSAL: tl.constexpr, SEEN: tl.constexpr, REAL: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr,
    HP: tl.constexpr, BN: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Replace the weights of some queries by f M + c, and dO V^T by the gradients of logits, for all heads.

    `numbers_at` holds f, c and what row sums and sums of squares add to the gradients, (4, H); the last two are of
    queries that count, REAL. `delta_at` gets rowsum(A F), `part_at` the program's part of the gradient of mix.
    """
    blocks = tl.cdiv(ROWS, QUERIES)
    block = tl.program_id(0) % blocks
    b = (tl.program_id(0) // blocks).to(tl.int64)
    h, n = tl.arange(0, HP), tl.arange(0, BN)
    mix, turned = _matrix(mix_at, H, HP, False), _matrix(mix_at, H, HP, True)
    factor = tl.load(numbers_at + h, mask=h < H, other=0.0)
    constant = tl.load(numbers_at + H + h, mask=h < H, other=0.0)
    of_sums = tl.load(numbers_at + 2 * H + h, mask=h < H, other=0.0)
    of_squares = tl.load(numbers_at + 3 * H + h, mask=h < H, other=0.0)
    part = tl.zeros([HP, HP], tl.float32)
    x_at += b * H * ROWS * STEP
    e_at += b * H * ROWS * STEP
    for i in range(block * QUERIES, tl.minimum(ROWS, block * QUERIES + QUERIES)):
        query = start + i
        end = row_end(start + i, N, CAUSAL)
        counts = 1.0
        if REAL:
            counts = tl.where(tl.load(real_at + b * rb + query * rt) != 0, 1.0, 0.0)
        delta = tl.zeros([HP], tl.float32)
        # First the sums over all keys, then what each key gets from them.
        for WRITES in tl.static_range(2):
            for key in range(0, end, BN):
                places = (h.to(tl.int64)[:, None] * ROWS + i) * STEP + (key + n)[None, :]
                there = (h[:, None] < H) & ((key + n)[None, :] < end)
                seen = _row_seen(seen_at, b, query, key, sb, st, sn, end, SEEN, CAUSAL, BN)
                a, m, e, f = _gradients(
                    x_at, e_at, places, there, mix, turned, seen, factor, of_sums * counts, of_squares * counts, NORM,
                    PRECISION,
                )  # fmt: skip
                if WRITES:
                    if NORM:
                        m = factor[:, None] * m + tl.where(seen, constant[:, None], 0.0)
                    tl.store(x_at + places, m.to(x_at.dtype.element_ty), mask=there)
                    tl.store(e_at + places, (a * (f - delta[:, None])).to(e_at.dtype.element_ty), mask=there)
                else:
                    delta += tl.sum(a * f, 1)
                    part += tl.dot(e, tl.trans(a), input_precision=PRECISION)
        tl.store(delta_at + (b * H + h) * T + query, delta, mask=h < H)
    i, j = h[:, None], h[None, :]
    tl.store(part_at + tl.program_id(0).to(tl.int64) * H * H + i * H + j, part, mask=(i < H) & (j < H))


@triton.jit
def combine_kernel(
    x_at, y_at, out_at, table_at, xb, xh, xt, yb, yh, yt, ob, oh, ot, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write f x + c y for a block of rows, with one f and c for each head."""
    block, b, h = place(tl.cdiv(T, BT), H)
    row = block * BT
    x = tile(head_of(x_at, b, h, xb, xh), row, xt, 1, T, D, BT, BD, False, True)
    y = tile(head_of(y_at, b, h, yb, yh), row, yt, 1, T, D, BT, BD, False, True)
    z = tl.load(table_at + 2 * H + h) * x + tl.load(table_at + 3 * H + h) * y
    i, d = row + tl.arange(0, BT), tl.arange(0, BD)
    places = head_of(out_at, b, h, ob, oh) + i.to(tl.int64)[:, None] * ot + d[None, :]
    tl.store(places, z.to(out_at.dtype.element_ty), mask=(i < T)[:, None] & (d < D)[None, :])


@triton.jit
def norm_kernel(
    totals_at, count_at, number, gain_at, shift_at, table_at, H, eps,
    BATCH: tl.constexpr, COUNTED: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Write mean, variance, f = gain / sqrt(variance + eps), c = shift - f mean and the sample variance, (5, H)."""
    h = tl.arange(0, HP)
    there = h < H
    mean = tl.load(totals_at + h, mask=there, other=0.0).to(tl.float32)
    variance = tl.load(totals_at + H + h, mask=there, other=0.0).to(tl.float32)
    sample = variance
    if BATCH:
        count = number
        if COUNTED:
            count = tl.load(count_at).to(tl.float32)
        mean = mean / count
        # eps is so much more than the squared mean's last digit that what the difference loses does not matter.
        variance = tl.maximum(variance / count - mean * mean, 0.0)
        sample = variance * (count / tl.maximum(count - 1.0, 1.0))
    factor = tl.load(gain_at + h, mask=there, other=0.0).to(tl.float32) * tl.rsqrt(variance + eps)
    tl.store(table_at + h, mean, mask=there)
    tl.store(table_at + H + h, variance, mask=there)
    tl.store(table_at + 2 * H + h, factor, mask=there)
    constant = tl.load(shift_at + h, mask=there, other=0.0).to(tl.float32) - factor * mean
    tl.store(table_at + 3 * H + h, constant, mask=there)
    tl.store(table_at + 4 * H + h, sample, mask=there)


@triton.jit
def norm_back_kernel(
    of_factors_at, table_at, count_at, number, numbers_at, found_at, H, eps,
    BATCH: tl.constexpr, COUNTED: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Write f, c and what sums and squares add, (4, H), and the gradients of gain and shift, (2, H)."""
    h = tl.arange(0, HP)
    there = h < H
    mean = tl.load(table_at + h, mask=there, other=0.0)
    inverse = tl.rsqrt(tl.load(table_at + H + h, mask=there, other=1.0) + eps)
    factor = tl.load(table_at + 2 * H + h, mask=there, other=0.0)
    constant = tl.load(table_at + 3 * H + h, mask=there, other=0.0)
    of_constant = tl.load(of_factors_at + H + h, mask=there, other=0.0)
    of_factor = tl.load(of_factors_at + h, mask=there, other=0.0) - of_constant * mean
    of_sums, of_squares = tl.zeros([HP], tl.float32), tl.zeros([HP], tl.float32)
    if BATCH:
        count = number
        if COUNTED:
            count = tl.load(count_at).to(tl.float32)
        of_variance = -0.5 * inverse * inverse * factor * of_factor
        of_sums = -(of_constant * factor + 2.0 * mean * of_variance) / count
        of_squares = 2.0 * of_variance / count
    tl.store(numbers_at + h, factor, mask=there)
    tl.store(numbers_at + H + h, constant, mask=there)
    tl.store(numbers_at + 2 * H + h, of_sums, mask=there)
    tl.store(numbers_at + 3 * H + h, of_squares, mask=there)
    tl.store(found_at + h, of_factor * inverse, mask=there)
    tl.store(found_at + H + h, of_constant, mask=there)


@triton.jit
def dots_kernel(
    g_at, x_at, y_at, part_at, gb, gh, gt, xb, xh, xt, yb, yh, yt, H, T, parts,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the sums of g x and of g y over a block of rows, (2, parts, H)."""
    block, b, h = place(tl.cdiv(T, BT), H)
    row = block * BT
    g = tile(head_of(g_at, b, h, gb, gh), row, gt, 1, T, D, BT, BD, False, True)
    x = tile(head_of(x_at, b, h, xb, xh), row, xt, 1, T, D, BT, BD, False, True)
    y = tile(head_of(y_at, b, h, yb, yh), row, yt, 1, T, D, BT, BD, False, True)
    at = part_at + (b * tl.cdiv(T, BT) + block) * H + h
    tl.store(at, tl.sum(tl.sum(g * x, 1), 0))
    tl.store(at + parts * H, tl.sum(tl.sum(g * y, 1), 0))


def _constants(dtype: torch.dtype, heads: int, entries: int) -> dict[str, object]:
    """Return the constants of kernels whose tiles hold that many entries, of all heads for some keys."""
    # Numbers in half precision are those of TF32.
    how = precision(dtype)["PRECISION"] if dtype == torch.float32 else "tf32"
    hp = padded(heads)
    return {"PRECISION": how, "HP": hp, "BN": max(16, entries // hp)}


def forward(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, seen: Tensor | None, sinks: Tensor | None,
    causal: bool, scale: float, mix: Tensor, norm: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return M V (B, H, T, D); and with `norm` the sum of the values that each query sees, in the same shape, and the
    sums of the rows of M and of their squares, (2, B, H, T), else tensors without numbers.

    `seen` is the mask for all heads together; the other arguments are those of `head_mixing.mix_heads`.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    out = as_hosts(v, heads, queries)
    total, figures = (
        out.new_empty(0),
        torch.empty(2 if norm else 0, batch, heads, queries, device=q.device, dtype=torch.float32),
    )
    each = norm and (causal or seen is not None)
    # The sum of many values may overflow in half precision.
    wide = torch.float32 if v.dtype == torch.float16 else v.dtype
    if each:
        total = as_hosts(v.to(wide) if v.dtype != wide else v, heads, queries)
    elif norm:
        total = v.sum(2, keepdim=True, dtype=torch.float32).to(wide)
        total = total.repeat_interleave(heads // v.shape[1], 1).expand(-1, -1, queries, -1)
    constants = _constants(q.dtype, heads, 4096)
    with torch.cuda.device_of(q):
        for b, last, start, end in strips(batch, heads, queries, keys, q.element_size()):
            rows = end - start
            p = q.new_empty(last - b, heads, rows, step_of(keys))
            of = [x[b:last] for x in (q, k, v, lse, out)]
            write_weights(
                of[0], of[1], of[3], part_of(mask, b, last), None, sinks, causal, scale, start, p, flat=not norm
            )
            sums, squares = (figures[0, b:last], figures[1, b:last]) if norm else (lse, lse)
            mix_kernel[((last - b) * rows,)](
                p, mix, sums, squares, heads, queries, keys, start, rows, p.shape[3],
                CAUSAL=causal, FIGURES=norm, **constants,
            )  # fmt: skip
            here = total[b:last] if each else None
            times_rows(
                p, of[2], of[4], causal, 1.0, start, here,
                seen_of(part_of(seen, b, last), last - b, queries, keys) if each else None,
            )  # fmt: skip
    return out, total, figures


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: Tensor | None, seen: Tensor | None,
    real: Tensor | None, sinks: Tensor | None, causal: bool, scale: float, mix: Tensor, numbers: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and mix, and rowsum(A F), (B, H, T).

    Args:
        g: the gradient of f M V + c sum(V), (B, H, T, D).
        numbers: f, c, and what a row sum and half of what a sum of squares adds to the loss, (4, H) in fp32, for rows
            that are `real`; None for 1, 0, 0, 0.
    """
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    dq, dk, dv = (as_hosts(x, x.shape[1], x.shape[2]) for x in (q, k, v))
    delta = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    constants = _constants(q.dtype, heads, 1024)
    every = list(strips(batch, heads, queries, keys, q.element_size()))
    programs = [(last - b) * triton.cdiv(end - start, QUERIES) for b, last, start, end in every]
    parts = torch.empty(sum(programs), heads, heads, device=q.device, dtype=torch.float32)
    # The sums of several strips of queries are kept in fp32.
    split = every[0][3] < queries
    of_k, of_v = (torch.empty(x.shape, device=q.device, dtype=torch.float32) if split else x for x in (dk, dv))
    counted = real is not None and numbers is not None
    with torch.cuda.device_of(q):
        for (b, last, start, end), blocks, part in zip(every, programs, parts.split(programs), strict=True):
            rows = end - start
            p, e = q.new_empty(2, last - b, heads, rows, step_of(keys))
            of = [x[b:last] for x in (q, k, v, g, lse)]
            write_weights(
                of[0], of[1], of[4], part_of(mask, b, last), None, sinks, causal, scale, start, p, flat=numbers is None,
                slopes=(of[3], of[2], e),
            )  # fmt: skip
            view = None if numbers is None else seen_of(part_of(seen, b, last), last - b, queries, keys)
            seen_read, (sb, st, sn), kind = view or (q, (0, 0, 0), 0)
            flagged = part_of(real, b, last) if counted else None
            flags = q if flagged is None else flagged.expand(last - b, queries).view(torch.uint8)
            unmix_kernel[(blocks,)](
                p, e, mix, mix if numbers is None else numbers, flags, seen_read, delta[b:last], part, sb, st, sn,
                *(flags.stride() if counted else (0, 0)), heads, queries, keys, start, rows, p.shape[3],
                CAUSAL=causal, SEEN=kind, REAL=counted, NORM=numbers is not None, QUERIES=QUERIES, **constants,
            )  # fmt: skip
            times_rows(e, of[1], dq[b:last], causal, scale, start)
            times_columns(e, of[0], of_k[b:last], causal, scale, start)
            times_columns(p, of[3], of_v[b:last], causal, 1.0, start)
    if split:
        dk.copy_(of_k)
        dv.copy_(of_v)
    return dq, dk, dv, parts.sum(0), delta


def norm(totals: Tensor, number: float | None, count: Tensor | None, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return mean, variance, f, c and the sample variance of each head, (5, H) in fp32.

    `totals` (2, H) are the sums of entries and of their squares over a number of entries, on the host or as `count`
    (0-d) on the device; or without either mean and variance.
    """
    heads = totals.shape[1]
    table = torch.empty(5, heads, device=totals.device, dtype=torch.float32)
    with torch.cuda.device_of(totals):
        norm_kernel[(1,)](
            totals.contiguous(), totals if count is None else count, float(number or 0), gain, shift, table, heads, eps,
            BATCH=number is not None or count is not None, COUNTED=count is not None, HP=padded(heads),
        )  # fmt: skip
    return table


def norm_backward(
    of_factors: Tensor, table: Tensor, number: float | None, count: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the `numbers` of `backward`, and the gradients of gain and shift (2, H), from those of f and c (2, H)."""
    heads = table.shape[1]
    numbers, found = torch.empty_like(table[:4]), torch.empty_like(of_factors)
    with torch.cuda.device_of(table):
        norm_back_kernel[(1,)](
            of_factors, table, table if count is None else count, float(number or 0), numbers, found, heads, eps,
            BATCH=number is not None or count is not None, COUNTED=count is not None, HP=padded(heads),
        )  # fmt: skip
    return numbers, found


def combine(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """Return f x + c y for rows (B, H, T, D), in the dtype of x; `table` is that of `norm`."""
    out = as_hosts(x, x.shape[1], x.shape[2])
    with torch.cuda.device_of(x):
        combine_kernel[_blocks(x)](
            x, y, out, table, *_steps(x, y, out), *x.shape[1:3], D=x.shape[3], BT=64, BD=padded(x.shape[3])
        )
    return out


def dots(g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of g x and of g y over samples and rows (B, H, T, D), (2, H) in fp32."""
    parts = g.shape[0] * triton.cdiv(g.shape[2], 64)
    part = torch.empty(2, parts, g.shape[1], device=g.device, dtype=torch.float32)
    with torch.cuda.device_of(g):
        dots_kernel[_blocks(g)](
            g, x, y, part, *_steps(g, x, y), *g.shape[1:3], parts, D=g.shape[3], BT=64, BD=padded(g.shape[3])
        )
    return part.sum(1)


def _blocks(x: Tensor) -> tuple[int]:
    return (x.shape[0] * x.shape[1] * triton.cdiv(x.shape[2], 64),)


def _steps(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(step for x in tensors for step in x.stride()[:3])
