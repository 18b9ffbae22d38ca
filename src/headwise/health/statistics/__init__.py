"""Statistics of attention, by family, computed together in one pass over blocks of queries."""

import sys

import torch

from headwise.files.entry_points import entry_points, load
from headwise.health.statistics.branch_writes import AttentionWrite, MLPWrite
from headwise.health.statistics.entropy import (
    AttentionEntropy,
    EntropyFloorCentred,
    EntropyFloorSpectral,
    EntropyShare,
    LowestEntropy,
)
from headwise.health.statistics.later_keys import LaterKeys
from headwise.health.statistics.learned_sinks import SinkClosed, SinkOpen, SinkWeight
from headwise.health.statistics.log_sum_exp import LargestLogSumExp, LogSumExp
from headwise.health.statistics.logits import LogitBound, MaxLogit, MinLogit
from headwise.health.statistics.mass import AttentionDistance, ImageToTextMass, PeakedRows, SinkMass, TextToImageMass
from headwise.health.statistics.norms import KeyNorm, OutputNorm, QueryNorm, ValueNorm
from headwise.health.statistics.output_gates import GateClosed, GateMean, GateOpen
from headwise.health.statistics.reading import Queries, Reading, SiteFacts
from headwise.health.statistics.row_figures import RowFigures
from headwise.health.statistics.similarity import (
    FinalCosine,
    FinalHighFrequency,
    HeadRedundancy,
    HighFrequency,
    LayerRedundancy,
    LayerRedundancyMean,
    MassiveActivations,
    StreamCosine,
    StreamHighFrequency,
    TokenCosine,
)
from headwise.health.statistics.smoothing import GradientCosine, NonlocalFunctional
from headwise.health.statistics.statistic import STATISTICS, Statistic
from headwise.health.statistics.tally import Tally
from headwise.health.statistics.top_keys import TopKeyDistance, TopKeyShare

STATISTICS |= {
    kind.name: kind
    for kind in (
        AttentionEntropy,
        EntropyShare,
        LowestEntropy,
        EntropyFloorCentred,
        EntropyFloorSpectral,
        MaxLogit,
        LogitBound,
        SinkMass,
        PeakedRows,
        HeadRedundancy,
        LayerRedundancy,
        LayerRedundancyMean,
        TokenCosine,
        HighFrequency,
        StreamCosine,
        StreamHighFrequency,
        FinalCosine,
        FinalHighFrequency,
        NonlocalFunctional,
        GradientCosine,
        OutputNorm,
        QueryNorm,
        KeyNorm,
        ValueNorm,
        MassiveActivations,
        AttentionDistance,
        LaterKeys,
        TextToImageMass,
        ImageToTextMass,
        LogSumExp,
        LargestLogSumExp,
        MinLogit,
        TopKeyDistance,
        TopKeyShare,
        SinkWeight,
        SinkClosed,
        SinkOpen,
        GateMean,
        GateClosed,
        GateOpen,
        AttentionWrite,
        MLPWrite,
    )
}
# Statistics of installed packages, loaded after the names that they import from here. A module that is being imported
# right now registers its own.
STATISTICS |= {
    name: load("headwise.statistics", name)
    for name, point in entry_points("headwise.statistics").items()
    if point.module not in sys.modules
}

__all__ = [
    "STATISTICS",
    "Queries",
    "Reading",
    "RowFigures",
    "SiteFacts",
    "Statistic",
    "Tally",
    "read",
    "reasons",
    "usual",
]


def usual() -> list[str]:
    """Return the names of the statistics that are read where none are named."""
    return [name for name, kind in STATISTICS.items() if kind.usual]


def reasons(facts: SiteFacts, names: list[str] | None = None) -> dict[str, str]:
    """Return the reasons why statistics do not apply to a site, by name; statistics that apply are left out."""
    chosen = list(STATISTICS) if names is None else names
    every = {name: STATISTICS[name]().applies(facts) for name in chosen}
    return {name: reason for name, reason in every.items() if reason is not None}


def read(
    reading: Reading,
    names: list[str] | None = None,
    rows: int | None = None,
    previous: Reading | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tally]:
    """Return the tallies of all statistics that apply to a reading, computed in one pass in fp32 or fp64.

    No gradient is computed. `rows` samples that many queries of each sequence; `previous` is the reading of the layer
    before.
    """
    skipped = reasons(reading.facts(previous is not None), names)
    chosen = [STATISTICS[name]() for name in (STATISTICS if names is None else names) if name not in skipped]
    needs = {figure for statistic in chosen for figure in statistic.needs}
    figures = RowFigures(reading, needs, Queries.of(reading, rows, generator), previous)
    with torch.no_grad(), torch.autocast(reading.q.device.type, enabled=False):
        return {statistic.name: statistic.tally(figures) for statistic in chosen}
