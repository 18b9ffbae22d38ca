"""How far the entropy of a head could fall, from its weights and inputs."""

import torch

from headwise.statistics.floor import entropy_floor, largest_eigenvalue
from headwise.statistics.reading import SiteFacts
from headwise.statistics.row_figures import RowFigures
from headwise.statistics.statistic import Statistic
from headwise.statistics.tally import Tally

# Gram matrices up to this size are decomposed; of larger ones the Frobenius norm is taken, a looser and still valid bound.
LARGEST_GRAM = 1024


class EntropyFloorSpectral(Statistic):
    """Averages the floor of Theorem 3.1 at σ = scale · ‖W_K W_Qᵀ‖₂ · ‖X Xᵀ‖₂ over real queries, X the real tokens.

    Zhai et al. 2023, arXiv 2303.06296. Causal and masked rows count their own keys. Almost vacuous at real sizes: it is the theorem's own
    form, shown beside the centred one. It needs logits that are scale · x_i W_Qᵀ W_K x_j and nothing else.
    """

    name = "entropy_floor_spectral"
    unit = "nats"
    reduction = "mean over real queries with a key"

    def applies(self, facts: SiteFacts) -> str | None:
        if not facts.self_attention:
            return "the theorem is about one sequence that attends to itself"
        if facts.product_obstacle is not None:
            return f"logits are not x W_Qᵀ W_K x: {facts.product_obstacle}"
        if facts.bias or facts.sinks:
            return "logits are not x W_Qᵀ W_K x: " + ("a bias is added" if facts.bias else "a learned sink is added")
        if not facts.hidden:
            return "the host does not show what enters the layer"
        return None if facts.product_norm else "the query and key weights of the heads were not found"

    def tally(self, rows: RowFigures) -> Tally:
        reading, queries = rows.reading, rows.queries
        x = reading.without_padding(reading.given(reading.hidden))
        gram = torch.bmm(x, x.transpose(1, 2)) if x.shape[1] <= x.shape[2] else torch.bmm(x.transpose(1, 2), x)
        largest = largest_eigenvalue(gram) if gram.shape[-1] <= LARGEST_GRAM else torch.linalg.matrix_norm(gram)
        size = abs(reading.factor) * reading.given(reading.product_norm).float() * largest[:, None]
        return queries.mean(entropy_floor(size[..., None], queries.counts.expand(reading.batch, reading.heads, -1)))
