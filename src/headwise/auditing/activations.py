"""Activation records: the statistics of a checkpoint's attention on data."""

from __future__ import annotations

from pathlib import Path

import torch

from headwise.auditing.batches import Batch
from headwise.auditing.checkpoint import Checkpoint
from headwise.files.errors import CheckpointError
from headwise.files.health_records import Alert, Record
from headwise.statistics import STATISTICS
from headwise.watching.alerts import Judge
from headwise.watching.figures import Figures
from headwise.watching.places import Places
from headwise.watching.recorder import Recorder
from headwise.watching.rules import Thresholds
from headwise.watching.site_observer import SiteObserver
from headwise.watching.weights import Weights


def read_activations(
    checkpoint: Checkpoint, text: Path | None, images: Path | None, thresholds: Thresholds | None = None
) -> tuple[list[Record], list[Alert], dict[str, dict[str, str]]]:
    """Run the model in eval mode on data and give the records, the alerts and, per site, which statistics do not apply
    and why.

    A checkpoint is read once, so every figure is judged as it stands.

    Raises:
        CheckpointError: if the model does not take the data.
    """
    made = checkpoint.batches()
    batches = made.of(text, images)
    both = ". It has a part for texts and one for images: pass text= and images=" if made.joint else ""
    model = checkpoint.whole()
    weights = Weights(list(STATISTICS))
    # The calls of a model in evaluation are read, not those of a training.
    recorder = Recorder(list(STATISTICS), None, weights, training=False)
    places = Places(model, None)
    observers: list[SiteObserver] = []
    try:
        sites = [one.site for one in places.sites]
        weights.look(model, sites)
        for one in places.sites:
            observers.append(SiteObserver(one, recorder, model))
            one.observer, one.armed = observers[-1], True
        for batch in batches:
            _run(model, batch, both if None in (text, images) else "")
        recorder.collect()
        tallies = [(site, recorder.tallies.get(site.index, {})) for site in sites]
        figures = [
            figure for site, known in tallies for name in known if (figure := Figures.of(site, 0, name, known[name]))
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
    try:
        with torch.no_grad():
            if isinstance(batch, dict):
                model(**{name: value.to(first.device) for name, value in batch.items()})
            else:
                model(batch.to(first.device))
    except ImportError:
        raise
    # A model that gets what it does not take fails as it happens, with an attribute of None as well as with a sentence.
    except Exception as error:
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{type(model).__name__} did not run on the data ({type(error).__name__}: {cause}){remedy}"
        ) from error
