"""Activation records: the statistics of a checkpoint's attention on data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise
from headwise.auditing.batches import Batch
from headwise.auditing.checkpoint import Checkpoint
from headwise.auditing.errors import CheckpointError
from headwise.core.call import Call
from headwise.statistics import STATISTICS
from headwise.watching.alerts import Judge, Thresholds
from headwise.watching.recorder import Recorder
from headwise.watching.records import Figures
from headwise.watching.weights import Weights

Record = dict[str, Any]


class _Looking:
    """Brings the calls of a model in eval mode to a recorder that was made for training."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, call: Call, out: Tensor) -> None:
        call.training = True
        self.recorder.take(call, out)


def read_activations(
    checkpoint: Checkpoint, text: Path | None, images: Path | None, thresholds: Thresholds | None = None
) -> tuple[list[Record], list[Record], dict[str, Any]]:
    """Run the model in eval mode on data and give the records, the alerts and, per site, which statistics do not apply and why.

    A checkpoint is read once, so every figure is judged as it stands.

    Raises:
        CheckpointError: where the model does not take the data.
    """
    made = checkpoint.batches()
    batches = made.of(text, images)
    both = ". It has a part for texts and one for images: pass text= and images=" if made.joint else ""
    model = checkpoint.whole()
    handle = headwise.regularize(model, allow_none=True)
    weights = Weights(list(STATISTICS))
    recorder = Recorder(list(STATISTICS), None, weights)
    try:
        weights.look(model, [fitted.site for fitted in handle.fitted])
        for fitted in handle.fitted:
            fitted.observer, fitted.armed = _Looking(recorder), True
        for batch in batches:
            _run(model, batch, both if None in (text, images) else "")
        figures = [
            figure
            for fitted in handle.fitted
            for name, tally in recorder.tallies.get(fitted.site.index, {}).items()
            if (figure := Figures.of(fitted.site, 0, name, tally)) is not None
        ]
        names = {fitted.site.index: fitted.site.name for fitted in handle.fitted}
        reasons = {names[index]: found for index, found in recorder.reasons.items()}
    finally:
        handle.remove()
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
