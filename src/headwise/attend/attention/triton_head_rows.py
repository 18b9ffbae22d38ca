"""The operators of `head_rows` as Triton kernels: one pass over the rows of each head, in fp32 inside.

A program holds a block of rows (T, D) of one head of one sample. What a gain of a head gets from it is one number; a
second launch sums these in a fixed order.
"""

# Triton interprets the annotations of a kernel itself.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.numerics.triton_tiles import blocks_of

# The kinds of `norm`: by the root mean square, by a layer norm, or no norm but a division by the gain.
RMS, LAYER, DIVIDE = 0, 1, 2
# Numbers of a tile, of 128 threads.
TILE = 4096


@triton.jit
def at_rows(at, b, h, first, sb, sh, st, BT: tl.constexpr, BD: tl.constexpr):
    """Return the addresses (BT, BD) of rows first, first + 1, … of one head; the last stride is 1."""
    base = at + tl.cast(b, tl.int64) * sb + tl.cast(h, tl.int64) * sh + tl.cast(first, tl.int64) * st
    return base + tl.arange(0, BT)[:, None] * st + tl.arange(0, BD)[None, :]


@triton.jit
def inside(first, T, SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return which elements of rows from `first` on lie inside of (T, SIZE)."""
    return (first + tl.arange(0, BT)[:, None] < T) & (tl.arange(0, BD)[None, :] < SIZE)


@triton.jit
def read_rows(at, b, h, first, sb, sh, st, T, SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Return rows from `first` on of one head, (BT, BD) in fp32 with zeros outside of (T, SIZE)."""
    places = at_rows(at, b, h, first, sb, sh, st, BT, BD)
    return tl.load(places, mask=inside(first, T, SIZE, BT, BD), other=0.0).to(tl.float32)


@triton.jit
def write_rows(at, x, b, h, first, sb, sh, st, T, SIZE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Write a tile into rows from `first` on of one head."""
    places = at_rows(at, b, h, first, sb, sh, st, BT, BD)
    tl.store(places, x.to(at.dtype.element_ty), mask=inside(first, T, SIZE, BT, BD))


@triton.jit
def rows_of(T, H, BT: tl.constexpr):
    """Return the sample, the head and the first row of this program."""
    blocks = tl.cdiv(T, BT)
    return tl.program_id(0) // blocks // H, tl.program_id(0) // blocks % H, tl.program_id(0) % blocks * BT


@triton.jit
def _norm_rows(
    x_at, gain_at, y_at, sb, sh, st, yb, yh, yt, H, T, eps, share,
    KIND: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b, h, first = rows_of(T, H, BT)
    x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
    gain = tl.load(gain_at + h // share).to(tl.float32)
    if KIND == 1:
        x = tl.where(inside(first, T, D, BT, BD), x - (tl.sum(x, 1) / D)[:, None], 0.0)
    if KIND == 2:
        y = x / gain
    else:
        y = x * (tl.rsqrt(tl.sum(x * x, 1) / D + eps) * gain)[:, None]
    write_rows(y_at, y, b, h, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def norm_kernel(
    x_at, gain_at, y_at, x2_at, gain2_at, y2_at, sb, sh, st, yb, yh, yt, H, T, eps, share, share2,
    KIND: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the normalised rows of one tensor, or of two with the same strides."""
    # Two branches, not one chosen address: a chosen one would lose what is known of its alignment.
    if tl.program_id(1) == 0:
        _norm_rows(x_at, gain_at, y_at, sb, sh, st, yb, yh, yt, H, T, eps, share, KIND, D, BT, BD)
    else:
        _norm_rows(x2_at, gain2_at, y2_at, sb, sh, st, yb, yh, yt, H, T, eps, share2, KIND, D, BT, BD)


@triton.jit
def _norm_back_rows(
    g_at, x_at, gain_at, dx_at, part_at, gb, gh, gt, sb, sh, st, yb, yh, yt, H, T, eps, share,
    KIND: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    b, h, first = rows_of(T, H, BT)
    x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    gain = tl.load(gain_at + h // share).to(tl.float32)
    if KIND == 2:
        dx = g / gain
        part = -tl.sum(tl.sum(dx * x, 1), 0) / gain
    else:
        if KIND == 1:
            x = tl.where(inside(first, T, D, BT, BD), x - (tl.sum(x, 1) / D)[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
        x = x * inverse[:, None]
        along = tl.sum(g * x, 1)
        part = tl.sum(along, 0)
        dx = g - x * (along / D)[:, None]
        if KIND == 1:
            dx = dx - (tl.sum(g, 1) / D)[:, None]
        dx = dx * (inverse * gain)[:, None]
    write_rows(dx_at, dx, b, h, first, yb, yh, yt, T, D, BT, BD)
    tl.store(part_at + tl.program_id(0), part)


@triton.jit
def norm_back_kernel(
    g_at, x_at, gain_at, dx_at, g2_at, x2_at, gain2_at, dx2_at, part_at,
    gb, gh, gt, sb, sh, st, yb, yh, yt, H, T, eps, share, share2,
    KIND: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `norm_kernel`'s rows, and each program's part of those of the gains."""
    if tl.program_id(1) == 0:
        _norm_back_rows(
            g_at, x_at, gain_at, dx_at, part_at, gb, gh, gt, sb, sh, st, yb, yh, yt, H, T, eps, share, KIND, D, BT, BD,
        )  # fmt: skip
    else:
        _norm_back_rows(
            g2_at, x2_at, gain2_at, dx2_at, part_at + tl.num_programs(0), gb, gh, gt, sb, sh, st, yb, yh, yt,
            H, T, eps, share2, KIND, D, BT, BD,
        )  # fmt: skip


@triton.jit
def total_kernel(part_at, out_at, SAMPLES, WIDTH, stride, BLOCK: tl.constexpr):
    """Sum the parts (SAMPLES, stride) of one gain: WIDTH of each sample, from the gain's own on."""
    own = tl.program_id(0) * WIDTH
    count = SAMPLES * WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.load(part_at + own + i // WIDTH * stride + i % WIDTH, mask=i < count, other=0.0)
    tl.store(out_at + tl.program_id(0), tl.sum(total, 0).to(out_at.dtype.element_ty))


@triton.jit
def _strength_of(strength_at, number, gain_at, h, KEYED: tl.constexpr, GATE: tl.constexpr):
    """Return the strength of a head, and its derivative by the gain: GATE is 0 without one, 1 linear, 2 its tanh."""
    strength = number
    if KEYED:
        strength = tl.load(strength_at).to(tl.float32)
    slope = strength
    if GATE != 0:
        gain = tl.load(gain_at + h).to(tl.float32)
        if GATE == 2:
            # 2σ(2x) - 1
            gain = 2.0 * tl.sigmoid(2.0 * gain) - 1.0
            slope = slope * (1.0 - gain * gain)
        strength = strength * gain
    return strength, slope


@triton.jit
def without_own_kernel(
    o_at, v_at, y_at, strength_at, gain_at, number, sb, sh, st, vb, vh, vt, yb, yh, yt, H, T, tiny,
    KEYED: tl.constexpr, GATE: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write o - strength·(o·v)v / max(‖v‖², tiny)."""
    b, h, first = rows_of(T, H, BT)
    o = read_rows(o_at, b, h, first, sb, sh, st, T, D, BT, BD)
    v = read_rows(v_at, b, h, first, vb, vh, vt, T, D, BT, BD)
    strength, _ = _strength_of(strength_at, number, gain_at, h, KEYED, GATE)
    share = tl.sum(o * v, 1) / tl.maximum(tl.sum(v * v, 1), tiny)
    y = o - (strength * share)[:, None] * v
    write_rows(y_at, y, b, h, first, yb, yh, yt, T, D, BT, BD)


@triton.jit
def without_own_back_kernel(
    g_at, o_at, v_at, do_at, dv_at, part_at, strength_at, gain_at, number,
    gb, gh, gt, sb, sh, st, vb, vh, vt, yb, yh, yt, wb, wh, wt, H, T, tiny,
    KEYED: tl.constexpr, GATE: tl.constexpr, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of o and v, and with a gain each program's part of its gradient."""
    b, h, first = rows_of(T, H, BT)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    o = read_rows(o_at, b, h, first, sb, sh, st, T, D, BT, BD)
    v = read_rows(v_at, b, h, first, vb, vh, vt, T, D, BT, BD)
    strength, slope = _strength_of(strength_at, number, gain_at, h, KEYED, GATE)
    square = tl.sum(v * v, 1)
    inverse = 1.0 / tl.maximum(square, tiny)
    share, along = tl.sum(o * v, 1) * inverse, tl.sum(g * v, 1)
    do = g - (strength * along * inverse)[:, None] * v
    # Where the norm is below its bound, it has no gradient.
    turned = tl.where(square < tiny, 0.0, 2.0 * share * along * inverse)
    dv = strength * (turned[:, None] * v - share[:, None] * g - (along * inverse)[:, None] * o)
    write_rows(do_at, do, b, h, first, yb, yh, yt, T, D, BT, BD)
    write_rows(dv_at, dv, b, h, first, wb, wh, wt, T, D, BT, BD)
    if GATE != 0:
        tl.store(part_at + tl.program_id(0), -slope * tl.sum(share * along, 0))


@triton.jit
def mix_kernel(
    x_at, y_at, z_at, gain_at, of_x, of_y, sb, sh, st, yb, yh, yt, zb, zh, zt, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write x + gain·(of_x·x + of_y·y)."""
    b, h, first = rows_of(T, H, BT)
    x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
    y = read_rows(y_at, b, h, first, yb, yh, yt, T, D, BT, BD)
    gain = tl.load(gain_at + h).to(tl.float32)
    z = x + gain * (of_x * x + of_y * y)
    write_rows(z_at, z, b, h, first, zb, zh, zt, T, D, BT, BD)


@triton.jit
def mix_back_kernel(
    g_at, x_at, y_at, dx_at, dy_at, part_at, gain_at, of_x, of_y,
    gb, gh, gt, sb, sh, st, yb, yh, yt, db, dh, dt, eb, eh, et, H, T,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and y, and each program's part of the gain's."""
    b, h, first = rows_of(T, H, BT)
    g = read_rows(g_at, b, h, first, gb, gh, gt, T, D, BT, BD)
    x = read_rows(x_at, b, h, first, sb, sh, st, T, D, BT, BD)
    y = read_rows(y_at, b, h, first, yb, yh, yt, T, D, BT, BD)
    gain = tl.load(gain_at + h).to(tl.float32)
    dx, dy = g * (1.0 + gain * of_x), g * (gain * of_y)
    write_rows(dx_at, dx, b, h, first, db, dh, dt, T, D, BT, BD)
    write_rows(dy_at, dy, b, h, first, eb, eh, et, T, D, BT, BD)
    tl.store(part_at + tl.program_id(0), tl.sum(tl.sum(g * (of_x * x + of_y * y), 1), 0))


def sizes(x: Tensor) -> dict[str, int]:
    """Return the constants of a launch over rows of x (B, H, T, D)."""
    width = triton.next_power_of_2(x.shape[3])
    return {"D": x.shape[3], "BT": max(1, min(TILE // width, triton.next_power_of_2(x.shape[2]))), "BD": width}


def grid_of(x: Tensor) -> tuple[int]:
    """Return the grid of a launch over rows of x, a program for each block of one head of one sample."""
    return blocks_of(x, sizes(x)["BT"])


def rows(x: Tensor) -> Tensor:
    """Return x with the last stride 1, which the kernels need."""
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the first three strides of each tensor."""
    return tuple(step for x in tensors for step in x.stride()[:3])


def norm(xs: Sequence[Tensor], gains: Sequence[Tensor], ys: Sequence[Tensor], eps: float, kind: int) -> None:
    """Fill `ys` with the rows of `xs`, one or two tensors (B, H, T, D), normalised and times the gains of the heads."""
    xs = [rows(x) for x in xs]
    for a, b in _launches(xs, ys):
        x, of, constants = xs[a], (a, b), sizes(xs[a])
        grid = (triton.cdiv(x.shape[2], constants["BT"]) * x.shape[0] * x.shape[1], 1 if a == b else 2)
        tensors = [t for i in of for t in (xs[i], gains[i], ys[i])]
        shares = [x.shape[1] // gains[i].shape[0] for i in of]
        with torch.cuda.device_of(x):
            norm_kernel[grid](
                *tensors, *strides(x, ys[a]), x.shape[1], x.shape[2], eps, *shares, KIND=kind, **constants
            )


def norm_backward(
    gs: Sequence[Tensor],
    xs: Sequence[Tensor],
    gains: Sequence[Tensor],
    dxs: Sequence[Tensor],
    dgains: Sequence[Tensor],
    eps: float,
    kind: int,
) -> None:
    """Fill `dxs` and `dgains` with the gradients of `norm`."""
    xs, gs = [rows(x) for x in xs], [rows(g) for g in gs]
    for a, b in _launches(xs, dxs, gs):
        x, of, constants = xs[a], (a, b), sizes(xs[a])
        blocks = triton.cdiv(x.shape[2], constants["BT"])
        grid = (blocks * x.shape[0] * x.shape[1], 1 if a == b else 2)
        part = torch.empty(grid[::-1], dtype=torch.float32, device=x.device)
        tensors = [t for i in of for t in (gs[i], xs[i], gains[i], dxs[i])]
        shares = [x.shape[1] // gains[i].shape[0] for i in of]
        with torch.cuda.device_of(x):
            norm_back_kernel[grid](
                *tensors, part, *strides(gs[a], x, dxs[a]), x.shape[1], x.shape[2], eps, *shares,
                KIND=kind, **constants,
            )  # fmt: skip
            for i, own, share in zip(of[: grid[1]], part, shares):
                total(own, dgains[i], x.shape[0], share * blocks)


def total(part: Tensor, out: Tensor, samples: int, width: int) -> None:
    """Fill `out` (heads,) with the sums of the parts (samples, heads, width)."""
    count = out.shape[0]
    block = min(1024, triton.next_power_of_2(samples * width))
    total_kernel[(count,)](part, out, samples, width, count * width, BLOCK=block)


def _launches(*groups: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the numbers of the two tensors of each launch, the same twice for one alone."""
    if len(groups[0]) == 1:
        return [(0, 0)]
    together = all(a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype for a, b in groups)
    return [(0, 1)] if together else [(0, 0), (1, 1)]


def without_own_rows(
    o: Tensor, v: Tensor, gain: Tensor | None, strength: Tensor | None, number: float, gate: int, tiny: float, y: Tensor
) -> None:
    """Fill y with o - strength·(o·v)v / max(‖v‖², tiny); a gain per head multiplies the strength."""
    o, v = rows(o), rows(v)
    with torch.cuda.device_of(o):
        without_own_kernel[grid_of(o)](
            o, v, y, o if strength is None else strength, o if gain is None else gain, number,
            *strides(o, v, y), o.shape[1], o.shape[2], tiny, KEYED=strength is not None, GATE=gate, **sizes(o),
        )  # fmt: skip


def without_own_rows_backward(
    g: Tensor,
    o: Tensor,
    v: Tensor,
    gain: Tensor | None,
    strength: Tensor | None,
    number: float,
    gate: int,
    tiny: float,
    made: Sequence[Tensor],
) -> None:
    """Fill `made`, the gradients of o and v and with a gain of the gain."""
    g, o, v = rows(g), rows(o), rows(v)
    constants = sizes(o)
    blocks = triton.cdiv(o.shape[2], constants["BT"])
    grid = (blocks * o.shape[0] * o.shape[1],)
    part = o if gain is None else torch.empty(grid, dtype=torch.float32, device=o.device)
    with torch.cuda.device_of(o):
        without_own_back_kernel[grid](
            g, o, v, made[0], made[1], part, o if strength is None else strength, o if gain is None else gain, number,
            *strides(g, o, v, made[0], made[1]), o.shape[1], o.shape[2], tiny,
            KEYED=strength is not None, GATE=gate, **constants,
        )  # fmt: skip
        if gain is not None:
            total(part, made[2], o.shape[0], blocks)


def mix_rows(x: Tensor, y: Tensor, gain: Tensor, of_x: float, of_y: float, z: Tensor) -> None:
    """Fill z with x + gain·(of_x·x + of_y·y), for a gain per head."""
    x, y = rows(x), rows(y)
    with torch.cuda.device_of(x):
        mix_kernel[grid_of(x)](x, y, z, gain, of_x, of_y, *strides(x, y, z), x.shape[1], x.shape[2], **sizes(x))


def mix_rows_backward(
    g: Tensor, x: Tensor, y: Tensor, gain: Tensor, of_x: float, of_y: float, made: Sequence[Tensor]
) -> None:
    """Fill `made`, the gradients of x, y and the gain."""
    g, x, y = rows(g), rows(x), rows(y)
    constants = sizes(x)
    blocks = triton.cdiv(x.shape[2], constants["BT"])
    grid = (blocks * x.shape[0] * x.shape[1],)
    part = torch.empty(grid, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        mix_back_kernel[grid](
            g, x, y, made[0], made[1], part, gain, of_x, of_y, *strides(g, x, y, made[0], made[1]),
            x.shape[1], x.shape[2], **constants,
        )  # fmt: skip
        total(part, made[2], x.shape[0], blocks)
