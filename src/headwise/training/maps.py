"""Attention maps of the first and last layer of a trained model on one held-out example, stored for a picture."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.call import Call
from headwise.experiments.evaluation import Evaluation
from headwise.results.records import LayerMaps, MapsRecord
from headwise.statistics.reading import Queries, Reading
from headwise.statistics.scan import Logits, Memory, SoftmaxBlock, precise_dtype
from headwise.training.batches import Examples, first
from headwise.training.evaluate import answer
from headwise.training.train import Training
from headwise.watching.observed import reading_of
from headwise.watching.places import Places


@torch.no_grad()
def first_map(reading: Reading) -> Tensor:
    """Return the softmax weights (H, T, N) of the first sample; rows of padding are 0."""
    queries, dtype = Queries.of(reading), precise_dtype(reading)
    memory = Memory(reading.heads * reading.queries * reading.keys, dtype, reading.q.device)
    rows = slice(0, reading.queries)
    with torch.autocast(reading.q.device.type, enabled=False):
        block = SoftmaxBlock.of(Logits(reading, queries, dtype), slice(0, 1), rows, memory)
        weights = block.weights(queries.valid[:1].to(dtype))
    return weights[0].float()


# most tokens of a map that a picture can show
MOST = 65
# decimal digits of the weights, which a picture shows as colours
DIGITS = 3


class _Mapping:
    """An observer that stores the map of the first call of one site in evaluation mode."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None
        self.tokens = 0

    def __call__(self, call: Call, out: Tensor) -> None:
        if self.weights is None:
            self.tokens = call.queries
            self.weights = first_map(reading_of(call, out))[:, :MOST, :MOST].cpu()


@torch.no_grad()
def read_maps(training: Training, evaluation: Evaluation, examples: Examples) -> MapsRecord:
    """Return the softmax maps of the first and last self-attention layers on the first example."""
    model = training.accelerator.unwrap_model(training.model)
    places = Places(model, None)
    self_attention = [place for place in places.sites if not place.site.is_cross]
    chosen = list(dict.fromkeys([*self_attention[:1], *self_attention[-1:]]))
    observed: list[tuple[FittedLayer, _Mapping]] = [(place, _Mapping()) for place in chosen]
    try:
        for place, mapping in observed:
            place.observer, place.armed = mapping, True
        model.eval()
        answer(training, evaluation, first(examples, 1))
    finally:
        places.leave()
    return MapsRecord(
        tokens=max((mapping.tokens for _, mapping in observed), default=0),
        layers=[_layer(place, mapping.weights) for place, mapping in observed if mapping.weights is not None],
    )


def _layer(place: FittedLayer, weights: Tensor) -> LayerMaps:
    heads = [[[round(weight, DIGITS) for weight in row] for row in rows] for rows in weights.tolist()]
    return LayerMaps(layer=place.site.name, depth=place.site.depth, heads=heads)
