"""The function `audit`, which reads the health of every head of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.files.arguments import is_a, is_function
from headwise.files.errors import CheckpointError
from headwise.files.provenance import commit, hardware, versions
from headwise.health.auditing.audited import Audit
from headwise.health.auditing.opening import open_checkpoint
from headwise.health.auditing.records import AuditAlert, AuditRecord
from headwise.health.auditing.weight_alerts import WeightThresholds, weight_alerts
from headwise.health.auditing.weights import read_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from headwise.health.watching.rules import Thresholds

__all__ = ["Audit", "CheckpointError", "WeightThresholds", "audit"]


def audit(
    checkpoint: str | Path | nn.Module,
    text: str | Path | None = None,
    images: str | Path | None = None,
    out: str | Path | None = None,
    *,
    thresholds: WeightThresholds | None = None,
    activation_thresholds: Thresholds | None = None,
    progress: Callable[[int, int], None] | None = None,
    command: str = "",
) -> Audit:
    """Return the health of every head of a checkpoint, from its weights and, if given, from data.

    Weights are read layer by layer. No code of a checkpoint is ever executed: safetensors only, no remote code.

    Args:
        checkpoint: a model in memory, which is not changed; a transformers folder, also in a hub's cache; the name of a
            model in the hub's cache; `TIMM_NAME:FILE.safetensors`; or `MODULE.py:FACTORY` (your own function).
        text: a text file, for the statistics of the activations.
        images: a folder of images, for the same.
        out: file of the HTML report; the JSON is written next to it.
        thresholds: limits of the alerts on weights.
        activation_thresholds: limits of the alerts on data, the same as those of `headwise.watch`.
        progress: called with (layers read, all layers).
        command: stored in the result, so that the audit can be repeated.

    Raises:
        CheckpointError: if the checkpoint is corrupt, truncated, pickled or unknown; the message has the remedy.
        ValueError: if the model has no attention layer that can be read.

    Example:
        >>> import tempfile, headwise
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
        >>> model = GPT2LMHeadModel(config)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_pretrained(folder)
        ...     found = headwise.audit(folder)
        >>> found.model, len(found.layers)
        ('GPT2LMHeadModel', 2)
        >>> sorted({record["statistic"] for record in found.records if "rank" in record["statistic"]})[:2]
        ['effective_rank_qk', 'effective_rank_vo']
    """
    is_a("thresholds", thresholds, (WeightThresholds, type(None)), "headwise's WeightThresholds(...) or None")
    if activation_thresholds is not None:
        # imported here only, as the reading of activations below
        from headwise.health.watching.rules import Thresholds as Limits

        is_a("activation_thresholds", activation_thresholds, Limits, "headwise.Thresholds(...) or None")
    for name, value in (("text", text), ("images", images), ("out", out)):
        is_a(name, value, (str, Path, type(None)), "a path or None")
    is_function("progress", progress)
    is_a("command", command, str, "a text")
    start = time.perf_counter()
    opened = open_checkpoint(checkpoint)
    read = read_checkpoint(opened, progress)
    records: list[AuditRecord] = [*read.records]
    alerts: list[AuditAlert] = [*weight_alerts(read, thresholds or WeightThresholds())]
    reasons: dict[str, dict[str, str]] = {}
    if text is not None or images is not None:
        # imported here only, because watching a model also imports the code that regularizes models
        from headwise.health.auditing.activations import read_activations

        file, folder = (None if path is None else Path(path) for path in (text, images))
        more, raised, reasons = read_activations(opened, file, folder, activation_thresholds)
        records += more
        alerts += raised
    result = Audit(
        checkpoint=opened.name,
        kind=opened.kind,
        model=type(opened.model).__name__,
        records=records,
        alerts=alerts,
        layers=read.layers,
        unused=read.unused,
        remarks=opened.remarks,
        spectra={f"{site}|{head}|{kind}": values for (site, head, kind), values in read.spectra.items()},
        balances={f"{site}|{group}|{kind}": balance for (site, group, kind), balance in read.balances.items()},
        data=", ".join(Path(p).name for p in (text, images) if p is not None) or None,
        reasons=reasons,
        command=command,
        **_provenance(start),
    )
    if out is not None:
        result.write(out)
    return result


def _provenance(start: float) -> dict[str, Any]:
    return {
        "versions": versions("transformers", "safetensors", "timm"),
        "commit": commit(),
        "hardware": hardware(),
        "seconds": round(time.perf_counter() - start, 3),
    }
