"""Speech recognition on AN4: a transformer over cepstra, CTC over letters, letter and word error rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, StudyError, Task
from headwise_papers.data import an4
from headwise_papers.tasks.ctc import BLANK, best_path, frames_needed
from headwise_papers.tasks.error_rates import count_errors, finish_errors
from headwise_papers.tasks.spec_augment import spec_augment
from headwise_papers.tasks.speech_encoder import SpeechEncoder, shorter
from headwise_papers.tasks.transformer_layers import SumNorm

LETTERS = " ABCDEFGHIJKLMNOPQRSTUVWXYZ'"
# training utterances that are evaluated at the end: enough for a mean
READ_AGAIN = 130


class Speech(Task):
    """Speech recognition, letter by letter."""

    dim: int = 64
    depth: int = 8
    heads: int = 4
    mlp_dim: int = 256
    norm: SumNorm = "post"
    stride: int = Field(4, ge=1, description="frames of 10 ms that the convolution makes one of")
    dropout: float = 0.0
    layer_drop: float = 0.0
    bands: int = Field(1, ge=0, description="SpecAugment: masks over coefficients")
    band: int = Field(3, ge=0, description="SpecAugment: most coefficients of a mask")
    stretches: int = Field(2, ge=0, description="SpecAugment: masks over time")
    stretch: int = Field(20, ge=0, description="SpecAugment: most frames of a mask")
    stretch_share: float = Field(0.1, ge=0, le=1, description="SpecAugment: most of an utterance that a mask takes")
    longest: int = Field(700, ge=1, description="frames of 10 ms of an utterance; a longer one is refused")
    tokens_per_batch: int | None = 4000
    evaluation_batch_size: int = 65
    metrics = (
        Metric("letter_error", "letter error rate", higher_is_better=False, unit="%", failure=1.0),
        Metric("word_error", "word error rate", higher_is_better=False, unit="%", failure=1.0),
        Metric("loss", "nats per letter", higher_is_better=False),
    )

    def files(self) -> list[Path]:
        """Return the one file of AN4."""
        return an4.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [an4.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Check the data and every utterance, so that one that cannot be learned is refused before any run."""
        an4.prepare(self.folder, tell)
        for split in ("train", "test"):
            self.data(split)

    def model(self) -> SpeechEncoder:
        """Return the encoder, one of whose outputs is CTC's blank."""
        names = {"dim", "depth", "heads", "mlp_dim", "norm", "stride", "dropout", "layer_drop"}
        return SpeechEncoder(an4.CEPSTRA, LETTERS, **self.model_dump(include=names))

    def data(self, split: str) -> dict[str, Tensor] | None:
        """Return normalised features (N, T, 13), labels (N, L), and the lengths of both; None for "validation"."""
        if split == "validation":
            return None
        return examples(self.folder, split, self.stride, self.longest)

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the number of 10 ms frames of each utterance."""
        return examples["lengths"]

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch with its padding cut, in training masked by SpecAugment."""
        lengths, counts = examples["lengths"], examples["label_lengths"]
        features = examples["features"][:, : int(lengths.max())]
        if generator is not None:
            masks = self.model_dump(include={"bands", "band", "stretches", "stretch"})
            features = spec_augment(features, lengths, generator, share=self.stretch_share, **masks)
        labels = examples["labels"][:, : int(counts.max())]
        targets = {"labels": labels, "label_lengths": counts, "frames": shorter(lengths, self.stride)}
        return Batch({"features": features, "lengths": lengths}, targets)

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return CTC's loss (Graves et al. 2006) in nats per letter."""
        counts = targets["label_lengths"]
        scores, labels = output.float().transpose(0, 1), targets["labels"]
        total = nn.functional.ctc_loss(scores, labels, targets["frames"], counts, BLANK, reduction="sum")
        return total / counts.sum()

    def weight(self, targets: dict[str, Tensor]) -> Tensor:
        """Return the number of letters, over which the loss is a mean."""
        return targets["label_lengths"].sum()

    def count(self, output: Tensor, targets: dict[str, Tensor]) -> Sums:
        """Return the summed loss and the edits of the best path."""
        predictions = [spell(labels) for labels in best_path(output, targets["frames"])]
        pairs = zip(targets["labels"].tolist(), targets["label_lengths"].tolist(), strict=True)
        references = [spell(labels[:count]) for labels, count in pairs]
        weight = self.weight(targets)
        return {"loss": self.loss(output, targets) * weight, "weight": weight, **count_errors(predictions, references)}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the error rates and the loss of a split."""
        return finish_errors(sums) | {"loss": sums["loss"] / sums["weight"]}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with only part of the training split."""
        return [Evaluation("train", limit=READ_AGAIN)]


def spell(labels: Sequence[int]) -> str:
    """Return the letters of labels, which start at 1."""
    return "".join(LETTERS[label - 1] for label in labels)


@cache
def examples(folder: Path | None, split: str, stride: int, longest: int) -> dict[str, Tensor]:
    """Return a split of AN4 as padded tensors; coefficients have mean 0 and deviation 1 over an utterance's time.

    Raises StudyError, naming the utterances, for an empty transcript, a letter outside `LETTERS`, no frame or more than
    `longest`, and a transcript too long for CTC in the frames after the convolution.
    """
    utterances = an4.read(folder, split)
    refuse(utterances, stride, longest)
    features = [normalised(one.features) for one in utterances]
    labels = [torch.tensor(labels_of(one.transcript)) for one in utterances]
    pad = nn.utils.rnn.pad_sequence
    return {
        "features": pad(features, batch_first=True),
        "lengths": torch.tensor([len(one) for one in features]),
        "labels": pad(labels, batch_first=True),
        "label_lengths": torch.tensor([len(one) for one in labels]),
    }


def refuse(utterances: Sequence[an4.Utterance], stride: int, longest: int) -> None:
    """Raise StudyError for utterances that cannot be learned, with the faults and the utterances' names."""
    faults: dict[str, list[str]] = {}
    for one in utterances:
        if (fault := fault_of(one, stride, longest)) is not None:
            faults.setdefault(fault, []).append(one.name)
    if faults:
        faults_in_words = "; ".join(
            f"{len(names)} with {fault}: {', '.join(names[:3])}{' …' if len(names) > 3 else ''}"
            for fault, names in faults.items()
        )
        raise StudyError(
            f"utterances that cannot be learned: {faults_in_words}. Leave them out of the data, or set longest (now "
            f"{longest}) higher or stride (now {stride}) lower."
        )


def fault_of(one: an4.Utterance, stride: int, longest: int) -> str | None:
    """Return the error of an utterance, or None."""
    if not one.transcript.strip():
        return "an empty transcript"
    if foreign := sorted(set(one.transcript) - set(LETTERS)):
        return f"letters that the vocabulary lacks ({''.join(foreign)!r})"
    if not 1 <= len(one.features) <= longest:
        return f"no frame or more than {longest}"
    frames = int(shorter(torch.tensor(len(one.features)), stride))
    return (
        None
        if frames_needed(labels_of(one.transcript)) <= frames
        else "a transcript that CTC cannot reach in its frames"
    )


def labels_of(transcript: str) -> list[int]:
    """Return the labels of a transcript's letters, from 1; 0 is the blank."""
    return [1 + LETTERS.index(letter) for letter in transcript]


def normalised(features: Tensor) -> Tensor:
    """Return features (T, F) with mean 0 and deviation 1 over time; a constant feature becomes 0."""
    deviation, mean = torch.std_mean(features, 0, correction=0)
    return (features - mean) / deviation.clamp(min=1e-5)
