"""How much attention still mixes different values."""

from torch import Tensor

from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally


class NonlocalFunctional(Statistic):
    """Averages J_i = Σ_j A_ij ‖v_i − v_j‖² over real queries, then over the heads of the layer.

    Nguyen et al. 2023, arXiv 2312.00751 (row-normalised). 0: every token sees only tokens like itself. Computed as ‖v_i‖² + (A‖v‖²)_i
    − 2 v_i·(AV)_i about the mean value and without the key i itself, so that rounding stays below the figure.
    """

    name = "nonlocal_functional"
    unit = "squared units of v"
    reduction = "mean over real queries and heads"
    per = "layer"
    needs = ("roughness",)
    worse = "low"

    def applies(self, facts: SiteFacts) -> str | None:
        return None if facts.self_attention else "v_i − v_j has no meaning when queries and keys are different tokens"

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.roughness)

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().nanmean(0, keepdim=True)
