"""Readings of a model outside of a training: figures of all heads over some forwards, and maps of its first input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from headwise.attend import Call, FittedLayer, Site
from headwise.health.statistics.reading import Queries, Reading
from headwise.health.statistics.scan import Logits, Memory, SoftmaxBlock, precise_dtype
from headwise.health.watching.figures import Figures
from headwise.health.watching.observed import reading_of
from headwise.health.watching.places import Places
from headwise.health.watching.recorder import Recorder, SiteObserver
from headwise.health.watching.weights import Matrices, Weights, known_names, norm_in
from headwise.health.watching.whole_model import MATRIX_NORM, OF_LOSS, OF_MODEL

# most tokens of a map that a picture can show
MOST = 65


def check_statistics(names: Sequence[str], *, training: bool) -> bool:
    """Return whether one of these statistics is of the loss as a function of the weights, such as its sharpness.

    Args:
        training: whether they are read around a step; only then the loss, its gradients and updates can be.

    Raises:
        ValueError: for a name that is no statistic, with the nearest known name.
    """
    known_names(list(names), OF_MODEL if training else (MATRIX_NORM,))
    return any(name in OF_LOSS for name in names)


@torch.no_grad()
def read(model: nn.Module, names: Sequence[str], run: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Return the figures of a model over forwards in evaluation mode: by statistic, and there by place.

    Places are "layer 3 head 2", "layer 3", the mean over its heads, and "mean" and "worst" of all; of "matrix_norm",
    each matrix by its name, and "mean" and "worst". Depths count from 0, as in the records of `watch`; a layer is named
    by its path if several share a depth.

    Args:
        names: of the statistics.
        run: makes the forwards.
    """
    places, weights = Places(model, None), Weights(list(names))
    recorder = Recorder(list(names), None, weights, training=False)
    observers: list[SiteObserver] = []
    try:
        weights.look(model, [fitted.site for fitted in places.sites])
        for fitted in places.sites:
            observers.append(SiteObserver(fitted, recorder, places.model))
            fitted.observer, fitted.armed = observers[-1], True
        model.eval()
        run()
        norms = Matrices(places.model, places.all_sites).norms() if MATRIX_NORM in names else {}
        moved = recorder.collect(list(norms.values()))
        figures = list(_figures(recorder, places))
        matrices = {one.name: norm_in(next(moved)) for one in norms}
    finally:
        for fitted in places.sites:
            fitted.observer, fitted.armed = None, False
        for observer in observers:
            observer.remove()
        places.leave()
        recorder.clear()
    found = _by_place(figures)
    if matrices:
        ends = {"mean": fmean(matrices.values()), "worst": max(matrices.values())}
        found[MATRIX_NORM] = matrices | ends
    return found


def _by_place(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    shared = Counter((figure.statistic, figure.depth) for figure in figures)
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(figure.statistic for figure in figures):
        places: dict[str, float] = {}
        every: list[float] = []
        of_name = [figure for figure in figures if figure.statistic == name]
        for figure in of_name:
            layer = f"layer {figure.depth}" if shared[name, figure.depth] == 1 else figure.site
            values = {
                f"{layer} {figure.per} {r['head'] if figure.per == 'head' else r.get('group')}": r["value"]
                for r in figure.records()
            }
            every += values.values()
            places[layer] = fmean(values.values())
            if figure.per != "layer":
                places |= values
        places["mean"] = fmean(every)
        if (worse := of_name[0].worse) is not None:
            places["worst"] = (max if worse == "high" else min)(every)
        found[name] = places
    return found


def _figures(recorder: Recorder, places: Places) -> Iterator[Figures]:
    for fitted in places.sites:
        site = fitted.site
        for name, tally in recorder.tallies.get(site.index, {}).items():
            figure = Figures.of(site, 0, name, tally)
            if figure is not None:
                yield figure
        for name, values in recorder.of_weights.get(site.index, {}).items():
            yield Figures.of_weights(site, 0, name, values, recorder.heads[site.index])


@torch.no_grad()
def first_map(reading: Reading) -> Tensor:
    """Return the softmax weights (H, T, N) of the first sample; rows of padding are 0."""
    queries, dtype = Queries.of(reading), precise_dtype(reading)
    memory = Memory(reading.heads * reading.queries * reading.keys, dtype, reading.q.device)
    rows = slice(0, reading.queries)
    with torch.autocast(reading.q.device.type, enabled=False):
        block = SoftmaxBlock.of(Logits(reading, queries, dtype), slice(0, 1), rows, memory)
        weights, log_unit = block.weights(queries.valid[:1].to(dtype))
        if log_unit is not None:
            weights = weights * log_unit.exp()
    return weights[0].float()


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
def first_maps(model: nn.Module, run: Callable[[], None]) -> tuple[int, list[tuple[Site, Tensor]]]:
    """Return the number of tokens of the first call, and the softmax maps (H, T, N) of two layers on its first sample.

    The layers are the first and the last of self-attention, and a map has its first 65 tokens. `run` makes the forward.
    """
    places = Places(model, None)
    self_attention = [place for place in places.sites if not place.site.is_cross]
    chosen = list(dict.fromkeys([*self_attention[:1], *self_attention[-1:]]))
    observed: list[tuple[FittedLayer, _Mapping]] = [(place, _Mapping()) for place in chosen]
    try:
        for place, mapping in observed:
            place.observer, place.armed = mapping, True
        model.eval()
        run()
    finally:
        places.leave()
    tokens = max((mapping.tokens for _, mapping in observed), default=0)
    return tokens, [(place.site, mapping.weights) for place, mapping in observed if mapping.weights is not None]
