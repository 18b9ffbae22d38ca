"""The figures of rows and columns from the sums that Triton kernels take, on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from headwise.core.kernels import kernels_run_on
from headwise.core.masked import visible
from headwise.statistics.reading import Queries, Reading
from headwise.statistics.scan import FAR
from headwise.statistics.value_differences import direction, values_about_their_mean

# The figures that the kernels compute.
FIGURES = frozenset({"top", "entropy", "peak", "distance", "roughness", "descent", "centred", "on_text", "columns"})


def by_kernels(reading: Reading, queries: Queries, needs: set[str]) -> dict[str, Tensor]:
    """Return those of the needed figures that kernels compute for this reading, by name; none off CUDA.

    Soft-caps, learned sinks, edits of the logits and logits that need fp64 are left to the PyTorch form.
    """
    plain = reading.softcap is None and reading.sinks is None and reading.edit is None
    if not (plain and needs & FIGURES and kernels_run_on(reading.q.device)):
        return {}
    from headwise.statistics import triton_figures

    if not triton_figures.supports(reading.q, reading.k, reading.v, reading.factor):
        return {}
    return Figures(reading, queries, needs & FIGURES).read()


class Figures:
    """Reader of one reading's figures by `triton_figures`."""

    def __init__(self, reading: Reading, queries: Queries, needs: set[str]) -> None:
        from headwise.statistics import triton_figures

        self.kernels, self.reading, self.queries, self.needs = triton_figures, reading, queries, needs
        self._own = bool(needs & {"roughness", "descent"})
        self.rows = triton_figures.Rows(
            self._at_queries(reading.q),
            reading.k,
            self._mask(),
            queries.positions.int().contiguous(),
            reading.causal,
            reading.factor,
            not queries.sampled,
        )

    def _mask(self) -> Tensor | None:
        whole = None if self.queries.sampled else slice(0, self.reading.queries)
        return self.reading.mask_at(slice(None), self.queries.positions, whole)

    def _at_queries(self, x: Tensor) -> Tensor:
        """Return the rows of x (B,H|Hkv,T,d) at the queries that are read."""
        if not self.queries.sampled:
            return x
        return x.gather(2, self.queries.positions[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))

    def _by_head(self, x: Tensor) -> Tensor:
        repeat = self.reading.heads // x.shape[1]
        return x if repeat == 1 else x.repeat_interleave(repeat, 1)

    def read(self) -> dict[str, Tensor]:
        """Return the needed figures by name, per row (B,H,R) or per key (B,H,N)."""
        reading = self.reading
        values, unit = values_about_their_mean(reading, torch.float32) if self._own else (None, None)
        shift = self._middle() if "centred" in self.needs else None
        rounded = lengths = None
        if values is not None:
            # fp16 has more digits than bf16, and these values are of size 1.
            rounded = values[..., :-2]
            rounded = (rounded if reading.q.dtype == torch.float32 else rounded.half()).contiguous()
            lengths = rounded.float().square().sum(-1)
        sums, mixed = self.kernels.sums(self.rows, rounded, lengths, shift, reading.text)
        self._join(sums, self._own_logits(self.rows.q) if self._own else None)
        figures = self._of_rows(sums, shift)
        if mixed is not None and rounded is not None and lengths is not None and unit is not None:
            own = self._by_head(self._at_queries(torch.cat([rounded.float(), lengths[..., None]], -1)))
            if "roughness" in self.needs:
                figures["roughness"] = self._roughness(own, mixed, sums, self._by_head(unit)[..., 0])
            if "descent" in self.needs:
                figures["descent"] = self._descent(own, mixed, rounded, lengths)
        if "columns" in self.needs:
            valid = self.queries.valid
            total = self.kernels.columns(self.rows, torch.where(valid > 0, self._lse, torch.inf).contiguous())
            figures["columns"] = total / valid.sum(-1).clamp_min(1)[..., None]
        return figures

    def _middle(self) -> Tensor:
        """Return q·k̄ of each row (B,H,R), with k̄ the mean key: near the mean of the row's logits, before the factor."""
        k, real = self.reading.k.float(), self.reading.real_queries
        if real is not None and real.shape[1] == k.shape[2]:
            # Padding may hold any value.
            k = k.masked_fill(~real[:, None, :, None], 0)
        middle = self._by_head(k.mean(2))[..., None]
        return torch.matmul(self.rows.q.float(), middle)[..., 0].nan_to_num(0.0, 0.0, 0.0).contiguous()

    def _own_logits(self, q: Tensor) -> Tensor:
        """Return the logit of each query's own key, (B,H,R), FAR where it is forbidden."""
        own = (q.float() * self._by_head(self._at_queries(self.reading.k)).float()).sum(-1) * self.reading.factor
        mask = self.rows.mask
        if mask is None:
            return own
        rows, positions = own.shape[2], self.queries.positions
        batch = max(mask.shape[0], positions.shape[0])
        index = positions[:, None, :, None].expand(batch, mask.shape[1], rows, 1)
        at_own = mask.expand(batch, -1, rows, -1).gather(3, index)[..., 0]
        if mask.dtype != torch.bool:
            own = own + at_own.float()
        return torch.where(visible(at_own), own, FAR)

    def _join(self, sums: dict[str, Tensor], own: Tensor | None) -> None:
        """Keep the log-sum-exp of each row, the own key included, and the margin of the other keys over it."""
        log_total = sums["total"].log()
        others = torch.where(sums["total"] > 0, sums["top"] * self.reading.factor + log_total, FAR)
        self._own_logit, self._log_total = own, torch.where(sums["total"] > 0, log_total, 0.0)
        self._lse, self._margin, self._share = others, None, None
        if own is not None:
            self._margin = others - own
            self._lse, self._share = torch.logaddexp(others, own), self._margin.sigmoid()

    def _of_rows(self, sums: dict[str, Tensor], shift: Tensor | None) -> dict[str, Tensor]:
        factor, total = self.reading.factor, sums["total"].clamp_min(torch.finfo(torch.float32).tiny)
        top = sums["top"] * factor
        # In nats; the kernel counts in log2.
        entropy = (self._log_total - 0.6931471805599453 * sums["fall"] / total).clamp_min(0)
        distance, text = sums["distance"] / total, sums["text"] / total
        first, squares = sums["sum"], sums["squares"]
        if self._own_logit is not None and self._margin is not None and self._share is not None:
            top = torch.maximum(top, self._own_logit)
            # The entropy of the choice between the own key and the others, and that among these.
            against, alone = softplus(-self._margin), softplus(self._margin)
            entropy = self._share * (entropy + against) + (-self._margin).sigmoid() * alone
            distance, text = distance * self._share, text * self._share + self._own_in_text()
            if shift is not None:
                seen = self._own_logit > FAR / 2
                own = torch.where(seen, self._own_logit / factor - shift, 0.0)
                first, squares = first + own, squares + own.square()
        counts = self.queries.counts.clamp_min(1)
        figures = {"top": top, "entropy": entropy, "peak": (top - self._lse).exp(), "distance": distance}
        if shift is not None:
            figures["centred"] = factor * (squares - first.square() / counts).clamp_min(0).sqrt()
        if self.reading.text is not None:
            figures["on_text"] = text
        return {name: figure for name, figure in figures.items() if name in self.needs}

    def _own_in_text(self) -> Tensor | float:
        """Return the weight of the own key where it belongs to the text, (B,H,R), else 0."""
        text = self.reading.text
        if text is None or self._margin is None:
            return 0.0
        positions = self.queries.positions[:, None]
        return (-self._margin).sigmoid() * ((positions >= text.start) & (positions < text.stop))

    def _roughness(self, own: Tensor, mixed: Tensor, sums: dict[str, Tensor], unit: Tensor) -> Tensor:
        """Return Σ_j A_ij ‖v_i − v_j‖² (B,H,R) of values `own` (B,H,R,dv+1), followed by their squared norms."""
        weight = sums["weight"].clamp_min(torch.finfo(torch.float32).tiny)
        squares = own[..., -1] + sums["lengths"] / weight - 2 * (own[..., :-1] * mixed).sum(-1)
        assert self._share is not None
        return self._share * unit * squares.clamp_min(0) * unit

    def _descent(self, own: Tensor, mixed: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Return the cosines of Σ_j A_ij (v_i − v_j) under the layer's softmax and one whose queries are the keys."""
        keys = self._by_head(self._at_queries(self.reading.k))
        rows = self.rows
        symmetric = self.kernels.Rows(keys, rows.k, rows.mask, rows.positions, rows.causal, rows.scale, rows.ordered)
        _, under_keys = self.kernels.sums(symmetric, values, lengths, None, None)
        assert under_keys is not None
        one = torch.ones_like(own[..., :1])
        first, second = (
            direction(torch.cat([own, one], -1), torch.cat([x, one, one], -1)) for x in (mixed, under_keys)
        )
        return (first * second).sum(-1).clamp(-1, 1)
