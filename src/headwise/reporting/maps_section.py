"""Show what the first and the last layer of trained models look at in one held-out example."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.pages.attention_maps import attention_maps
from headwise.pages.shell import Section, figure, fold, grid, join
from headwise.results.folder import RunFolder, StudyFolder
from headwise.results.maps_record import LayerMaps

INTRO = (
    "Weights of the first and the last layer after training on the first held-out example: queries from top to bottom, keys from left to "
    "right, the heads side by side. The maps of one layer share one colour scale."
)


def maps_section(study: StudyFolder) -> list[Section]:
    """Return the section of the maps of one seed, the first for which the baseline's are kept; none where no run keeps any."""
    for seed in study.seeds:
        plain = study.runs.get((study.baseline, seed))
        if plain is None or plain.maps is None:
            continue
        others = [study.runs[arm, seed] for arm in study.arms if arm != study.baseline and (arm, seed) in study.runs]
        parts = [fold(run.arm, grid(_pair(plain, run)), opened=at == 0) for at, run in enumerate(others) if run.maps]
        return [Section("Attention maps", join(*parts), f"{INTRO} Seed {seed}.")] if parts else []
    return []


def _pair(plain: RunFolder, run: RunFolder) -> Iterator[Any]:
    assert plain.maps is not None and run.maps is not None
    for at, (before, here) in enumerate(zip(plain.maps.layers, run.maps.layers, strict=False)):
        top = max(weight for layer in (before, here) for head in layer.heads for row in head for weight in row)
        place = "last" if at else "first"
        yield _figure(plain.arm, before, top, f"maps, {place} layer: {plain.arm} beside {run.arm}")
        yield _figure(run.arm, here, top, f"maps, {place} layer: {run.arm}")


def _figure(arm: str, layer: LayerMaps, top: float, name: str) -> Any:
    return figure(attention_maps(layer.heads, top=top), title=f"{arm}, layer {layer.depth}", name=name)
