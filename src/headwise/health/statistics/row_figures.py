"""The figures of every row of attention, computed in one pass that never holds the T×N matrix.

For statistics, without gradients; `attention/row_statistics.py` computes fewer figures with gradients, for methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from headwise.health.statistics.figures_by_kernels import by_kernels
from headwise.health.statistics.reading import Queries, Reading
from headwise.health.statistics.scan import FAR, Logits, Memory, SoftmaxBlock, block_size, blocks, precise_dtype
from headwise.health.statistics.tally import Tally
from headwise.health.statistics.value_differences import ValueDifferences
from headwise.numerics.precision import magnitude

# Weights (b,H,r,w), and the logarithm of their unit (b,H,1,1), None for 1.
Map = tuple[Tensor, Tensor | None]


# Figures of a row that only one of a block's methods computes.
OF_LOGITS: dict[str, Callable[[SoftmaxBlock], Tensor]] = {
    "lse": SoftmaxBlock.log_sum_exp,
    "lowest": SoftmaxBlock.lowest,
    "top_key": SoftmaxBlock.top_key,
    "on_sink": SoftmaxBlock.on_sink,
}


class MapCosines:
    """The cosines of flattened maps, (B,H,H'): of a layer's heads with one another, or with those of the layer before.

    Inner products are summed block by block, each in units of the largest weight of its head so far.
    """

    def __init__(self, reading: Reading, others: int, dtype: torch.dtype) -> None:
        zeros = lambda *shape: torch.zeros(reading.batch, *shape, dtype=dtype, device=reading.q.device)
        self._inner = zeros(reading.heads, others)
        self._squares = zeros(reading.heads), zeros(others)
        # Logarithms.
        self._units = zeros(reading.heads) + FAR, zeros(others) + FAR

    def add(self, here: Map, before: Map, samples: slice) -> None:
        """Add the inner products of blocks of rows of two maps, which may be the same."""
        width = min(here[0].shape[-1], before[0].shape[-1])
        first, second = (
            self._in_units(side, x[..., :width], unit, samples) for side, (x, unit) in enumerate((here, before))
        )
        inner = torch.bmm(first, second.transpose(1, 2))
        self._inner[samples] += inner
        for side, flat in enumerate((first, second)):
            alike = here is before
            self._squares[side][samples] += (
                inner.diagonal(dim1=1, dim2=2) if alike else torch.linalg.vector_norm(flat, dim=-1).square()
            )

    def _in_units(self, side: int, weights: Tensor, unit: Tensor | None, samples: slice) -> Tensor:
        """Return weights (b,H,r,w), which are in their own unit, flat and in the unit of the sums."""
        flat = weights.flatten(2)
        if unit is None:
            return flat
        before, own = self._units[side][samples], unit.flatten(1)
        largest = torch.maximum(before, own)
        shrunk = (before - largest).exp()
        self._units[side][samples] = largest
        self._squares[side][samples] *= shrunk.square()
        self._inner[samples] *= shrunk[:, :, None] if side == 0 else shrunk[:, None]
        return flat * (own - largest).exp()[..., None]

    def cosines(self) -> Tensor:
        """Return the cosines of all pairs of maps, (B,H,H'); NaN for a map without rows."""
        here, before = self._squares
        return (self._inner / (here[:, :, None] * before[:, None]).sqrt()).clamp(max=1)


class MapsBefore:
    """The maps of the layer before, recomputed from its queries and keys."""

    def __init__(self, reading: Reading, previous: Reading, queries: Queries, dtype: torch.dtype) -> None:
        self.queries, self.dtype = queries, dtype
        self._logits = Logits(previous, queries, dtype)
        elements = block_size(reading, queries.valid.shape[-1])
        if previous.heads > reading.heads:
            elements = -(-elements // reading.heads) * previous.heads
        self._memory = Memory(elements, dtype, reading.q.device)

    def block(self, samples: slice, rows: slice) -> Map:
        """Return a block of rows of the maps."""
        block = SoftmaxBlock.of(self._logits, samples, rows, self._memory)
        return block.weights(self.queries.valid[samples, :, rows].amax(1, keepdim=True).to(self.dtype))


class RowFigures:
    """The figures of one pass: per row (B,H,R), per key (B,H,N), or between heads (B,H,H').

    Attributes:
        top: largest logit of each row.
        entropy: entropy of each row in nats.
        peak: largest weight of each row.
        distance: mean |query − key| of each row in tokens.
        roughness: Σ_j A_ij ‖v_i − v_j‖² of each row.
        descent: cosine of Σ_j A_ij (v_i − v_j) with the same under a symmetric kernel, of each row.
        centred: norm of each row's logits about their mean.
        on_text: weight of each row on the keys of a text.
        on_sink: weight of each row on its learned sink.
        lse: log-sum-exp of each row, with its learned sink.
        lowest: smallest logit of each row.
        top_key: position of the key with the largest logit of each row.
        columns: mean weight of each key.
        likeness: cosines of the maps of two heads.
        crossing: cosines of the maps with those of the layer before.
    """

    def __init__(
        self, reading: Reading, needs: Collection[str], queries: Queries | None = None, previous: Reading | None = None
    ) -> None:
        self.reading, self.previous = reading, previous
        self.queries = queries if queries is not None else Queries.of(reading)
        # `crossing` needs a layer before.
        self.needs = set(needs) - (set() if previous is not None else {"crossing"})
        self._figures: dict[str, Tensor] = {}
        device = reading.q.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            self._scan()

    def __getattr__(self, name: str) -> Tensor:
        figures = self.__dict__.get("_figures", {})
        if name not in figures:
            raise AttributeError(
                f"this pass did not compute {name!r}, only {sorted(figures)}: a statistic names its figures in `needs`"
            )
        return figures[name]

    @property
    def columns_of_softmax(self) -> int:
        """Return the number of columns of the softmax in addition to the keys: 1 with a learned sink, else 0."""
        return 0 if self.reading.sinks is None else 1

    def mean(self, values: Tensor, least: int = 1, among: Tensor | None = None) -> Tally:
        """Return the mean of `values` (B,H,R) over real queries whose softmax has at least `least` columns.

        `among` (B|1,T) is 0 for queries that do not count.
        """
        return self.queries.mean(values, least, self.columns_of_softmax, among)

    def extremum(self, values: Tensor, kind: str, least: int = 1) -> Tally:
        """Return the largest ("max") or smallest ("min") of `values` (B,H,R) over the queries that `mean` counts."""
        return self.queries.extremum(values, kind, least, self.columns_of_softmax)

    def _scan(self) -> None:
        reading, queries = self.reading, self.queries
        size = queries.valid.shape[-1]
        self.dtype = precise_dtype(reading)
        if self._crossed is not None and precise_dtype(self._crossed) == torch.float64:
            self.dtype = torch.float64
        if not self.needs or not size or not reading.batch:
            return
        # The first reading on a GPU knows no bound. Above 512 the fourth digit of a small entropy may be wrong there,
        # which costs less than all logits in fp64.
        if self.dtype == torch.float32 or reading.known_bound == math.inf:
            self._figures = by_kernels(reading, queries, self.needs, self._crossed)
            self.needs -= set(self._figures)
            if not self.needs:
                return
        logits = Logits(reading, queries, self.dtype)
        memory = Memory(block_size(reading, size), self.dtype, reading.q.device)
        self._prepare(size, logits)
        for samples, rows in blocks(reading, size):
            block = SoftmaxBlock.of(logits, samples, rows, memory)
            self._read_rows(block, samples, rows)
            self._read_weights(block, samples, rows)
        if "columns" in self.needs:
            self._figures["columns"] /= queries.valid.sum(-1).clamp_min(1)[..., None]
        self._figures |= {name: products.cosines() for name, products in self._products.items()}

    @property
    def _crossed(self) -> Reading | None:
        return self.previous if "crossing" in self.needs else None

    def _prepare(self, size: int, logits: Logits) -> None:
        reading = self.reading
        shapes = dict.fromkeys(
            (
                "top", "entropy", "peak", "distance", "roughness", "descent", "centred", "on_text", "on_sink", "lse",
                "lowest", "top_key",
            ),
            (size,),
        )  # fmt: skip
        shapes |= {"columns": (reading.keys,)}
        others = {"likeness": reading.heads, "crossing": 0 if self.previous is None else self.previous.heads}
        self._products = {name: MapCosines(reading, others[name], self.dtype) for name in self.needs & set(others)}
        for name in self.needs - set(others):
            shape = (reading.batch, reading.heads, *shapes[name])
            self._figures[name] = torch.zeros(shape, dtype=self.dtype, device=reading.q.device)
        # With few keys, sums over keys cost more than reading the rows of logits.
        if "centred" in self.needs and reading.keeps_rows_alike and reading.keys > 2 * reading.q.shape[-1]:
            self._figures["centred"] = self._centred_from_keys(logits)
            self.needs.discard("centred")
        self._before = None
        if self._crossed is not None:
            self._before = MapsBefore(reading, self._crossed, self.queries, self.dtype)
        if self.needs & {"roughness", "descent"}:
            self._differences = ValueDifferences(reading, self.queries, self.dtype, "descent" in self.needs)

    def _centred_from_keys(self, logits: Logits) -> Tensor:
        """Return the centred norm ‖(K − k̄) q‖ of every row from sums over the keys, without any row of logits."""
        reading, heads = self.reading, self.reading.heads
        k = logits.k
        allowed = (
            reading.mask[:, :, 0, :, None].to(self.dtype)
            if reading.mask is not None
            else k.new_ones(1, 1, k.shape[2], 1)
        )
        count = allowed.sum(2, keepdim=True).clamp_min(1)
        middle = (k * allowed).sum(2, keepdim=True) / count
        k = (k - middle) * allowed
        # Queries carry the unit of the keys, so that squares are those of logits.
        unit = magnitude(k, (2, 3))
        k, middle = k / unit, middle / unit
        repeat = heads // k.shape[1]
        gram = torch.matmul(k.transpose(2, 3), k).repeat_interleave(repeat, 1)
        q = logits.q.to(self.dtype) * reading.factor * unit.repeat_interleave(repeat, 1)
        square = (torch.matmul(q, gram) * q).sum(-1)
        if reading.sinks is not None:
            mean = torch.matmul(q, middle.repeat_interleave(repeat, 1).transpose(2, 3)).squeeze(-1)
            count = count[..., 0]
            square = square + count / (count + 1) * (mean - reading.sinks.to(self.dtype)[:, None]).square()
        return square.clamp_min(0).sqrt()

    def _read_rows(self, block: SoftmaxBlock, samples: slice, rows: slice) -> None:
        """Compute the figures that need no weights."""
        needs, figures = self.needs, self._figures
        part = (samples, slice(None), rows)
        if "top" in needs:
            figures["top"][part] = block.top
        if "peak" in needs:
            figures["peak"][part] = block.peak()
        for name, read in OF_LOGITS.items():
            if name in needs:
                figures[name][part] = read(block).to(self.dtype)
        if "centred" in needs:
            counts = self.queries.counts
            counts = (counts if counts.shape[0] == 1 else counts[samples])[..., rows].to(self.dtype).clamp_min(1)
            figures["centred"][part] = block.centred(counts)
        if needs & {"roughness", "descent"}:
            roughness, descent = self._differences.read(block, samples, rows)
            if "roughness" in needs:
                figures["roughness"][part] = roughness
            if descent is not None:
                figures["descent"][part] = descent
        # Last, because it overwrites the depth of the block.
        if "entropy" in needs:
            figures["entropy"][part] = block.entropy()

    def _read_weights(self, block: SoftmaxBlock, samples: slice, rows: slice) -> None:
        """Compute the figures that need the weights, in the memory of the block, whose depth is no longer needed."""
        needs, figures = self.needs, self._figures
        part = (samples, slice(None), rows)
        if "distance" in needs:
            # Before the weights, among which a sink may leave only zeros.
            figures["distance"][part] = self._distance(block, samples, rows)
        weights, unit = here = block.weights(self.queries.valid[samples, :, rows].to(self.dtype))
        size = 1.0 if unit is None else unit[..., 0].exp()
        if "columns" in needs:
            figures["columns"][samples, :, : weights.shape[-1]] += weights.sum(-2) * size
        if "on_text" in needs and self.reading.text is not None:
            figures["on_text"][part] = weights[..., self.reading.text].sum(-1) * size
        if "likeness" in needs:
            self._products["likeness"].add(here, here, samples)
        if self._before is not None:
            self._products["crossing"].add(here, self._before.block(samples, rows), samples)

    def _distance(self, block: SoftmaxBlock, samples: slice, rows: slice) -> Tensor:
        """Return the mean of |query − key| of each row, (b,H,r), by the weights among the keys; overwrites `depth`."""
        positions = self.queries.positions
        positions = positions[samples, rows] if positions.shape[0] > 1 else positions[:, rows]
        keys = torch.arange(block.powers.shape[-1], device=positions.device)
        distances = (keys - positions[:, None, :, None]).abs().to(self.dtype)
        return torch.mul(block.powers, distances, out=block.depth).sum(-1) / block.total
