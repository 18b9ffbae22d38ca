"""Answers that stand in a passage: a pretrained encoder finds their first and last token, on SQuAD's development
questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.experiments.evaluation import Sums
from headwise.study import Batch, DataSet, Evaluation, Metric, Phase, Rows, Task
from headwise_papers.data import squad
from headwise_papers.tasks.answer_overlap import best_f1, exact_match
from headwise_papers.tasks.passages import Passage, numbers, questions, windows
from headwise_papers.tasks.pretrained import load_encoder, pretrained_files


class Targets(NamedTuple):
    """Hold what windows are judged by: first and last token of the answer (N, 2), the question's number (N,), places
    (N, T, 2)."""

    tokens: Tensor
    number: Tensor
    places: Tensor


class AnswerExtraction(Task):
    """Fine-tune a pretrained encoder to find the answer of a question in its passage; train and test share no article.

    Exact match and F1 by the official rules, best over the annotators' answers. A passage that does not fit is read in
    several windows, of which the surest gives the answer.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("f1", "F1", unit="%", failure=0.0),
        Metric("exact", "exact match", unit="%", failure=0.0),
        Metric("loss", "nats per boundary", higher_is_better=False, unit="nats"),
    )

    pretrained: str = Field("", description="folder of an encoder of transformers; empty: MiniLM in its package")
    random_weights: bool = Field(False, description="the same shape with fresh weights")
    passage: Passage = Field("sentence", description="what is read: the whole passage, or the sentences of its answer")
    tokens: int = Field(64, ge=16, description="of question and passage together")
    shared_tokens: int = Field(16, ge=0, description="that neighbouring windows of a long passage share")
    answer_tokens: int = Field(15, ge=1, description="longest answer that is given")
    steps: int | None = 80
    batch_size: int = 8
    evaluation_batch_size: int = 32
    learning_rate: float = 1e-4
    schedule: Literal["constant", "cosine", "linear", "inverse_sqrt", "plateau"] = "linear"
    warmup: float = 0.1
    clip: float | None = 1.0
    head_statistics: tuple[str, ...] = ("stream_cosine", "final_cosine")

    def model(self) -> Extractor:
        """Load the encoder and give it a head."""
        return Extractor(load_encoder(self.pretrained, random=self.random_weights))

    def data(self, split: str) -> dict[str, Tensor]:
        """Return the windows of a split's questions, as `passages.windows` makes them."""
        asked = questions(self.folder, self.passage)
        own = {number: asked[number] for number in numbers(asked, split)}
        return windows(own, self.pretrained, self.tokens, self.shared_tokens)

    def lengths(self, examples: dict[str, Tensor]) -> Tensor:
        """Return the tokens of each window."""
        return examples["attention_mask"].sum(1)

    def batch(self, examples: dict[str, Tensor], generator: torch.Generator | None) -> Batch:
        """Cut the padding to the longest window of the batch."""
        longest = int(self.lengths(examples).max())
        names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in examples]
        inputs = {name: examples[name][:, :longest] for name in names}
        return Batch(inputs, Targets(examples["labels"], examples["number"], examples["places"][:, :longest]))

    def loss(self, output: Tensor, targets: Targets) -> Tensor:
        """Return the mean cross entropy of the first and the last token, in nats."""
        return F.cross_entropy(output.flatten(0, 1), targets.tokens.flatten())

    def count(self, output: Tensor, targets: Targets) -> Sums:
        """Keep the surest answer of each window: its question, how sure it is, its first character and the one behind
        it."""
        sure, first, last = surest(output.double(), targets.places[..., 0] >= 0, self.answer_tokens)
        each = torch.arange(len(sure), device=sure.device)
        found = (targets.number, sure, targets.places[each, first, 0], targets.places[each, last, 1])
        windows_read = torch.as_tensor(len(sure))
        return {
            "answers": Rows(torch.stack([part.double() for part in found], dim=1)),
            "loss": self.loss(output, targets).double() * windows_read,
            "windows": windows_read,
        }

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return F1, exact match and loss: each question is answered by its surest window."""
        asked = questions(self.folder, self.passage)
        best: dict[int, tuple[float, str]] = {}
        for number, sure, first, last in sums["answers"].tolist():
            text = asked[int(number)].context[int(first) : int(last)]
            best[int(number)] = max(best.get(int(number), (float("-inf"), "")), (sure, text))
        pairs = [(text, [answer for answer, _ in asked[number].answers]) for number, (_, text) in best.items()]
        return {
            "f1": sum(best_f1(*pair) for pair in pairs) / len(pairs),
            "exact": sum(exact_match(*pair) for pair in pairs) / len(pairs),
            "loss": sums["loss"] / sums["windows"],
        }

    def evaluations(self) -> list[Evaluation]:
        """Judge the test questions; those of the training are not asked again."""
        return [Evaluation("train", when="never"), Evaluation("validation", when="end")]

    def phases(self) -> list[Phase]:
        """Fine-tune everything but the table of words, half of all weights, which a few hundred questions hardly
        touch."""
        return [Phase("fine-tune", learn=("encoder.encoder.*", "encoder.embeddings.LayerNorm.*", "head.*"))]

    def files(self) -> list[Path]:
        """List the questions, and what makes the encoder."""
        return [*squad.files(self.folder), *pretrained_files(self.pretrained)]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [squad.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Find the questions, or download them; the encoder must be there."""
        pretrained_files(self.pretrained)
        squad.prepare(self.folder, tell)


class Extractor(nn.Module):
    """Return each token's logit to be an answer's first and its last: (B, 2, T)."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.head(self.encoder(**inputs).last_hidden_state).transpose(1, 2)


def surest(logits: Tensor, allowed: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of logits, the first and the last token (B,) of the best span of at most `longest` allowed tokens.

    How sure it is, against the class token's sum, which says that the window has no answer (Devlin et al. 2018, arXiv
    1810.04805).
    """
    first, last = logits.masked_fill(~allowed[:, None], float("-inf")).unbind(1)
    spans = first[:, :, None] + last[:, None, :]
    tokens = torch.arange(logits.shape[2], device=logits.device)
    length = tokens[None, :] - tokens[:, None]
    spans = spans.masked_fill((length < 0) | (length >= longest), float("-inf"))
    best, place = spans.flatten(1).max(1)
    return best - logits[:, :, 0].sum(1), place // logits.shape[2], place % logits.shape[2]
