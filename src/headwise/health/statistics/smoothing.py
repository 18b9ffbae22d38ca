"""The nonlocal functional that attention lowers, and the agreement of its two gradients."""

from torch import Tensor

from headwise.health.statistics.statistic import RowFigures, Statistic, Tally


class NonlocalFunctional(Statistic):
    """Averages J_i = Σ_j A_ij ‖v_i − v_j‖² over real queries, then over the heads of the layer.

    Nguyen et al. 2023, arXiv 2312.00751 (row-normalised). 0: every token attends only to tokens equal to itself.
    Computed as ‖v_i‖² + (A‖v‖²)_i − 2 v_i·(AV)_i with values centred about their mean and without the key i itself,
    which keeps rounding errors small.
    """

    name = "nonlocal_functional"
    unit = "squared units of v"
    reduction = "mean over real queries and heads"
    per = "layer"
    needs = ("roughness",)
    worse = "low"
    requires = ("self_attention", "v_i − v_j has no meaning when queries and keys are different tokens")

    def tally(self, rows: RowFigures) -> Tally:
        return rows.mean(rows.roughness)

    def finish(self, tally: Tally) -> Tensor:
        return tally.value().nanmean(0, keepdim=True)


class GradientCosine(Statistic):
    """Averages cos(∇J_sym, ∇J_asym) over real queries: whether a step of attention lowers the nonlocal functional J.

    Nguyen et al. 2023, arXiv 2312.00751, Table 4 and appendix E.1. J(u) = ½ Σ_ij k_ij ‖u_i − u_j‖² with the symmetric
    kernel K_ij = k_ij + k_ji has ∂J/∂u_i = Σ_j K_ij (u_i − u_j). At u = v, with K_ij = exp(k_iᵀk_j·scale), this is the
    symmetric gradient; with exp(q_iᵀk_j·scale) instead, it is the asymmetric one, along whose negative attention takes
    its step: divided by the row sum of its kernel it is v_i − (AV)_i. A positive factor per row does not change the
    cosine, so both are computed with normalised rows. 1: attention moves each value along the negative gradient of J;
    0: orthogonally to it. In a layer that uses its queries as keys it is 1 by definition. A query that sees only equal
    values does not move and counts as 0.
    """

    name = "gradient_cosine"
    unit = "cosine"
    reduction = "mean over real queries with two keys or more"
    needs = ("descent",)
    requires = ("self_attention", "v_i − v_j has no meaning when queries and keys are different tokens")

    def tally(self, rows: RowFigures) -> Tally:
        # A learned sink does not count as a key, because it has no value.
        return rows.queries.mean(rows.descent, least_keys=2)
