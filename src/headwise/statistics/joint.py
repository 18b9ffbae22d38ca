"""What passes between the tokens of a text and those of an image, where both attend to each other as one sequence."""

import torch
from torch import Tensor

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally

ONE_KIND = "its tokens are of one kind: there is no text beside an image"


class TextToImageMass(Statistic):
    """Averages Σ_j A_ij over the keys j of the image, for the queries i of the text.

    Joint attention: Esser et al. 2024, arXiv 2403.03206. 0 means that the text reads itself alone, 1 that it reads the
    image alone; uniform weights give the image's share of the tokens.
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

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.text else ONE_KIND

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.on_text, among=1 - _text(rows))


def _text(rows: RowFigures) -> Tensor:
    """Return 1 for a query of the text and 0 for one of the image (T,)."""
    reading = rows.reading
    assert reading.text is not None
    # made on the device, without a copy
    place = torch.arange(reading.queries, device=reading.q.device)
    return ((place >= reading.text.start) & (place < reading.text.stop)).float()
