"""Remedies: what helps against each alert, and who showed it."""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """What helps, and who showed it."""

    text: str
    source: str


REMEDIES = {
    "entropy_collapse": Remedy(
        "SigmaReparam or QKNorm bound it; a lower learning rate or a longer warm-up delays it",
        "Zhai et al. 2023, arXiv 2303.06296; Dehghani et al. 2023, arXiv 2302.05442",
    ),
    "logit_growth": Remedy(
        "QKNorm, QKClip or SigmaReparam bound the logits; SoftCap does, and does not prevent collapse",
        "Dehghani et al. 2023, arXiv 2302.05442; Kimi K2 2025, arXiv 2507.20534",
    ),
    "over_smoothing": Remedy(
        "NeuTRENO, AttnScale or FeatScale keep tokens apart; a high cosine is a diagnosis and no score of quality",
        "Nguyen et al. 2023, arXiv 2312.00751; Wang et al. 2022, arXiv 2203.05962",
    ),
    "rank_collapse": Remedy(
        "NeuTRENO or ValueResidual carry early values on; check that skip connections are in place",
        "Dong et al. 2021, arXiv 2103.03404; Zhou et al. 2024, arXiv 2410.17897",
    ),
    "low_rank": Remedy(
        "weight decay on queries, keys, values and output lowers their rank: give them a smaller one (parameter_groups)",
        "Kobayashi et al. 2024, arXiv 2410.23819",
    ),
    "not_finite": Remedy(
        "the training diverged: go back to an earlier checkpoint with a lower learning rate or clipped gradients; QKNorm or SigmaReparam "
        "bound the logits from there",
        "Zhai et al. 2023, arXiv 2303.06296; Dehghani et al. 2023, arXiv 2302.05442",
    ),
    "dead_head": Remedy(
        "the head can be pruned, or DropHead spreads the work over heads in the next run",
        "Michel et al. 2019, arXiv 1905.10650; Zhou et al. 2020, arXiv 2004.13342",
    ),
    "redundancy": Remedy(
        "Disagreement or DropHead push heads apart",
        "Li et al. 2018, arXiv 1810.10183; Zhou et al. 2020, arXiv 2004.13342",
    ),
}
