"""How far the largest number of the residual stream stands out."""

import torch

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.similarity import NO_STREAM
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class MassiveActivations(Statistic):
    """Divides the largest |x| of a sample's residual stream by its median |x|, where it enters the layer's block.

    Sun et al. 2024, arXiv 2402.17762, who call an activation massive that is above 100 and about a thousand times the
    median. The median is that of the real tokens' numbers, the lower one of two in the middle. A sample whose median is
    zero has no such figure.
    """

    name = "massive_activations"
    unit = "largest over median"
    reduction = "maximum over samples"
    per = "layer"
    worse = "high"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.stream else facts.stream_obstacle or NO_STREAM

    def shape(self, heads: int, heads_before: int) -> tuple[int, ...]:
        return (1,)

    def tally(self, rows: RowFigures) -> Tally:
        reading = rows.reading
        size = reading.given(reading.stream).abs()
        largest = size
        if (real := reading.real_queries) is not None:
            largest = size.masked_fill(~real[..., None], 0)
            size = size.masked_fill(~real[..., None], torch.nan)
        # in the stream's own precision, of which fp32 holds every number; NaN stands for padding alone, or for what
        # diverged
        median = size.flatten(1).nanmedian(-1).values.float()
        found = largest.flatten(1).amax(-1).float() / median
        known = (median > 0) | found.isnan() & ~median.isnan()
        return Tally.extremum(torch.where(known, found, -torch.inf).amax(0, keepdim=True), "max", False)
