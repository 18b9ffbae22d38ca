"""Exact match and F1 of answers, by SQuAD's official evaluation (Rajpurkar et al. 2016, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def plain(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and extra spaces."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(text: str, answers: Iterable[str]) -> float:
    """Return 1 if a text equals one of the answers after normalisation by `plain`, else 0."""
    return float(any(plain(text) == plain(answer) for answer in answers))


def best_f1(text: str, answers: Iterable[str]) -> float:
    """Return the best F1, over the answers, of the words that a text shares with an answer, in [0, 1]."""
    return max(_f1(plain(text).split(), plain(answer).split()) for answer in answers)


def _f1(predicted: list[str], answer: list[str]) -> float:
    shared = (Counter(predicted) & Counter(answer)).total()
    return 2 * shared / (len(predicted) + len(answer)) if shared else 0.0
