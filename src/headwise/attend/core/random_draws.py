"""Random draws: numbers for each sample, head, key or element, hashed from the key of the pass and the position.

A draw is a hash of (run seed, rank, site, pass, method, name, position). It never touches torch's generators, unless a
number of them is asked for in place of the pass (`regularize(draws="torch")`). Therefore
a method changes no other random number of the training, a recomputed layer draws the same bits, a block of queries gets
its part of the whole draw, and eager and compiled code agree. On CUDA a draw is one Triton kernel (`triton_draws`) with
the same bits.
"""

from __future__ import annotations

import functools
import math
import threading
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headwise.borders import modes_see_operators
from headwise.numerics.kernels import kernels_run_on

# What the draws of a pass follow: a counter of passes, or the state of torch's generator.
DRAWS = ("counter", "torch")

# 32-bit hashes in int64: a product of two may overflow, but its low 32 bits are correct on every device.
MASK = 0xFFFFFFFF
# 2**32 divided by the golden ratio, made odd: it spreads neighbouring numbers far apart.
GOLDEN = 0x9E3779B1
ADDED = 0x7F4A7C15


def mix(*parts: int | str) -> int:
    """Return a 32-bit hash of integers and strings (the finalizer of MurmurHash3 over each part)."""
    # The first digits of pi. Any number would do, but results on disk depend on this one.
    return mixed(0x243F6A88, *parts)


def mixed(h: int, *parts: int | str) -> int:
    """Return the hash of further parts after those whose `mix` is h."""
    for part in parts:
        value = zlib.crc32(part.encode()) if isinstance(part, str) else part
        for word in (value & MASK, (value >> 32) & MASK):
            h = _finish(((h ^ word) * GOLDEN + ADDED) & MASK)
    return h


