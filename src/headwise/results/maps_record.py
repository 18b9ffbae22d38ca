"""Maps of attention that a run keeps for a picture, as typed records."""

from __future__ import annotations

from headwise.results.records import Record

# file of a run's folder
MAPS = "maps.json"


class LayerMaps(Record):
    """Hold the maps of one layer: by head, query and key, the weights of one example, rounded for a picture."""

    layer: str
    depth: int
    heads: list[list[list[float]]]


class MapsRecord(Record):
    """Hold the maps of a trained model's first and last layer on the first held-out example."""

    # tokens of the example, of which the first are kept
    tokens: int
    layers: list[LayerMaps]
