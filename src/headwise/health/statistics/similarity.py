"""The similarity of tokens before attention and in the residual stream, and of attention maps."""

from typing import ClassVar

import torch
from torch import Tensor

from headwise.health.statistics.figures_by_kernels import of_tokens
from headwise.health.statistics.reading import Reading
from headwise.health.statistics.statistic import OfLayer, RowFigures, SiteFacts, Statistic, Tally
from headwise.numerics.medians import row_medians
from headwise.numerics.precision import directions, magnitude


class HeadRedundancy(Statistic):
    """Averages the cosine of a head's flattened attention map with those of the other heads of its layer.

    Per sample ⟨A_h, A_g⟩ / (‖A_h‖‖A_g‖) over real queries, averaged over samples and the other heads; its mean over
    heads is the mean over pairs. 1: all heads have the same map. The inner products are summed block by block.
    """

    name = "head_redundancy"
    unit = "cosine"
    reduction = "mean over samples and other heads"
    needs = ("likeness",)
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return "the layer has one head, which has no pair" if facts.heads < 2 else None

    def tally(self, rows: RowFigures) -> Tally:
        cosine = rows.likeness
        others = (cosine.sum(-1) - cosine.diagonal(dim1=1, dim2=2)) / (rows.reading.heads - 1)
        return Tally.over_samples(others.float(), rows.queries.sampled)


class OfLayerBefore(Statistic):
    """A statistic of the cosines of a layer's maps with those of the layer before."""

    unit = "cosine"
    needs = ("crossing",)
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        if facts.windowed:
            return "windows hold other tokens in the next layer"
        return None if facts.previous else "no layer before it attends from the same queries to as many keys"

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (heads, heads_before)

    def tally(self, rows: RowFigures) -> Tally:
        return Tally.over_samples(rows.crossing.float(), rows.queries.sampled)


class LayerRedundancy(OfLayerBefore):
    """Finds, for each head, the largest cosine of its map with a map of the layer before.

    The cosines of all H×H' pairs are averaged over samples before the best match is chosen. 1: the layer repeats the
    maps of the one before (Bhojanapalli et al. 2021, arXiv 2110.06821, reuse maps for this reason);
    `layer_redundancy_mean` averages over all pairs.
    """

    name = "layer_redundancy"
    reduction = "mean over samples, maximum over heads of the layer before"

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().amax(-1)


class LayerRedundancyMean(OfLayerBefore):
    """Averages, for each head, the cosines of its map with all maps of the layer before.

    Its mean over heads is the mean over all H×H' pairs, as in Bhojanapalli et al. 2021, arXiv 2110.06821;
    `layer_redundancy` is that of the best match. 1: all heads of both layers have the same map.
    """

    name = "layer_redundancy_mean"
    reduction = "mean over samples and heads of the layer before"

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().mean(-1)


NO_INPUT = "the host does not show what enters the layer"
NO_STREAM = "the host does not show the residual stream"


class OfTokens(OfLayer):
    """A statistic of the tokens (B,T,C) that enter attention or a block, or that leave the last block."""

    # The name of the tokens in a reading: "hidden", "stream" or "final".
    at: ClassVar[str]

    def applies(self, facts: SiteFacts) -> str | None:
        if getattr(facts, self.at):
            return None
        return NO_INPUT if self.at == "hidden" else facts.stream_obstacle or NO_STREAM

    def tokens(self, reading: Reading) -> Tensor:
        return reading.given(getattr(reading, self.at))


class OfCosines(OfTokens):
    """The mean cosine between all pairs of different real tokens, in O(T·C)."""

    unit = "cosine"
    reduction = "mean over pairs of tokens, then over samples"
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        reading, tokens = rows.reading, self.tokens(rows.reading)
        if (found := of_tokens(reading, tokens)) is not None:
            return Tally.over_samples(found[0][:, None])
        # (‖Σ x̂_i‖² − T) / (T(T − 1))
        unit = directions(reading.without_padding(tokens))
        together = unit.sum(1).square().sum(-1)
        # Zero tokens add nothing to either sum.
        alone = torch.linalg.vector_norm(unit, dim=(1, 2)).square()
        if reading.real_queries is None:
            pairs = tokens.shape[1] * (tokens.shape[1] - 1)
            return Tally.over_samples(((together - alone) / (pairs or torch.nan))[:, None])
        count = reading.real_of(tokens).sum(-1)
        mean = (together - alone) / (count * (count - 1))
        return Tally.over_samples(torch.where(count > 1, mean, torch.nan)[:, None])


