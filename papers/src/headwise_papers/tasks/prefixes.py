"""The sentiment of a sentence, told anew after each of its words: how right, how changeable and how late a model's
answers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.experiments.evaluation import Sums
from headwise.studies.vision_transformer import NormPlace
from headwise.study import Batch, DataSet, Evaluation, Metric
from headwise_papers.data import sst2
from headwise_papers.tasks.blog_text import PAD, WordModel, Words, sentences

# prefixes are read of so many test sentences, the first ones
READ = 600


class Prefixes(Words):
    """Learn the sentiment of SST-2's whole sentences, then answer after every word of a test sentence.

    A model that reads both ways is run anew on each prefix (restart-incremental); a causal one answers at each place of
    one pass. The figures are those of Baumann et al. 2011 and of Kahardipraja et al. 2021 (arXiv 2109.07364), of one
    label for each prefix: edit overhead is the share of unnecessary among all edits, the first answer being the one
    that is necessary; correction time the share of the sentence that passes from the first occurrence of the final
    answer to its final decision; relative correctness the share of prefixes that have the final answer.
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
        """Build the model: it answers at the class word, or at each place."""
        return self.build(2, causal=self.reading == "causal")

    def data(self, split: str) -> dict[str, Tensor]:
        """Return words (B, T) behind the class word, which of them are real, and 0 or 1."""
        words, labels = sentences(self.folder, split, self.vocabulary, self.longest)
        return {"words": words, "real": words != PAD, "labels": labels}

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Count the real words: sentences of similar length share a batch."""
        return examples["real"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Cut the padding; a causal model needs no mask, since padding stands behind all that is read of it."""
        lengths = self.lengths(examples)
        kept = int(lengths.max())
        names = ("words", "real") if self.reading == "restart" else ("words",)
        inputs = {name: examples[name][:, :kept] for name in names}
        return Batch(inputs, {"labels": examples["labels"], "last": lengths - 1})

    def evaluations(self) -> list[Evaluation]:
        """Answer after every word of test sentences; the validation split, which only trials need, at the end."""
        prefixes = Evaluation("prefixes", "test", _by_prefix, count=_count_prefixes, finish=_mean, limit=READ)
        return [prefixes, Evaluation("validation", limit=500), Evaluation("train", limit=2000)]

    def loss(self, output: Tensor, targets: dict[str, Tensor]) -> Tensor:
        """Return the cross entropy of the whole sentence's answer, in nats."""
        return F.cross_entropy(_final(output, targets), targets["labels"])

    def count(self, output: Tensor, targets: dict[str, Tensor]) -> Sums:
        """Count sentences, those answered right as a whole, and their loss in nats."""
        found, labels = _final(output, targets), targets["labels"]
        loss = F.cross_entropy(found, labels, reduction="sum")
        return {"weight": torch.tensor(len(labels)), "loss": loss, "accuracy": (found.argmax(-1) == labels).sum()}

    def files(self) -> list[Path]:
        """Name the files."""
        return sst2.files(self.folder)

    def data_sets(self) -> list[DataSet]:
        """Name what the runs read."""
        return [sst2.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download what is missing, and check it."""
        sst2.prepare(self.folder, tell)


def incremental_figures(answers: Tensor, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return each sentence's figures (B,) from its answers (B, T) after each word, of which the first `words` (B,) are
    real."""
    places = torch.arange(answers.shape[1], device=answers.device)
    real = places < words[:, None]
    final = answers.gather(1, words[:, None] - 1)
    as_final = (answers == final) & real
    changed = (answers[:, 1:] != answers[:, :-1]) & real[:, 1:]
    edits = 1 + changed.sum(1)
    first = as_final.int().argmax(1)
    # behind the last prefix that has another answer
    other = torch.where(real & ~as_final, places, -1).amax(1)
    return {
        "prefix_accuracy": ((answers == labels[:, None]) & real).sum(1) / words,
        "edit_overhead": (edits - 1) / edits,
        "correction_time": (other + 1 - first) / words,
        "relative_correctness": as_final.sum(1) / words,
    }


def _final(output: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Return the logits (B, 2) of whole sentences: those of the class word, or of a causal model's last word."""
    return output if output.dim() == 2 else output[torch.arange(len(output), device=output.device), targets["last"]]


def _by_prefix(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the answers (B, T) after each word; those behind a sentence's end mean nothing."""
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