def _finish(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


def _scramble(h: Tensor) -> Tensor:
    # The same finalizer on int64 tensors of 32-bit values; the mask removes what overflows.
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & MASK
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & MASK
    return h ^ (h >> 16)


# The kinds of numbers that the kernel draws: uniform, normal, whether a uniform number is at least p, uniform ones for
# the elements of matrices, and the factor of what stays: 1 / (1 - p), or 0.
UNIFORM, NORMAL, KEPT, ELEMENTS, FACTOR = 0, 1, 2, 3, 4
DTYPES = (torch.float32, torch.float32, torch.bool, torch.float32, torch.float32)


def uniform(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers drawn uniformly from [0, 1), by the key of a pass, which is an integer or a 0-d int64 tensor,
    and a salt, which separates the draws of the pass."""
    if _one_kernel(device):
        return _drawn(UNIFORM, key, salt, None, shape, device)
    return _uniform(key, salt, shape, device)


def uniform_matrix(
    key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device, block: slice | None = None
) -> Tensor:
    """Return fp32 numbers drawn uniformly from [0, 1) for the elements of matrices (..., T, N), or of a
    block of their rows T.

    They cost a fifth of those of `uniform` on a CPU and on a GPU: each row is hashed as there, each element of it with
    one round more.
    """
    rows = slice(0, shape[-2]) if block is None else block
    if _one_kernel(device):
        return _drawn(ELEMENTS, key, salt, None, shape, device, [rows.start, rows.stop])
    return _uniform_matrix(key, salt, shape, device, rows)


def _uniform_matrix(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device, rows: slice) -> Tensor:
    *lead, count, width = shape
    first = torch.arange(math.prod(lead), device=device).view(*lead, 1) * count
    x = elements(key, salt, first + torch.arange(rows.start, rows.stop, device=device), width)
    return ((x >> 8) + (1 << 23)).to(torch.float32) * (1.0 / (1 << 24))


def elements(key: int | Tensor, salt: int, row: Tensor, width: int) -> Tensor:
    """Return the int32 hashes of the elements of rows, (..., width), for the rows' numbers (...) in int64.

    The hash of column j of a row with hash r is x·0x846CA68B with x = y ⊕ (y >> 15), y = (r ⊕ j·GOLDEN)·0x7FEB352D:
    two rounds of C. Wellons' lowbias32. Its upper 24 bits are the element's number.
    """
    h = _low_bits(_hashed(key, salt, row))
    plain = row.device.type == "cpu" and not torch.compiler.is_compiling() and not modes_see_operators()
    column = (_kept_columns if plain else _columns)(width, row.device)
    if torch.compiler.is_compiling():
        x = (h.unsqueeze(-1) ^ column) * 0x7FEB352D
        return (x ^ (x >> 15)) * (0x846CA68B - (1 << 32))
    # In place: on a CPU the allocations cost more than the arithmetic.
    x = torch.bitwise_xor(h.unsqueeze(-1), column).mul_(0x7FEB352D)
    return x.bitwise_xor_(x >> 15).mul_(0x846CA68B - (1 << 32))


def _columns(width: int, device: torch.device) -> Tensor:
    return _low_bits(((torch.arange(width, device=device) & MASK) * GOLDEN) & MASK)


# On a CPU, for the lengths of a training: for few tokens these operators take as long as those of the elements.
_kept_columns = functools.lru_cache(maxsize=8)(_columns)


def least_kept(p: float) -> int:
    """Return the least int32 hash whose number is at least p, an fp32 number of [0, 1)."""
    return (math.ceil(p * (1 << 24)) << 8) - (1 << 31)


def _low_bits(h: Tensor) -> Tensor:
    """Return the int32 numbers with the bits of h, int64 of [0, 2^32)."""
    return ((h ^ (1 << 31)) - (1 << 31)).to(torch.int32)


def _hashed(key: int | Tensor, salt: int, position: Tensor) -> Tensor:
    """Return the 32-bit hashes of positions, all int64."""
    if isinstance(key, Tensor) and key.device != position.device:
        key = key.to(position.device, non_blocking=True)
    # The low 32 bits of a position determine those of the product. Unmasked, a GPU's compiler multiplies in int32.
    h = _scramble(((position & MASK) * GOLDEN + key) & MASK)
    return _scramble((h + salt) & MASK)


def normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers drawn from N(0, 1), by Box-Muller on two uniform draws."""
    if _one_kernel(device):
        return _drawn(NORMAL, key, salt, None, shape, device)
    return _normal(key, salt, shape, device)


def noise(key: int | Tensor, salt: int, amount: Tensor, x: Tensor) -> Tensor:
    """Return amount · `normal` in the shape and dtype of x, with amount (B|1, 1, ...) for the first dimension of x."""
    if _one_kernel(x.device) and x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.dim() > 1:
        given, number = _split(key)
        arguments = given, number, salt, amount.expand(x.shape[0], *amount.shape[1:]).flatten(), list(x.shape), x.dtype
        return (noise_on_device if modes_see_operators() else _noise_on_device)(*arguments)
    return (normal(key, salt, tuple(x.shape), x.device) * amount).to(x.dtype)


def _noise_on_device(
    key: Tensor | None, number: int, salt: int, amount: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """Return `noise` by one kernel, with amount (B,)."""
    if not kernels_run_on(amount.device):
        drawn = _normal(number if key is None else key, salt, tuple(shape), amount.device)
        return (drawn * amount.view(-1, *[1] * (len(shape) - 1))).to(dtype)
    from headwise.attend.core import triton_draws

    key = key if key is None or key.device == amount.device else key.to(amount.device, non_blocking=True)
    out = torch.empty(shape, dtype=dtype, device=amount.device)
    return triton_draws.draw_noise(key, number, salt, amount, out)


noise_on_device = torch.library.custom_op("headwise::noise", _noise_on_device, mutates_args=())

noise_on_device.register_fake(lambda key, number, salt, amount, shape, dtype: amount.new_empty(shape, dtype=dtype))


def kept(key: int | Tensor, salt: int, p: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return bools, True with probability 1 - p (0-d, fp32): whether `uniform` draws a number of at least p."""
    if _one_kernel(device) and p.device.type == "cpu":
        return _drawn(KEPT, key, salt, p, shape, device)
    return uniform(key, salt, shape, device) >= p


def factor(key: int | Tensor, salt: int, p: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers, 1 / (1 - p) where `kept` is True and else 0."""
    if _one_kernel(device) and p.device.type == "cpu":
        return _drawn(FACTOR, key, salt, p, shape, device)
    return kept(key, salt, p, shape, device) / (1 - p)


def head_factors(
    key: int | Tensor, salt: int, p: Tensor, shape: tuple[int, int], device: torch.device, rescale: bool
) -> Tensor:
    """Return fp32 factors of heads, (samples, heads): 0 with probability p, of which the largest number is exempt.

    Those that stay get heads / (number that stays), or 1 without `rescale`.
    """
    if _one_kernel(device) and p.device.type == "cpu" and shape[1] <= MOST_HEADS:
        given, number = _split(key)
        arguments = given, number, salt, float(p), list(shape), rescale
        return (draw_heads_on_device if modes_see_operators() else _heads_on_device)(*arguments, device=device)
    return _head_factors(key, salt, p, shape, device, rescale)


def _head_factors(
    key: int | Tensor, salt: int, p: Tensor | float, shape: tuple[int, int], device: torch.device, rescale: bool
) -> Tensor:
    draw = (_uniform if isinstance(p, float) else uniform)(key, salt, shape, device)
    # The head with the largest number always stays, which is every head equally often.
    kept = (draw >= p) | (draw == draw.amax(1, keepdim=True))
    return kept * (shape[1] / kept.sum(1, keepdim=True)) if rescale else kept.float()


# The most heads whose numbers one program of the kernel compares.
MOST_HEADS = 1024


def _split(key: int | Tensor) -> tuple[Tensor | None, int]:
    """Return a key as operators take it: a tensor or None, and a number."""
    return (key, 0) if isinstance(key, Tensor) else (None, key)


def _one_kernel(device: torch.device) -> bool:
    # A compiled graph fuses the operators below into those that use the numbers, which costs no launch at all.
    return device.type == "cuda" and not torch.compiler.is_compiling()


def _drawn(
    kind: int,
    key: int | Tensor,
    salt: int,
    p: Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    rows: Sequence[int] = (),
) -> Tensor:
    arguments = *_split(key), salt, p, list(shape), list(rows), kind
    return (draw_on_device if modes_see_operators() else _draw_on_device)(*arguments, device=device)


def _draw_on_device(
    key: Tensor | None,
    number: int,
    salt: int,
    p: Tensor | None,
    shape: list[int],
    rows: list[int],
    kind: int,
    *,
    device: torch.device,
) -> Tensor:
    """Return a draw, of elements only the rows [start, stop]; `number` is the key unless `key` gives it."""
    if not kernels_run_on(device):
        of = number if key is None else key
        if kind == NORMAL:
            return _normal(of, salt, tuple(shape), device)
        if kind == ELEMENTS:
            return _uniform_matrix(of, salt, tuple(shape), device, slice(*rows))
        drawn = _uniform(of, salt, tuple(shape), device)
        if p is None:
            return drawn
        return (drawn >= p) / (1 - p) if kind == FACTOR else drawn >= p
    from headwise.attend.core import triton_draws

    key = key if key is None or key.device == device else key.to(device, non_blocking=True)
    out = torch.empty(part_of(shape, rows), dtype=DTYPES[kind], device=device)
    return triton_draws.draw(kind, key, number, salt, 0.0 if p is None else float(p), shape, rows, out)


# One operator, and so one launch to programs that count launches, with the kernel and without it. Where no mode looks,
# the function itself runs: an operator of torch.library takes longer on the host than the kernel on the device.
draw_on_device = torch.library.custom_op("headwise::draw", _draw_on_device, mutates_args=())

draw_on_device.register_fake(
    lambda key, number, salt, p, shape, rows, kind, *, device: torch.empty(
        part_of(shape, rows), dtype=DTYPES[kind], device=device
    )
)


def _heads_on_device(
    key: Tensor | None, number: int, salt: int, p: float, shape: list[int], rescale: bool, *, device: torch.device
) -> Tensor:
    """Return `head_factors` by one kernel."""
    samples, heads = shape
    if not kernels_run_on(device):
        return _head_factors(number if key is None else key, salt, p, (samples, heads), device, rescale)
    from headwise.attend.core import triton_draws

    key = key if key is None or key.device == device else key.to(device, non_blocking=True)
    out = torch.empty(shape, device=device, dtype=torch.float32)
    return triton_draws.draw_heads(key, number, salt, p, rescale, out)


draw_heads_on_device = torch.library.custom_op("headwise::draw_heads", _heads_on_device, mutates_args=())

draw_heads_on_device.register_fake(
    lambda key, number, salt, p, shape, rescale, *, device: torch.empty(shape, device=device, dtype=torch.float32)
)


def next_key(prefix: int, first: int, replays: Tensor) -> Tensor:
    """Return mix(parts, first + replays) as a 0-d int64 tensor of the device, and count one replay.

    `prefix` is `mix` of the parts, and `replays` a 0-d int64 tensor of the device.
    """
    if kernels_run_on(replays.device) and not modes_see_operators():
        from headwise.attend.core import triton_draws

        return triton_draws.next_key(prefix, first, replays)
    count, h = replays + first, torch.full_like(replays, prefix)
    for word in (count & MASK, (count >> 32) & MASK):
        h = _scramble(((h ^ word) * GOLDEN + ADDED) & MASK)
    replays.add_(1)
    return h


def part_of(shape: list[int], rows: list[int]) -> list[int]:
    """Return the shape of the rows [start, stop] of a draw, or of the whole draw without rows."""
    return [*shape[:-2], rows[1] - rows[0], shape[-1]] if rows else shape


class DrawnAhead:
    """The uniform numbers of all layers of one forward on a CPU, drawn when the first layer asks for its own.

    A draw takes some 30 operators. For the few numbers of a small model they take as long for all layers as for one.

    Args:
        keys: returns the keys of the next passes through the layers.
    """

    # Of one layer: with more, the arithmetic counts and not the operators.
    MOST = 1 << 12

    def __init__(self, keys: Callable[[], list[int]]) -> None:
        self.keys = keys
        self.numbers: dict[tuple[int, int, tuple[int, ...]], Tensor] = {}
        self.asked: set[tuple[int, tuple[int, ...]]] = set()

    def take(self, key: int, salt: int, shape: tuple[int, ...]) -> Tensor | None:
        """Return the numbers of a pass, or None if they must be drawn alone: those of an unforeseen pass, say."""
        if (salt, shape) in self.asked:
            return self.numbers.pop((key, salt, shape), None)
        self.asked.add((salt, shape))
        keys = [key, *self.keys()]
        drawn = _numbers(torch.tensor(keys, device="cpu").view(-1, *[1] * len(shape)), salt, shape, torch.device("cpu"))
        # Copies, as what a method writes into one must not count as a change of the others.
        first, *others = torch.ops.aten.unbind_copy.int(drawn)
        self.numbers |= {(one, salt, shape): x for one, x in zip(keys[1:], others, strict=True)}
        return first


class _Drawing(threading.local):
    ahead: DrawnAhead | None = None


_drawing = _Drawing()


def draw_ahead(keys: Callable[[], list[int]]) -> Callable[[], None]:
    """Draw the numbers of all layers together in the forward that begins in this thread; return what ends it."""
    _drawing.ahead = DrawnAhead(keys)

    def end() -> None:
        _drawing.ahead = None

    return end


def _uniform(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    few = isinstance(key, int) and device.type == "cpu" and math.prod(shape) <= DrawnAhead.MOST
    if few and not torch.compiler.is_compiling() and _drawing.ahead is not None and not modes_see_operators():
        assert isinstance(key, int)
        drawn = _drawing.ahead.take(key, salt, shape)
        if drawn is not None:
            return drawn
    return _numbers(key, salt, shape, device)


def _numbers(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    h = _hashed(key, salt, torch.arange(math.prod(shape), device=device).view(shape))
    # The upper 24 bits, which fp32 represents exactly: the result never rounds up to 1.
    return (h >> 8).to(torch.float32) * (1.0 / (1 << 24))


def _normal(key: int | Tensor, salt: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    # An arbitrary constant in the salt separates the two draws. log1p(-u) is finite because u is below 1.
    radius = _uniform(key, salt, shape, device)
    angle = _uniform(key, salt ^ 0x5BD1E995, shape, device)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)
