"""Weight statistics: figures of the products W_KᵀW_Q and W_OW_V of each head, from weights alone."""

import torch
from torch import Tensor

from headwise.health.statistics.weights.balance import Imbalance, NuclearGap
from headwise.health.statistics.weights.grams import Grams, grams_of, read_together
from headwise.health.statistics.weights.product import Product, WeightStatistic
from headwise.health.statistics.weights.ranks import (
    AlphaHill,
    EffectiveRank,
    FrobeniusNorm,
    NuclearNorm,
    PseudoRank,
    RankGap,
    SpectralNorm,
    StableRank,
)
from headwise.health.statistics.weights.weight_reading import WeightReading, weight_reading

# The registry, used by tests, tables and the audit.
WEIGHT_STATISTICS: dict[str, type[WeightStatistic]] = {
    kind.name: kind
    for kind in (
        SpectralNorm,
        FrobeniusNorm,
        NuclearNorm,
        StableRank,
        EffectiveRank,
        PseudoRank,
        RankGap,
        AlphaHill,
        Imbalance,
        NuclearGap,
    )
}

__all__ = [
    "WEIGHT_STATISTICS",
    "Grams",
    "Product",
    "WeightReading",
    "WeightStatistic",
    "grams_of",
    "read_together",
    "read_weights",
    "weight_reading",
    "weight_reasons",
]


def read_weights(reading: WeightReading) -> dict[str, Tensor]:
    """Return all figures that apply: "<statistic>_qk" and "<statistic>_vo", each (H,), or (G,) per group."""
    figures = {}
    for kind, product in reading.products.items():
        # Under the autocast of a training, the Gram matrices would be computed in half precision.
        with torch.no_grad(), torch.autocast(product.own.device.type, enabled=False):
            for name, statistic in WEIGHT_STATISTICS.items():
                if statistic().applies(product) is None:
                    figures[f"{name}_{kind}"] = statistic().of(product)
    return figures


def weight_reasons(reading: WeightReading) -> dict[str, str]:
    """Return the reason for each figure that does not apply or cannot be computed, by name."""
    reasons = {f"{name}_{kind}": why for kind, why in reading.missing.items() for name in WEIGHT_STATISTICS}
    for kind, product in reading.products.items():
        for name, statistic in WEIGHT_STATISTICS.items():
            reason = statistic().applies(product)
            if reason is not None:
                reasons[f"{name}_{kind}"] = reason
    return reasons
