"""The sentiment of a sentence after each of its words: how accurate, stable and early a model's answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.lab.studies.vision_transformer import NormPlace
from headwise.study import Batch, DataSet, Evaluation, Metric
from headwise_papers.data import sst2
from headwise_papers.tasks.blog_text import PAD, WordModel, Words, sentences

# number of test sentences whose prefixes are evaluated, the first ones
READ = 600


class Prefixes(Words):
    """Sentiment of SST-2's sentences, learned from whole sentences and tested after every word of a sentence.

    A bidirectional model runs again on each prefix (restart-incremental); a causal one answers at each position of one
    pass. The metrics are those of Baumann et al. 2011 and of Kahardipraja et al. 2021 (arXiv 2109.07364) for one label
    per prefix. Edit overhead: the share of unnecessary edits among all edits, where only the first answer is necessary.
    Correction time: the share of the sentence from the first occurrence of the final answer to the last change.
    Relative correctness: the share of prefixes with the final answer.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("prefix_accuracy", "accuracy over prefixes", unit="%", failure=0.5),
        Metric("accuracy", "accuracy", unit="%", failure=0.5),
        Metric("edit_overhead", "edit overhead", higher_is_better=False, unit="%"),
        Metric("correction_time", "correction time", higher_is_better=False, unit="%"),
        Metric("relative_correctness", "relative correctness", unit="%"),
        Metric("loss", higher_is_better=False, unit="nats"),
    )
    decides_on: ClassVar[str] = "prefixes"

    reading: Literal["restart", "causal"] = "restart"
    norm: NormPlace = "pre"

    def model(self) -> WordModel:
        """Return the model, which answers at the class word, or if causal at each position."""
        return self.build(2, causal=self.reading == "causal")

    def data(self, split: str) -> dict[str, Tensor]:
        """Return words (B, T) after the class word, a mask of real words, and labels 0 or 1."""
        words, labels = sentences(self.folder, split, self.vocabulary, self.longest)
        return {"words": words, "real": words != PAD, "labels": labels}

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the numbers of real words, by which sentences are batched."""
        return examples["real"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch without excess padding; a causal model needs no mask, as padding follows all real words."""
        lengths = self.lengths(examples)
        longest = int(lengths.max())
        names = ("words", "real") if self.reading == "restart" else ("words",)
        inputs = {name: examples[name][:, :longest] for name in names}
        return Batch(inputs, {"labels": examples["labels"], "last": lengths - 1})

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, with answers after every word of test sentences."""
        prefixes = Evaluation("prefixes", "test", _by_prefix, count=_count_prefixes, finish=_mean, limit=READ)
        return [prefixes, Evaluation("validation", limit=500), Evaluation("train", limit=2000)]

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of the whole sentence's answer, in nats."""
        return F.cross_entropy(_final(output, targets), targets["labels"])

    def count(self, output: Tensor, targets: dict[str, Tensor]) -> Sums:
        """Return the numbers of sentences and of correct answers to whole sentences, and the summed loss in nats."""
        logits, labels = _final(output, targets), targets["labels"]
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"weight": torch.tensor(len(labels)), "loss": loss, "accuracy": (logits.argmax(-1) == labels).sum()}

    def files(self) -> list[Path]:
        """Return the files of SST-2."""
        return sst2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [sst2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        sst2.prepare(self.folder, tell)


def incremental_figures(answers: Tensor, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return each sentence's metrics (B,) from its answers (B, T) after each word; the first `words` (B,) are real."""
    positions = torch.arange(answers.shape[1], device=answers.device)
    real = positions < words[:, None]
    final = answers.gather(1, words[:, None] - 1)
    as_final = (answers == final) & real
    changed = (answers[:, 1:] != answers[:, :-1]) & real[:, 1:]
    edits = 1 + changed.sum(1)
    first = as_final.int().argmax(1)
    # the last prefix with another answer
    last_other = torch.where(real & ~as_final, positions, -1).amax(1)
    return {
        "prefix_accuracy": ((answers == labels[:, None]) & real).sum(1) / words,
        "edit_overhead": (edits - 1) / edits,
        "correction_time": (last_other + 1 - first) / words,
        "relative_correctness": as_final.sum(1) / words,
    }


def _final(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Return the logits (B, 2) of whole sentences: those of the class word, or of a causal model's last word."""
    return output if output.dim() == 2 else output[torch.arange(len(output), device=output.device), targets["last"]]


def _by_prefix(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the answers (B, T) after each word; those after a sentence's end are meaningless."""
    words, real = inputs["words"], inputs.get("real")
    if real is None:
        answers: Tensor = model(words)[:, 1:].argmax(-1)
        return answers
    lengths = range(2, words.shape[1] + 1)
    return torch.stack([model(words[:, :many], real[:, :many]).argmax(-1) for many in lengths], 1)


def _count_prefixes(answers: Tensor, targets: dict[str, Tensor]) -> Sums:
    figures = incremental_figures(answers, targets["last"], targets["labels"])
    right = answers.gather(1, targets["last"][:, None] - 1)[:, 0] == targets["labels"]
    sums = {name: values.sum() for name, values in figures.items()}
    return {"weight": torch.tensor(len(right)), "accuracy": right.sum(), **sums}


def _mean(sums: dict[str, Tensor]) -> dict[str, Any]:
    return {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}