class OfHighFrequency(OfTokens):
    """‖x − mean of tokens‖_F / ‖x‖_F for the real tokens."""

    unit = "ratio"
    reduction = "mean over samples"
    worse = "low"

    def tally(self, rows: RowFigures) -> Tally:
        reading, tokens = rows.reading, self.tokens(rows.reading)
        if (found := of_tokens(reading, tokens)) is not None:
            return Tally.over_samples(found[1][:, None])
        x, padded = reading.without_padding(tokens), reading.real_queries is not None
        x = x / magnitude(x, (1, 2))
        real = reading.real_of(tokens) if padded else None
        mean = (
            x.mean(1, keepdim=True)
            if real is None
            else x.sum(1, keepdim=True) / real.sum(-1).clamp_min(1)[:, None, None]
        )
        whole = torch.linalg.vector_norm(x, dim=(1, 2))
        x -= mean
        if real is not None:
            x *= real[..., None]
        rest = torch.linalg.vector_norm(x, dim=(1, 2))
        return Tally.over_samples(torch.where(whole > 0, rest / whole, torch.nan)[:, None])


class TokenCosine(OfCosines):
    """Averages the cosine between all pairs of different real tokens that enter attention.

    With a norm before attention these are the normed tokens; `stream_cosine` reads the residual stream, like the
    paper's figure (Wang et al. 2022, arXiv 2203.05962). A diagnosis, not a measure of quality: there are models with a
    higher cosine and a lower loss (arXiv 2601.08131).
    """

    name = "token_cosine"
    at = "hidden"


class HighFrequency(OfHighFrequency):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that enter attention.

    With a norm before attention these are the normed tokens; `stream_high_frequency` reads the residual stream. Wang et
    al. 2022, arXiv 2203.05962: attention is a low-pass filter, and this is the part of higher frequency that is left.
    0: all tokens are the same.
    """

    name = "high_frequency"
    at = "hidden"


class StreamCosine(OfCosines):
    """Averages the cosine between all pairs of different real tokens of the residual stream that enters the block.

    Attention's branch is added to this stream; it is read before any norm of the block, as in Wang et al. 2022, arXiv
    2203.05962. `final_cosine` reads it after the last block, `token_cosine` the input of attention itself.
    """

    name = "stream_cosine"
    at = "stream"


class StreamHighFrequency(OfHighFrequency):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens of the residual stream that enters the layer's block.

    Wang et al. 2022, arXiv 2203.05962. `final_high_frequency` reads it after the last block, `high_frequency` the input
    of attention itself.
    """

    name = "stream_high_frequency"
    at = "stream"


class FinalCosine(OfCosines):
    """Averages the cosine between all pairs of different real tokens that leave the last block of a stack.

    The last point of the curve of `stream_cosine`, before any norm after the stack: Wang et al. 2022, arXiv 2203.05962.
    Read only at the last attention layer: the output of any other block is the input of the next one.
    """

    name = "final_cosine"
    at = "final"


class FinalHighFrequency(OfHighFrequency):
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens that leave the last block of a stack.

    The last point of the curve of `stream_high_frequency`, before any norm after the stack: Wang et al. 2022, arXiv
    2203.05962.
    """

    name = "final_high_frequency"
    at = "final"


class MassiveActivations(OfTokens):
    """Divides the largest |x| of a sample's residual stream by its median |x|, where it enters the layer's block.

    Sun et al. 2024, arXiv 2402.17762, call an activation massive if it is above 100 and about a thousand times the
    median. The median is over the real tokens, and for an even count the lower of the two middle numbers. Samples with
    median 0 are left out.
    """

    name = "massive_activations"
    unit = "largest over median"
    reduction = "maximum over samples"
    worse = "high"
    at = "stream"

    def tally(self, rows: RowFigures) -> Tally:
        reading = rows.reading
        stream, real = self.tokens(reading), reading.real_queries
        found = None if real is not None else of_tokens(reading, stream)
        if found is not None:
            # torch's median of the rows of a matrix is one block's work for each row on CUDA.
            most, median = found[2], row_medians(stream.abs().flatten(1))
        else:
            size = stream.abs()
            largest = size
            if real is not None:
                largest = size.masked_fill(~real[..., None], 0)
                size = size.masked_fill(~real[..., None], torch.nan)
            # The median in the stream's own dtype converts exactly to fp32. It is NaN if all tokens are padding.
            median = size.flatten(1).nanmedian(-1).values.float()
            most = largest.flatten(1).amax(-1).float()
        # A ratio of finite numbers is finite: infinity means a divergence.
        ratio = torch.where(most.isfinite(), (most / median).clamp(max=torch.finfo(most.dtype).max), most / median)
        # NaN of real tokens comes from diverged activations and is kept.
        known = (median > 0) | (ratio.isnan() if real is None else ratio.isnan() & real.any(-1))
        return Tally.extremum(torch.where(known, ratio, -torch.inf).amax(0, keepdim=True), "max", False)
