"""The figures of every row of attention, found in one pass that never holds the T×N matrix."""

from collections.abc import Collection

import torch
from torch import Tensor

from headwise.statistics.queries import Queries
from headwise.statistics.reading import Reading
from headwise.statistics.scan import Logits, block_size, blocks, precise_dtype
from headwise.statistics.tally import Tally


class Rows:
    """Holds what one pass found: per row (B,H,R), per key (B,H,N), or between heads (B,H,H').

    `top` largest logit of a row; `entropy` in nats; `peak` largest weight; `distance` mean |query − key| in tokens; `roughness`
    Σ_j A_ij ‖v_i − v_j‖²; `centred` the norm of the logits about their mean; `columns` the mean weight of each key; `gram`
    inner products of the maps of two heads; `crossing` their cosines with the maps of the layer before.
    """

    def __init__(
        self,
        reading: Reading,
        needs: Collection[str],
        queries: Queries | None = None,
        previous: Reading | None = None,
    ) -> None:
        self.reading, self.previous = reading, previous
        self.queries = queries if queries is not None else Queries.of(reading)
        self.needs = set(needs) - (set() if previous is not None else {"crossing"})
        self._found: dict[str, Tensor] = {}
        device = reading.q.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            self._scan()

    def __getattr__(self, name: str) -> Tensor:
        found = self.__dict__.get("_found", {})
        if name not in found:
            raise AttributeError(f"this pass did not look for {name!r}; it found {sorted(found)}")
        return found[name]

    @property
    def columns_of_softmax(self) -> int:
        """Counts the columns a softmax has beside the keys: the learned sink, where there is one."""
        return 0 if self.reading.sinks is None else 1

    def mean(self, values: Tensor, least: int = 1) -> Tally:
        """Averages `values` (B,H,R) over real queries that divide their weight among at least `least` columns."""
        return self.queries.mean(values, least, self.columns_of_softmax)

    def extremum(self, values: Tensor, kind: str, least: int = 1) -> Tally:
        """Takes the largest or smallest of `values` (B,H,R) over the same queries."""
        return self.queries.extremum(values, kind, least, self.columns_of_softmax)

    def _scan(self) -> None:
        reading, queries = self.reading, self.queries
        size = queries.valid.shape[-1]
        self.dtype = precise_dtype(reading)
        if "crossing" in self.needs and precise_dtype(self.previous) == torch.float64:
            self.dtype = torch.float64
        if not self.needs or not size or not reading.batch:
            return
        elements, memories = block_size(reading, size), 2
        if "crossing" in self.needs:
            elements, memories = -(-elements // reading.heads) * max(reading.heads, self.previous.heads), 3
        self._scratch = [torch.empty(elements, dtype=self.dtype, device=reading.q.device) for _ in range(memories)]
        self._logits = Logits(reading, queries, self.dtype)
        if "crossing" in self.needs:
            self._before = Logits(self.previous, queries, self.dtype)
        self._prepare(size)
        for samples, rows in blocks(reading, size):
            self._read_block(samples, rows)
        self._close()
        del self._scratch, self._logits

    def _prepare(self, size: int) -> None:
        reading = self.reading
        shapes = dict.fromkeys(("top", "entropy", "peak", "distance", "roughness", "centred"), (size,))
        shapes |= {"columns": (reading.keys,), "gram": (reading.heads,)}
        if "crossing" in self.needs:
            shapes |= {"crossing": (self.previous.heads,)}
        for name in self.needs:
            shape = (reading.batch, reading.heads, *shapes[name])
            self._found[name] = torch.zeros(shape, dtype=self.dtype, device=reading.q.device)
        if "crossing" in self.needs:
            self._squares = [
                torch.zeros(reading.batch, r.heads, dtype=self.dtype, device=reading.q.device)
                for r in (reading, self.previous)
            ]
        # Sums over keys cost as much as a row of logits has numbers when there are as few keys as dimensions.
        if "centred" in self.needs and reading.keeps_rows_alike and reading.keys > 2 * reading.q.shape[-1]:
            self._found["centred"] = self._centred_from_keys()
            self.needs.discard("centred")
        if "roughness" in self.needs:
            self._values = self._values_about_their_mean()

    def _values_about_their_mean(self) -> Tensor:
        """Stacks v − mean, its squared norm and a one (B,H|Hkv,N,dv+2); J does not change with the mean, rounding does."""
        v = self.reading.v.to(self.dtype)
        v = v - v.mean(2, keepdim=True)
        square = v.square().sum(-1, keepdim=True)
        return torch.cat([v, square, torch.ones_like(square)], -1)

    def _centred_from_keys(self) -> Tensor:
        """Finds the centred norm of every row from sums over the keys alone: ‖(K − k̄) q‖, with no row of logits."""
        reading, heads = self.reading, self.reading.heads
        k = self._logits.k
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
        q = self._logits.q.to(self.dtype) * reading.scale
        square = (torch.matmul(q, gram) * q).sum(-1)
        if reading.sinks is not None:
            mean = torch.matmul(q, middle.repeat_interleave(repeat, 1).transpose(2, 3)).squeeze(-1)
            count = count[..., 0]
            square = square + count / (count + 1) * (mean - reading.sinks.to(self.dtype)[:, None]).square()
        return square.clamp_min(0).sqrt()

    def _softmax(self, logits: Logits, samples: slice, rows: slice, scratch: Tensor) -> tuple[Tensor, ...]:
        """Returns (s − level, exp(s − level), level, top, sum over columns, sink's logit − level, allowed), in given memory."""
        sinks = logits.reading.sinks
        scores, seen = logits.block(samples, rows, self._scratch[0])
        top = level = scores.amax(-1)
        if sinks is not None:
            level = torch.maximum(top, sinks.to(self.dtype)[:, None])
        depth = scores.sub_(level[..., None])
        powers = torch.exp(depth, out=scratch[: depth.numel()].view(depth.shape))
        mass = powers.sum(-1)
        beyond = None if sinks is None else sinks.to(self.dtype)[:, None] - level
        total = mass if beyond is None else mass + beyond.exp()
        return depth, powers, level, top, total, beyond, seen

    def _read_block(self, samples: slice, rows: slice) -> None:
        needs, found = self.needs, self._found
        depth, powers, level, top, total, beyond, seen = self._softmax(self._logits, samples, rows, self._scratch[1])
        part = (samples, slice(None), rows)
        if "top" in needs:
            found["top"][part] = top
        if "peak" in needs:
            found["peak"][part] = (top - level).exp() / total
        if "centred" in needs:
            found["centred"][part] = self._centred(depth, seen, samples, rows, beyond)
        if "entropy" in needs:
            fall = depth.mul_(powers).sum(-1)
            if beyond is not None:
                fall = fall + beyond.exp() * beyond
            found["entropy"][part] = (total.log() - fall / total).clamp_min(0)
        valid = self.queries.valid[samples, :, rows].to(self.dtype)
        weights = powers.mul_((valid / total)[..., None])
        self._read_weights(weights, depth, samples, rows)

    def _centred(
        self, depth: Tensor, seen: Tensor | None, samples: slice, rows: slice, beyond: Tensor | None
    ) -> Tensor:
        counts = self.queries.counts
        counts = (counts if counts.shape[0] == 1 else counts[samples])[..., rows].to(self.dtype).clamp_min(1)
        # Forbidden keys hold FAR: times zero they vanish before the mean and again after it.
        kept = depth if seen is None else depth * seen
        mean = kept.sum(-1) / counts
        about = kept - mean[..., None] if seen is None else kept.sub_(mean[..., None]).mul_(seen)
        size = torch.linalg.vector_norm(about, dim=-1)
        if beyond is None:
            return size
        return (size.square() + counts / (counts + 1) * (mean - beyond).square()).sqrt()

    def _read_weights(self, weights: Tensor, spare: Tensor, samples: slice, rows: slice) -> None:
        """Reads the figures that need the weights themselves (b,H,r,w); `spare` is memory of the same shape."""
        needs, found = self.needs, self._found
        part = (samples, slice(None), rows)
        flat = weights.flatten(2)
        if "columns" in needs:
            found["columns"][samples, :, : weights.shape[-1]] += weights.sum(-2)
        if "gram" in needs:
            found["gram"][samples] += torch.bmm(flat, flat.transpose(1, 2))
        if "distance" in needs:
            found["distance"][part] = self._distance(weights, spare, samples, rows)
        if "crossing" in needs:
            self._cross(weights, samples, rows)
        if "roughness" in needs:
            found["roughness"][part] = self._roughness(weights, samples, rows)

    def _positions(self, samples: slice, rows: slice) -> Tensor:
        positions = self.queries.positions
        return positions[samples, rows] if positions.shape[0] > 1 else positions[:, rows]

    def _distance(self, weights: Tensor, spare: Tensor, samples: slice, rows: slice) -> Tensor:
        """Averages |query − key| by the weight on keys; counted from the block's first row, so that rounding stays small."""
        positions = self._positions(samples, rows)
        keys = torch.arange(weights.shape[-1], device=weights.device)
        away = (keys - positions[:, None, :, None]).abs().to(self.dtype)
        mass = weights.sum(-1)
        return torch.mul(weights, away, out=spare).sum(-1) / torch.where(mass > 0, mass, 1)

    def _roughness(self, weights: Tensor, samples: slice, rows: slice) -> Tensor:
        positions = self._positions(samples, rows)
        index = positions[:, None, :, None].expand(*weights.shape[:3], 1)
        # A key equal to its query adds nothing; left in, it would cancel only up to rounding.
        weights.scatter_(-1, index, 0.0)
        b, heads, r, w = weights.shape
        values = self._values[samples]
        groups = values.shape[1]
        mixed = torch.bmm(weights.view(b * groups, -1, w), values[:, :, :w].reshape(b * groups, w, -1))
        mixed = mixed.view(b, heads, r, -1)
        own = values[:, :, rows]
        if self.queries.sampled:
            own = values.gather(2, index[:, :1].expand(-1, groups, -1, values.shape[-1]))
        own = own.repeat_interleave(heads // groups, 1) if heads > groups else own
        inner = (own[..., :-2] * mixed[..., :-2]).sum(-1)
        return (own[..., -2] * mixed[..., -1] + mixed[..., -2] - 2 * inner).clamp_min(0)

    def _cross(self, weights: Tensor, samples: slice, rows: slice) -> None:
        """Adds inner products with the maps of the layer before, made again from its queries and keys."""
        _, powers, _, _, total, _, _ = self._softmax(self._before, samples, rows, self._scratch[2])
        valid = self.queries.valid[samples, :, rows].amax(1, keepdim=True).to(self.dtype)
        before = powers.mul_((valid / total)[..., None])
        width = min(weights.shape[-1], before.shape[-1])
        here, before = weights[..., :width].flatten(2), before[..., :width].flatten(2)
        self._found["crossing"][samples] += torch.bmm(here, before.transpose(1, 2))
        self._squares[0][samples] += torch.linalg.vector_norm(here, dim=-1).square()
        self._squares[1][samples] += torch.linalg.vector_norm(before, dim=-1).square()

    def _close(self) -> None:
        found = self._found
        if "columns" in self.needs:
            found["columns"] /= self.queries.valid.sum(-1).clamp_min(1)[..., None]
        if "crossing" in self.needs:
            here, before = self._squares
            found["crossing"] /= (here[:, :, None] * before[:, None]).sqrt()
