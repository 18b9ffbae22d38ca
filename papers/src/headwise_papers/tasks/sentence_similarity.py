"""Similarity of two sentences: the cosine of a pretrained encoder's mean tokens, fitted to human scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Rows, StudyError, Task
from headwise_papers.data import sts2012, stsb
from headwise_papers.tasks.pretrained import load_encoder, load_tokenizer, pretrained_files

SETS = {"stsb": stsb, "sts2012": sts2012}
BEST_SCORE = 5.0
# of the contrastive objective: Gao, Yao and Chen 2021, arXiv 2104.08821
TEMPERATURE = 0.05


class SentenceSimilarity(Task):
    """Fine-tuning of a pretrained encoder so that the cosine of two sentences predicts their human similarity score.

    The loss is the mean squared error to the score divided by 5 (Reimers and Gurevych 2019, arXiv 1908.10084), or with
    the objective "contrast" SimCSE's without supervision (Gao, Yao and Chen 2021, arXiv 2104.08821): each sentence of a
    batch is encoded twice, under different dropout, and must be told from the others. The primary metric is Spearman's
    rank correlation over the whole test split. STS 2012 has no validation split.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        # a constant answer has no rank correlation
        Metric("spearman", "Spearman correlation", failure=0.0),
        Metric("loss", "squared error", higher_is_better=False),
    )

    data_set: Literal["stsb", "sts2012"] = "stsb"
    objective: Literal["score", "contrast"] = "score"
    pretrained: str = Field("", description="folder of an encoder of transformers; empty: MiniLM in its package")
    random_weights: bool = Field(False, description="the same shape with fresh weights")
    tokens: int = Field(32, ge=4, description="of a sentence; longer ones are cut")
    steps: int | None = 60
    batch_size: int = 8
    evaluation_batch_size: int = 32
    learning_rate: float = 5e-5
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "linear"
    warmup: float = 0.1
    clip: float | None = 1.0
    head_statistics: tuple[str, ...] = ("stream_cosine", "final_cosine")

    def model(self) -> SentencePairs:
        """Return the model with the loaded encoder; raise StudyError for a contrastive objective without dropout."""
        encoder = load_encoder(self.pretrained, random=self.random_weights)
        contrast = self.objective == "contrast"
        if contrast and not any(isinstance(module, nn.Dropout) and module.p > 0 for module in encoder.modules()):
            raise StudyError(
                "the two views of a sentence differ by dropout, and this encoder has none. Set hidden_dropout_prob in "
                "its config.json, or objective=score."
            )
        return SentencePairs(encoder, contrast=contrast)

    def data(self, split: str) -> dict[str, Tensor] | None:
        """Return tokens (N, 2, T) of pairs, their mask, and scores in [0, 1] as labels."""
        if split == "validation" and self.data_set == "sts2012":
            return None
        return pairs(self.folder, self.data_set, split, self.pretrained, self.tokens)

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the length of the longer sentence of each pair."""
        return examples["attention_mask"].sum(2).amax(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch with its padding cut to the longest sentence."""
        longest = int(self.lengths(examples).max())
        inputs = {name: examples[name][:, :, :longest] for name in ("input_ids", "attention_mask")}
        return Batch(inputs, examples["labels"])

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of the cosine, or in nats the cross entropy of each sentence's other view."""
        if output.dim() == 1:
            return F.mse_loss(output, targets)
        return F.cross_entropy(output / TEMPERATURE, torch.arange(len(output), device=output.device))

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return each pair's prediction and score."""
        return {"pairs": Rows(torch.stack([output, targets], dim=1).double())}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return Spearman's correlation, 0 if all predictions or all scores are equal, and the squared error."""
        from scipy.stats import spearmanr

        predictions, scores = sums["pairs"].cpu().T
        defined = min(len(predictions.unique()), len(scores.unique())) > 1
        correlation = spearmanr(predictions.numpy(), scores.numpy()).statistic if defined else 0.0
        return {"spearman": correlation, "loss": F.mse_loss(predictions, scores)}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations, without that of the training split."""
        return [Evaluation("train", when="never"), Evaluation("validation", when="end")]

    def phases(self) -> list[Phase]:
        """Return one phase that trains all but the word embeddings, half of all weights, which few pairs change."""
        return [Phase("fine-tune", learn=("encoder.encoder.*", "encoder.embeddings.LayerNorm.*"))]

    def files(self) -> list[Path]:
        """Return the files of the pairs and of the encoder."""
        return [*SETS[self.data_set].files(self.folder), *pretrained_files(self.pretrained)]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [SETS[self.data_set].SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find or download the pairs, and check that the encoder exists."""
        pretrained_files(self.pretrained)
        SETS[self.data_set].prepare(self.folder, tell)


class SentencePairs(nn.Module):
    """A model that returns the cosine (B,) of two sentences' mean tokens from tokens and mask (B, 2, T).

    With `contrast` it returns in training the cosines (B, B) between two views of the first sentences.
    """

    def __init__(self, encoder: nn.Module, *, contrast: bool = False) -> None:
        super().__init__()
        self.encoder, self.contrast = encoder, contrast

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if self.contrast and self.training:
            # dropout draws another mask for each copy
            input_ids, attention_mask = (given[:, :1].expand(-1, 2, -1) for given in (input_ids, attention_mask))
        real = attention_mask.flatten(0, 1)
        tokens = self.encoder(input_ids=input_ids.flatten(0, 1), attention_mask=real).last_hidden_state
        means = (tokens * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        first, second = means.unflatten(0, (-1, 2)).unbind(1)
        if self.contrast and self.training:
            return F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).T
        return F.cosine_similarity(first, second)


@lru_cache(maxsize=4)
def pairs(folder: Path | None, data_set: str, split: str, pretrained: str, tokens: int) -> dict[str, Tensor]:
    """Return a split of pairs as tokens (N, 2, tokens), mask and scores in [0, 1]."""
    first, second, scores = SETS[data_set].read(folder, split)
    tokenizer = load_tokenizer(pretrained)
    coded = [
        tokenizer(side, truncation=True, max_length=tokens, padding="max_length", return_tensors="pt")
        for side in (first, second)
    ]
    stacked = {name: torch.stack([side[name] for side in coded], dim=1) for name in ("input_ids", "attention_mask")}
    return {**stacked, "labels": torch.tensor(scores) / BEST_SCORE}
