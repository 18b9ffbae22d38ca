"""SQuAD's questions and passages as windows of tokens, with the answer's tokens and each token's characters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headwise_papers.data import squad
from headwise_papers.data.squad import Question
from headwise_papers.tasks.pretrained import load_tokenizer

Passage = Literal["whole", "sentence"]
# a full stop with closing quotes or brackets, then the space before a possible beginning of a sentence
SENTENCE_END = re.compile(r"[.!?][\"')\]]*(\s+)(?=[\"'(\[]?[A-Z])")
# splits of every eight articles in the order of their titles: two test, one validation, five training
PLACES = {0: "test", 1: "validation", 4: "test"}


@lru_cache(maxsize=2)
def questions(folder: Path | None, passage: Passage) -> tuple[Question, ...]:
    """Return all questions; with "sentence", passages are cut to the sentences of the first annotator's answer."""
    all_questions = squad.read(folder)
    return tuple(map(cut, all_questions) if passage == "sentence" else all_questions)


def numbers(all_questions: tuple[Question, ...], split: str) -> list[int]:
    """Return the indices of the questions of a split; no article is in two splits."""
    titles = sorted({question.article for question in all_questions})
    titles_of_split = {title for at, title in enumerate(titles) if PLACES.get(at % 8, "train") == split}
    return [number for number, question in enumerate(all_questions) if question.article in titles_of_split]


def cut(question: Question) -> Question:
    """Return the question with its passage cut to the sentences of the first answer.

    Answers elsewhere keep their text and count as correct.
    """
    text, start = question.answers[0]
    ends = [match.start(1) for match in SENTENCE_END.finditer(question.context)]
    starts = [match.end(1) for match in SENTENCE_END.finditer(question.context)]
    first = max((at for at in starts if at <= start), default=0)
    last = min((at for at in ends if at >= start + len(text)), default=len(question.context))
    answers = [(text, start - first), *question.answers[1:]]
    return replace(question, context=question.context[first:last], answers=answers)


def windows(questions_by_number: dict[int, Question], pretrained: str, tokens: int, shared: int) -> dict[str, Tensor]:
    """Return windows of `tokens` tokens, each a question and part of its passage.

    Windows of a long passage overlap by `shared` tokens. `number` is the question's key; `places` (N, T, 2) are the
    start and end of a token's characters in the passage, -1 for other tokens; `labels` (N, 2) are the first and last
    token of the answer, 0 (the class token) in windows without it.
    """
    coded = load_tokenizer(pretrained)(
        [question.question.strip() for question in questions_by_number.values()],
        [question.context for question in questions_by_number.values()],
        truncation="only_second",
        max_length=tokens,
        stride=shared,
        padding="max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_tensors="pt",
    )
    window_of = coded["overflow_to_sample_mapping"]
    inside = torch.stack([_in_passage(coded, at) for at in range(len(window_of))])
    places = coded["offset_mapping"].masked_fill(~inside[..., None], -1)
    answers = [question.answers[0] for question in questions_by_number.values()]
    spans = torch.tensor([(start, start + len(text)) for text, start in answers])[window_of]
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {
        **{name: coded[name] for name in names if name in coded},
        "number": torch.tensor(list(questions_by_number))[window_of],
        "places": places,
        "labels": _answer_tokens(places, spans),
    }


def _in_passage(coded: Any, window: int) -> Tensor:
    return torch.tensor([part == 1 for part in coded.sequence_ids(window)])


def _answer_tokens(places: Tensor, spans: Tensor) -> Tensor:
    """Return the first and last token (N, 2) of each span of characters, 0 if the window does not contain all of it."""
    begin, end = spans[:, :1], spans[:, 1:]
    inside = places[..., 0] >= 0
    overlapping = inside & (places[..., 0] < end) & (places[..., 1] > begin)
    complete = (inside & (places[..., 0] <= begin) & (places[..., 1] > begin)).any(1)
    complete &= (inside & (places[..., 0] < end) & (places[..., 1] >= end)).any(1)
    tokens = torch.arange(places.shape[1])
    first = torch.where(overlapping, tokens, places.shape[1]).amin(1)
    last = torch.where(overlapping, tokens, -1).amax(1)
    return torch.stack([first, last], dim=1) * complete[:, None]
