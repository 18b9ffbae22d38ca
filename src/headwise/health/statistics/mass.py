"""The distribution of attention weight: on sinks, on single keys, over distance, between text and image."""

import torch
from torch import Tensor

from headwise.health.statistics.statistic import RowFigures, SiteFacts, Statistic, Tally

ONE_KIND = "its tokens are of one kind: there is no text in addition to an image"


class TextToImageMass(Statistic):
    """Averages Σ_j A_ij over the keys j of the image, for the queries i of the text.

    Joint attention: Esser et al. 2024, arXiv 2403.03206. 0 means that the text attends only to itself, 1 that it
    attends only to the image; uniform weights give the image's share of the tokens.
    """

    name = "text_to_image_mass"
    unit = "share of weight"
    reduction = "mean over real queries of the text"
    needs = ("on_text",)

    def applies(self, facts: SiteFacts) -> str | None:
        if facts.sinks:
            return "a learned sink takes weight that is neither the text's nor the image's"
        return None if facts.text else ONE_KIND

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(1 - rows.on_text, among=_text(rows))


class ImageToTextMass(Statistic):
    """Averages Σ_j A_ij over the keys j of the text, for the queries i of the image.

    Joint attention: Esser et al. 2024, arXiv 2403.03206. 0 means that the text has no effect on the image in this head;
    uniform weights give the text's share of the tokens.
    """

    name = "image_to_text_mass"
    unit = "share of weight"
    reduction = "mean over real queries of the image"
    needs = ("on_text",)
    requires = ("text", ONE_KIND)

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.on_text, among=1 - _text(rows))


def _text(rows: RowFigures) -> Tensor:
    """Return 1 for text queries and 0 for image queries, (1,T)."""
    reading = rows.reading
    assert reading.text is not None
    # Computed on the device, without a copy.
    position = torch.arange(reading.queries, device=reading.q.device)[None]
    return ((position >= reading.text.start) & (position < reading.text.stop)).float()


class SinkMass(Statistic):
    """Averages max_j mean_i A_ij, the mean weight of the key that receives most, over samples.

    Attention sinks: Xiao et al. 2023, arXiv 2309.17453. 1/N is the minimum (no sink); 1 means that all queries attend
    to the same key. With sampled queries it is that of the sample, and its record is marked `sampled`.
    """

    name = "sink_mass"
    unit = "share of weight"
    reduction = "mean over samples"
    needs = ("columns",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        largest = rows.columns.amax(-1).masked_fill(rows.queries.none_read, torch.nan)
        return Tally.over_samples(largest.float(), rows.queries.sampled)


PEAK = 0.9


class PeakedRows(Statistic):
    """Computes the share of real queries whose largest weight exceeds 0.9.

    Queries with one key are left out, because its weight is always 1, unless a learned sink competes with it.
    """

    name = "peaked_rows"
    unit = "share of queries"
    reduction = "mean over real queries with at least two keys"
    needs = ("peak",)
    worse = "high"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean((rows.peak > PEAK).float(), least=2)


class AttentionDistance(Statistic):
    """Averages Σ_j A_ij |i − j| over real queries, in tokens of the sequence as the layer sees it.

    Dosovitskiy et al. 2021, arXiv 2010.11929, for images. Here the distance of patches is that in the sequence,
    including a class token, because the grid is unknown at a site. The weight of a learned sink is left out, and the
    rest is normalised to 1.
    """

    name = "attention_distance"
    unit = "tokens"
    reduction = "mean over real queries with a key"
    needs = ("distance",)
    requires = ("self_attention", "queries and keys are different tokens, with no distance between them")

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.distance)
