"""The statistics of a checkpoint's attention on data."""

from __future__ import annotations

from pathlib import Path

import torch

from headwise.files.tensor_files import explained
from headwise.health.auditing.checkpoint import Batch, Checkpoint
from headwise.health.health_records import Alert, Record
from headwise.health.statistics import usual
from headwise.health.watching.alerts import Judge
from headwise.health.watching.figures import Figures
from headwise.health.watching.places import Places
from headwise.health.watching.recorder import Recorder, SiteObserver
from headwise.health.watching.rules import Thresholds
from headwise.health.watching.weights import Weights


def read_activations(
    checkpoint: Checkpoint, text: Path | None, images: Path | None, thresholds: Thresholds | None = None
) -> tuple[list[Record], list[Alert], dict[str, dict[str, str]]]:
    """Run the model in eval mode on data and return records, alerts and, per site, the statistics that do not apply.

    A checkpoint is read once, so alerts judge each figure alone, without a history.

    Raises:
        CheckpointError: if the model does not accept the data.
    """
    maker = checkpoint.batches()
    batches = maker.of(text, images)
    hint = ". It has a part for texts and one for images: pass text= and images=" if maker.joint else ""
    model = checkpoint.whole()
    weights = Weights(usual())
    # Read the calls of a model in eval mode, not those of a training.
    recorder = Recorder(usual(), None, weights, training=False)
    places = Places(model, None)
    observers: list[SiteObserver] = []
    try:
        sites = [layer.site for layer in places.sites]
        weights.look(model, sites)
        for layer in places.sites:
            observers.append(SiteObserver(layer, recorder, model))
            layer.observer, layer.armed = observers[-1], True
        for batch in batches:
            _run(model, batch, hint if None in (text, images) else "")
        recorder.collect()
        tallies = [(site, recorder.tallies.get(site.index, {})) for site in sites]
        figures = [
            figure
            for site, by_name in tallies
            for name, tally in by_name.items()
            if (figure := Figures.of(site, 0, name, tally))
        ]
        reasons = {site.name: recorder.reasons[site.index] for site in sites if site.index in recorder.reasons}
    finally:
        for observer in observers:
            observer.remove()
        places.leave()
    records = [record for figure in figures for record in figure.records()]
    return records, Judge(thresholds or Thresholds(), at_once=True).alerts(records), reasons


def _run(model: torch.nn.Module, batch: Batch, remedy: str) -> None:
    first = next(model.parameters())
    # Unsuitable data can raise anything, from a clear message to an AttributeError on None.
    with explained(f"{type(model).__name__} did not run on the data", remedy), torch.no_grad():
        if isinstance(batch, dict):
            model(**{name: value.to(first.device) for name, value in batch.items()})
        else:
            model(batch.to(first.device))
