"""Claims of Kobayashi, Akram and von Oswald 2024 on weight decay of attention, which several studies share."""

from __future__ import annotations

from itertools import pairwise

from headwise.study import Claim, ClaimTest
from headwise_verdict.results.records import ClaimKind

PAPER = "Kobayashi, Akram and von Oswald 2024, arXiv 2410.23819"
# the decay of the studies' baseline
PLAIN = "0.1"
RANKS = ("pseudo_rank_vo", "pseudo_rank_qk")
GAPS = ("nuclear_gap_vo", "nuclear_gap_qk")
IMBALANCES = ("imbalance_vo", "imbalance_qk")
RANK_GAPS = ("rank_gap_vo", "rank_gap_qk")
# the paper shows ranks of products, not of their factors
RANKS_SOURCE = "ours: the paper's law makes the Gram matrices of a product's factors equal, and with them their ranks"
Tests = tuple[ClaimTest, ...]


def axis(*decays: str) -> str:
    """Return the sweep over decays of attention."""
    return f"baseline | attention_weight_decay={{{','.join(decays)}}}"


def mean(*statistics: str) -> tuple[str, ...]:
    """Return the outcomes that are the mean of a statistic over all heads."""
    return tuple(f"heads/{name}/mean" for name in statistics)


def falls(swept: str, *outcomes: str) -> Tests:
    """Return for each outcome the test that it falls along the sweep."""
    return tuple(ClaimTest(arm=swept, outcome=outcome, says="falls") for outcome in outcomes)


def at_each_step(decays: tuple[str, ...], *outcomes: str) -> Tests:
    """Return for each outcome and each decay the test that it is lower than at the decay before."""
    arms = ["baseline" if decay == PLAIN else f"baseline | attention_weight_decay={decay}" for decay in decays]
    return tuple(
        ClaimTest(arm=more, outcome=outcome, says="lower", against=less)
        for outcome in outcomes
        for less, more in pairwise(arms)
    )


def ranks_fall(decays: tuple[str, ...], depth: int, in_layers: ClaimKind = "figures known") -> tuple[Claim, ...]:
    """Return the claims that the ranks of both products fall: along the decays, at each of them, and in each layer.

    That on each decay was written when the figures were known; `in_layers` is the kind of those on layers.
    """
    swept = axis(*decays)
    return (
        Claim(
            text="The stronger the decay of attention's weights, the lower the pseudo-rank of a head's products.",
            source=PAPER,
            tests=falls(swept, *mean(*RANKS)),
        ),
        Claim(
            text="It is lower at each decay than at the one before.",
            source=f"{PAPER}, figures of ranks by decay",
            tests=at_each_step(decays, *mean(*RANKS)),
            kind="figures known",
        ),
        *(
            Claim(
                text=f"It falls in every layer, in the product of {product}.",
                source=f"{PAPER}, figures of ranks by layer and product",
                tests=falls(swept, *(f"heads/{name}/layer {layer}" for layer in range(depth))),
                kind=in_layers,
            )
            for name, product in zip(RANKS, ("values and outputs", "queries and keys"), strict=True)
        ),
    )


def norms_meet(decays: tuple[str, ...], kind: ClaimKind = "measured") -> Claim:
    """Return the claim that the norms of a product approach each other along the decays."""
    return Claim(
        text="The stronger the decay of attention, the nearer are Frobenius and nuclear norms.",
        source=PAPER,
        tests=falls(axis(*decays), *mean(*GAPS)),
        kind=kind,
    )


def factors_balance(decays: tuple[str, ...]) -> Claim:
    """Return the claim that the Gram matrices of a product's factors approach each other along the decays."""
    return Claim(
        text="The stronger the decay of attention, the nearer is PᵀP to W_V W_Vᵀ, and W_KᵀW_K to W_QᵀW_Q.",
        source=PAPER,
        tests=falls(axis(*decays), *mean(*IMBALANCES)),
    )


def factor_ranks_meet(decays: tuple[str, ...]) -> Claim:
    """Return the claim that the ranks of a product's factors approach each other along the decays."""
    return Claim(
        text="The stronger the decay of attention, the nearer are the ranks of both factors' Gram matrices.",
        source=RANKS_SOURCE,
        tests=falls(axis(*decays), *mean(*RANK_GAPS)),
    )
