"""The figures of every row of attention, computed in one pass that never holds the T×N matrix.

For statistics, without gradients; `attention/row_statistics.py` computes fewer figures with gradients, for methods.
"""

import dataclasses
from collections.abc import Collection

import torch
from torch import Tensor

from headwise.statistics.reading import Queries, Reading
from headwise.statistics.scan import Logits, Memory, SoftmaxBlock, block_size, blocks, precise_dtype
from headwise.statistics.tally import Tally


def without_own(weights: Tensor, index: Tensor) -> Tensor:
    """Return the weights (b,H,r,w) with each query's own key, at `index` (b,H,r,1), set to 0 in place.

    The own key does not contribute to sums of v_i − v_j; with its weight it would cancel only up to rounding.
    """
    return weights.scatter_(-1, index, 0.0)


def weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sums (b,H,r,c) of values (b,H|Hkv,w,c) by the weights (b,H,r,w)."""
    b, heads, r, w = weights.shape
    groups = values.shape[1]
    mixed = torch.bmm(weights.reshape(b * groups, -1, w), values[:, :, :w].reshape(b * groups, w, -1))
    return mixed.view(b, heads, r, -1)


class Descents:
    """Comparison of Σ_j A_ij (v_i − v_j) under the layer's own weights and under a symmetric kernel.

    The symmetric kernel uses the keys as queries.
    """

    def __init__(self, reading: Reading, queries: Queries, dtype: torch.dtype) -> None:
        self.queries, self.dtype = queries, dtype
        # Repeated to the number of query heads, because the keys replace the queries.
        keys = reading.k.repeat_interleave(reading.heads // reading.k.shape[1], 1)
        self._logits = Logits(dataclasses.replace(reading, q=keys), queries, dtype)
        self._memory = Memory(block_size(reading, queries.valid.shape[-1]), dtype, reading.q.device)

    def cosines(
        self, weights: Tensor, own: Tensor, values: Tensor, index: Tensor, samples: slice, rows: slice
    ) -> Tensor:
        """Return the cosines of both for a block of rows (b,H,r), 0 where one of them is 0.

        `weights` (b,H,r,w) are the layer's own without each query's own key; `own` (b,H,r,dv+2) and `values` hold v,
        its squared norm and a one.
        """
        block = SoftmaxBlock.of(self._logits, samples, rows, self._memory)
        symmetric = without_own(block.weights(self.queries.valid[samples, :, rows].to(self.dtype)), index)
        first, second = (_differences(own, weighted_sum(kernel, values)) for kernel in (weights, symmetric))
        return torch.cosine_similarity(first, second, dim=-1, eps=1e-30)


def _differences(own: Tensor, mixed: Tensor) -> Tensor:
    """Return Σ_j A_ij (v_i − v_j) from v_i and the sums over keys, whose last column is Σ_j A_ij."""
    return mixed[..., -1:] * own[..., :-2] - mixed[..., :-2]


class Crossing:
    """Comparison of a layer's maps (H) with those of the layer before (H'), recomputed from its queries and keys."""

    def __init__(self, reading: Reading, previous: Reading, queries: Queries, dtype: torch.dtype) -> None:
        self.queries, self.dtype = queries, dtype
        self._logits = Logits(previous, queries, dtype)
        size = queries.valid.shape[-1]
        self._memory = Memory(_elements(reading, size, previous.heads), dtype, reading.q.device)
        shapes = (reading.heads, previous.heads), (reading.heads,), (previous.heads,)
        self._inner, self._here, self._before = (
            torch.zeros(reading.batch, *shape, dtype=dtype, device=reading.q.device) for shape in shapes
        )

    def add(self, weights: Tensor, samples: slice, rows: slice) -> None:
        """Add a block of maps (b,H,r,w)."""
        block = SoftmaxBlock.of(self._logits, samples, rows, self._memory)
        before = block.weights(self.queries.valid[samples, :, rows].amax(1, keepdim=True).to(self.dtype))
        width = min(weights.shape[-1], before.shape[-1])
        here, before = weights[..., :width].flatten(2), before[..., :width].flatten(2)
        self._inner[samples] += torch.bmm(here, before.transpose(1, 2))
        self._here[samples] += torch.linalg.vector_norm(here, dim=-1).square()
        self._before[samples] += torch.linalg.vector_norm(before, dim=-1).square()

    def cosines(self) -> Tensor:
        """Return the cosines of all pairs of maps, (B,H,H')."""
        return self._inner / (self._here[:, :, None] * self._before[:, None]).sqrt()


def _elements(reading: Reading, rows: int, heads: int) -> int:
    """Return the number of elements of the largest block with the larger of `heads` and the reading's heads."""
    elements = block_size(reading, rows)
    return elements if heads <= reading.heads else -(-elements // reading.heads) * heads


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
        columns: mean weight of each key.
        gram: inner products of the maps of two heads.
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

        `among` (T,) is 1 for the queries that count, None for all.
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
        logits = Logits(reading, queries, self.dtype)
        memory = Memory(block_size(reading, size), self.dtype, reading.q.device)
        crossing = None if self._crossed is None else Crossing(reading, self._crossed, queries, self.dtype)
        self._prepare(size, logits)
        for samples, rows in blocks(reading, size):
            weights, spare = self._read_rows(SoftmaxBlock.of(logits, samples, rows, memory), samples, rows)
            self._read_weights(weights, spare, samples, rows, crossing)
        if "columns" in self.needs:
            self._figures["columns"] /= queries.valid.sum(-1).clamp_min(1)[..., None]
        if crossing is not None:
            self._figures["crossing"] = crossing.cosines()

    @property
    def _crossed(self) -> Reading | None:
        return self.previous if "crossing" in self.needs else None

    def _prepare(self, size: int, logits: Logits) -> None:
        reading = self.reading
        shapes = dict.fromkeys(
            ("top", "entropy", "peak", "distance", "roughness", "descent", "centred", "on_text"), (size,)
        )
        shapes |= {"columns": (reading.keys,), "gram": (reading.heads,)}
        for name in self.needs - {"crossing"}:
            shape = (reading.batch, reading.heads, *shapes[name])
            self._figures[name] = torch.zeros(shape, dtype=self.dtype, device=reading.q.device)
        # With few keys, sums over keys cost more than reading the rows of logits.
        if "centred" in self.needs and reading.keeps_rows_alike and reading.keys > 2 * reading.q.shape[-1]:
            self._figures["centred"] = self._centred_from_keys(logits)
            self.needs.discard("centred")
        if self.needs & {"roughness", "descent"}:
            self._values = self._values_about_their_mean()
        if "descent" in self.needs:
            self._descents = Descents(reading, self.queries, self.dtype)

    def _values_about_their_mean(self) -> Tensor:
        """Return v − mean, its squared norm and a one, (B,H|Hkv,N,dv+2).

        Subtracting the mean does not change J and reduces rounding errors.
        """
        v = self.reading.v.to(self.dtype)
        v = v - v.mean(2, keepdim=True)
        square = v.square().sum(-1, keepdim=True)
        return torch.cat([v, square, torch.ones_like(square)], -1)

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
        repeat = heads // k.shape[1]
        gram = torch.matmul(k.transpose(2, 3), k).repeat_interleave(repeat, 1)
        q = logits.q.to(self.dtype) * reading.factor
        square = (torch.matmul(q, gram) * q).sum(-1)
        if reading.sinks is not None:
            mean = torch.matmul(q, middle.repeat_interleave(repeat, 1).transpose(2, 3)).squeeze(-1)
            count = count[..., 0]
            square = square + count / (count + 1) * (mean - reading.sinks.to(self.dtype)[:, None]).square()
        return square.clamp_min(0).sqrt()

    def _read_rows(self, block: SoftmaxBlock, samples: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Compute the figures that need no weights; return the weights (b,H,r,w) of real queries and free memory.

        The free memory has the shape of the weights.
        """
        needs, figures = self.needs, self._figures
        part = (samples, slice(None), rows)
        if "top" in needs:
            figures["top"][part] = block.top
        if "peak" in needs:
            figures["peak"][part] = block.peak()
        if "centred" in needs:
            counts = self.queries.counts
            counts = (counts if counts.shape[0] == 1 else counts[samples])[..., rows].to(self.dtype).clamp_min(1)
            figures["centred"][part] = block.centred(counts)
        if "entropy" in needs:
            figures["entropy"][part] = block.entropy()
        return block.weights(self.queries.valid[samples, :, rows].to(self.dtype)), block.depth

    def _read_weights(
        self, weights: Tensor, spare: Tensor, samples: slice, rows: slice, crossing: Crossing | None
    ) -> None:
        """Compute the figures that need the weights (b,H,r,w); `spare` is memory of the same shape."""
        needs, figures = self.needs, self._figures
        part = (samples, slice(None), rows)
        flat = weights.flatten(2)
        if "columns" in needs:
            figures["columns"][samples, :, : weights.shape[-1]] += weights.sum(-2)
        if "gram" in needs:
            figures["gram"][samples] += torch.bmm(flat, flat.transpose(1, 2))
        if "on_text" in needs and self.reading.text is not None:
            figures["on_text"][part] = weights[..., self.reading.text].sum(-1)
        if "distance" in needs:
            figures["distance"][part] = self._distance(weights, spare, samples, rows)
        if crossing is not None:
            crossing.add(weights, samples, rows)
        # Last, because it sets the weights of the queries' own keys to 0.
        if needs & {"roughness", "descent"}:
            self._read_differences(weights, samples, rows)

    def _positions(self, samples: slice, rows: slice) -> Tensor:
        positions = self.queries.positions
        return positions[samples, rows] if positions.shape[0] > 1 else positions[:, rows]

    def _distance(self, weights: Tensor, spare: Tensor, samples: slice, rows: slice) -> Tensor:
        """Return the mean of |query − key| of each row, (b,H,r), weighted by the attention weights."""
        positions = self._positions(samples, rows)
        keys = torch.arange(weights.shape[-1], device=weights.device)
        distances = (keys - positions[:, None, :, None]).abs().to(self.dtype)
        mass = weights.sum(-1)
        return torch.mul(weights, distances, out=spare).sum(-1) / torch.where(mass > 0, mass, 1)

    def _read_differences(self, weights: Tensor, samples: slice, rows: slice) -> None:
        """Compute the figures of v_i − v_j, setting the weights (b,H,r,w) of the queries' own keys to 0."""
        index = self._positions(samples, rows)[:, None, :, None].expand(*weights.shape[:3], 1)
        weights = without_own(weights, index)
        values, heads = self._values[samples], weights.shape[1]
        groups = values.shape[1]
        own = values[:, :, rows]
        if self.queries.sampled:
            own = values.gather(2, index[:, :1].expand(-1, groups, -1, values.shape[-1]))
        own = own.repeat_interleave(heads // groups, 1) if heads > groups else own
        part = (samples, slice(None), rows)
        if "roughness" in self.needs:
            mixed = weighted_sum(weights, values)
            inner = (own[..., :-2] * mixed[..., :-2]).sum(-1)
            roughness = own[..., -2] * mixed[..., -1] + mixed[..., -2] - 2 * inner
            self._figures["roughness"][part] = roughness.clamp_min(0)
        if "descent" in self.needs:
            self._figures["descent"][part] = self._descents.cosines(weights, own, values, index, samples, rows)
