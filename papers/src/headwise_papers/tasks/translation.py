"""Translation of Multi30k from German to English: byte pairs trained on it, greedy decoding, BLEU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, StudyError, Task
from headwise_papers.data import multi30k
from headwise_papers.tasks.bleu import count_bleu, finish_bleu
from headwise_papers.tasks.byte_pairs import BEGIN, PAD, BytePairs
from headwise_papers.tasks.transformer_layers import SumNorm
from headwise_papers.tasks.translator import Translator, greedy

# sentence pairs of the training and validation splits that are evaluated: enough for a mean
READ_AGAIN = 200
# largest depth, in layers per side, at which a model learns to translate in the time of a small study
SHALLOW = 20


class Translation(Task):
    """Translation of sentences, token by token."""

    dim: int = 32
    depth: int = Field(6, ge=1, description="layers on each side")
    heads: int = 4
    mlp_dim: int = 128
    norm: SumNorm = "post"
    dropout: float = 0.0
    vocabulary: int = 2000
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    longest: int = Field(100, ge=2, description="tokens of a sentence; a longer one is refused")
    translated: int | None = Field(None, ge=1, description="test sentences that are decoded, the first ones; None: all")
    layer_steps: int | None = Field(
        None,
        ge=1,
        description="steps times layers per side; if set, it determines the steps, so that all depths cost the same",
    )
    deep_layer_steps: int | None = Field(
        None, ge=1, description=f"the same for more than {SHALLOW} layers a side; none: as layer_steps"
    )
    tokens_per_batch: int | None = 1000
    evaluation_batch_size: int = 100
    metrics = (Metric("loss", "nats per token", higher_is_better=False), Metric("bleu", "BLEU", unit="%", failure=0.0))

    @model_validator(mode="before")
    @classmethod
    def _steps_by_depth(cls, settings: Any) -> Any:
        depth = settings.get("depth", cls.model_fields["depth"].default)
        if settings.get("layer_steps") is None or not isinstance(depth, int) or depth < 1:
            return settings
        deep = settings.get("deep_layer_steps") if depth > SHALLOW else None
        return settings | {"steps": max(1, (deep or settings["layer_steps"]) // depth)}

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the loss, which is primary, and BLEU; the loss of a diverged run is that of a uniform guess."""
        loss, bleu = self.metrics
        return dataclasses.replace(loss, failure=math.log(self.vocabulary)), bleu

    def files(self) -> list[Path]:
        """Return the files of Multi30k."""
        return multi30k.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [multi30k.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Check the data, and the length of every sentence, so that a too long one is refused before any run."""
        multi30k.prepare(self.folder, tell)
        for split in ("train", "validation", "test"):
            self.data(split)

    def coder(self) -> BytePairs:
        """Return the byte pairs of the training text of both languages."""
        return coder_of(self.folder, self.vocabulary)

    def model(self) -> Translator:
        """Return the encoder-decoder model."""
        shape = self.model_dump(include={"dim", "depth", "heads", "mlp_dim", "norm", "dropout"})
        return Translator(self.vocabulary, self.coder().digest, **shape)

    def data(self, split: str) -> dict[str, Tensor]:
        """Return the tokens of both sides (N, T), each sentence followed by END and then PAD."""
        return examples(self.folder, split, self.vocabulary, self.longest)

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the number of tokens of each pair's longer side."""
        return torch.stack([(side != PAD).sum(1) for side in examples.values()]).amax(0)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch with padding cut to the longest sentence; the decoder's input starts with BEGIN."""
        source, target = (side[:, : int((side != PAD).sum(1).max())] for side in examples.values())
        return Batch({"source": source, "target": nn.functional.pad(target[:, :-1], (1, 0), value=BEGIN)}, target)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy with smoothed labels, in nats per token."""
        return cross_entropy(output, targets, self.label_smoothing)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the number of real tokens, over which the loss is a mean."""
        return (targets != PAD).sum()

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the summed loss without label smoothing, and the number of tokens."""
        weight = self.weight(targets)
        return {"loss": cross_entropy(output, targets, 0.0) * weight, "weight": weight}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: the decoded test split, and parts of the others."""
        return [
            Evaluation("train", limit=READ_AGAIN),
            Evaluation("validation", limit=READ_AGAIN, when="end"),
            Evaluation("test/greedy", "test", self.decode, None, self.count_bleu, finish, limit=self.translated),
        ]

    def decode(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return greedy translations of at most ten tokens more than the longest source."""
        return greedy(model, inputs["source"], min(inputs["source"].shape[1] + 10, self.longest))

    def count_bleu(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the counts of matching n-grams of decoded sentences."""
        return {**count_bleu(self.coder().decode(output), self.coder().decode(targets))}


def finish(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Return BLEU."""
    return {"bleu": finish_bleu(sums)}


def cross_entropy(output: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return the mean cross entropy over real tokens, in nats."""
    scores, tokens = output.flatten(0, 1).float(), targets.flatten()
    return nn.functional.cross_entropy(scores, tokens, ignore_index=PAD, label_smoothing=smoothing)


@cache
def coder_of(folder: Path | None, vocabulary: int) -> BytePairs:
    """Return the byte pairs of the training text, computed once per process."""
    return BytePairs([line for pair in multi30k.read(folder, "train") for line in pair], vocabulary)


@cache
def examples(folder: Path | None, split: str, vocabulary: int, longest: int) -> dict[str, Tensor]:
    """Return a split as tokens of both sides; raise StudyError with the line of a sentence of over `longest` tokens."""
    sides = list(zip(*multi30k.read(folder, split), strict=True))
    tokens_by_side: dict[str, Tensor] = {}
    for name, lines in zip(("source", "target"), sides, strict=True):
        coded = coder_of(folder, vocabulary).encode(lines)
        long = [number for number, tokens in enumerate(coded, 1) if len(tokens) > longest]
        if long:
            most = max(map(len, coded))
            raise StudyError(
                f"{len(long)} sentences of the {name} of {split} have more than longest={longest} tokens, first in "
                f"line {long[0]}. Set longest={most}, or leave them out of the data."
            )
        tokens_by_side[name] = nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in coded], True, PAD)
    return tokens_by_side
