"""Answer extraction from passages: a pretrained encoder finds the first and last token, on SQuAD's development set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Rows, Task
from headwise_papers.data import squad
from headwise_papers.tasks.answer_overlap import best_f1, exact_match
from headwise_papers.tasks.passages import Passage, numbers, questions, windows
from headwise_papers.tasks.pretrained import load_encoder, pretrained_files


class Targets(NamedTuple):
    """The targets of windows: first and last token of the answer (N, 2), question number (N,), places (N, T, 2)."""

    tokens: Tensor
    number: Tensor
    places: Tensor


class AnswerExtraction(Task):
    """Fine-tuning of a pretrained encoder to find a question's answer in its passage; splits share no article.

    Exact match and F1 follow the official rules, best over the annotators' answers. A passage that does not fit is
    divided into several windows, and the window with the highest score determines the answer.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("f1", "F1", unit="%", failure=0.0),
        Metric("exact", "exact match", unit="%", failure=0.0),
        Metric("loss", "nats per boundary", higher_is_better=False, unit="nats"),
    )

    pretrained: str = Field("", description="folder of a transformers encoder; empty: MiniLM in its package")
    random_weights: bool = Field(False, description="the same shape with fresh weights")
    passage: Passage = Field(
        "sentence", description="the text that is read: the whole passage, or the sentences of its answer"
    )
    tokens: int = Field(64, ge=16, description="of question and passage together")
    shared_tokens: int = Field(16, ge=0, description="that neighbouring windows of a long passage share")
    answer_tokens: int = Field(15, ge=1, description="longest answer that is returned")
    steps: int | None = 80
    batch_size: int = 8
    evaluation_batch_size: int = 32
    learning_rate: float = 1e-4
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "linear"
    warmup: float = 0.1
    clip: float | None = 1.0
    head_statistics: tuple[str, ...] = ("stream_cosine", "final_cosine")

    def model(self) -> Extractor:
        """Return the loaded encoder with a new head."""
        return Extractor(load_encoder(self.pretrained, random=self.random_weights))

    def data(self, split: str) -> dict[str, Tensor]:
        """Return the windows of a split's questions; see `passages.windows`."""
        all_questions = questions(self.folder, self.passage)
        of_split = {number: all_questions[number] for number in numbers(all_questions, split)}
        return windows(of_split, self.pretrained, self.tokens, self.shared_tokens)

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the number of tokens of each window."""
        return examples["attention_mask"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Return the batch with its padding cut to the longest window."""
        longest = int(self.lengths(examples).max())
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in examples]
        inputs = {name: examples[name][:, :longest] for name in names}
        return Batch(inputs, Targets(examples["labels"], examples["number"], examples["places"][:, :longest]))

    def loss(self, output: Tensor, targets: Targets) -> Tensor:
        """Return the mean cross entropy of the first and the last token, in nats."""
        return F.cross_entropy(output.flatten(0, 1), targets.tokens.flatten())

    def count(self, output: Tensor, targets: Targets) -> Sums:
        """Return each window's best answer (question, score, first character, end of the last one) and the loss."""
        scores, first, last = surest(output.double(), targets.places[..., 0] >= 0, self.answer_tokens)
        each = torch.arange(len(scores), device=scores.device)
        columns = (targets.number, scores, targets.places[each, first, 0], targets.places[each, last, 1])
        windows_read = torch.as_tensor(len(scores))
        return {
            "answers": Rows(torch.stack([part.double() for part in columns], dim=1)),
            "loss": self.loss(output, targets).double() * windows_read,
            "windows": windows_read,
        }

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return F1, exact match and loss; the window with the highest score answers each question."""
        all_questions = questions(self.folder, self.passage)
        best: dict[int, tuple[float, str]] = {}
        for number, score, first, last in sums["answers"].tolist():
            text = all_questions[int(number)].context[int(first) : int(last)]
            best[int(number)] = max(best.get(int(number), (float("-inf"), "")), (score, text))
        pairs = [(text, [answer for answer, _ in all_questions[number].answers]) for number, (_, text) in best.items()]
        return {
            "f1": sum(best_f1(*pair) for pair in pairs) / len(pairs),
            "exact": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "loss": sums["loss"] / sums["windows"],
        }

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations without the training split."""
        return [Evaluation("train", when="never"), Evaluation("validation", when="end")]

    def phases(self) -> list[Phase]:
        """Return one phase that trains all but the word embeddings, half of all weights, which few questions change."""
        return [Phase("fine-tune", learn=("encoder.encoder.*", "encoder.embeddings.LayerNorm.*", "head.*"))]

    def files(self) -> list[Path]:
        """Return the files of the questions and of the encoder."""
        return [*squad.files(self.folder), *pretrained_files(self.pretrained)]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [squad.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find or download the questions, and check that the encoder exists."""
        pretrained_files(self.pretrained)
        squad.prepare(self.folder, tell)


class Extractor(nn.Module):
    """A model that returns the logits (B, 2, T) of each token to be the first or last of an answer."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.head(self.encoder(**inputs).last_hidden_state).transpose(1, 2)


def surest(logits: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return score, first and last token (B,) of the best span of at most `longest` allowed tokens.

    The score is the span's sum of logits minus that of the class token, which means "no answer in this window"
    (Devlin et al. 2018, arXiv 1810.04805).
    """
    first, last = logits.masked_fill(~allowed[:, None], float("-inf")).unbind(1)
    spans = first[:, :, None] + last[:, None, :]
    tokens = torch.arange(logits.shape[2], device=logits.device)
    length = tokens[None, :] - tokens[:, None]
    spans = spans.masked_fill((length < 0) | (length >= longest), float("-inf"))
    best, place = spans.flatten(1).max(1)
    return best - logits[:, :, 0].sum(1), place // logits.shape[2], place % logits.shape[2]
