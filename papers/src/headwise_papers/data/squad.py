"""SQuAD 1.1's development questions (Rajpurkar et al. 2016, arXiv 1606.05250): passages, and answers that stand in
them.

Read from the official file, or from one rebuilt from the official site's pages, in which each answer's place is the
first at which it occurs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.study import DataSet, StudyError
from headwise_papers.data.archive import Package, Source
from headwise_papers.data.text_files import AGAIN, read_text

OFFICIAL = Source(
    folder="squad",
    megabytes=4.9,
    files={"dev-v1.1.json": "3e85deb501d4e538b6bc56f786231552"},
    packages=(
        Package(
            addresses=("https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json",),
            checksum="3e85deb501d4e538b6bc56f786231552",
            members={"dev-v1.1.json": ""},
        ),
    ),
)
REBUILT = Source(folder="squad", files={"dev-v1.1.rebuilt.json": "de529e443e02b069bf6ea8dcf62c0017"})


@dataclass(frozen=True)
class Question:
    """Hold a question on a passage: its article's title, and every annotator's answer with the character it begins
    at."""

    article: str
    context: str
    question: str
    answers: list[tuple[str, int]]


def source(folder: Path | None) -> Source:
    """Choose the official file; the rebuilt one where only that is there."""
    official, rebuilt = OFFICIAL.paths(folder)[0], REBUILT.paths(folder)[0]
    return REBUILT if rebuilt.is_file() and not official.is_file() else OFFICIAL


def described() -> DataSet:
    """Return the data set as a task announces it."""
    forms = tuple(tuple(form.files) for form in (OFFICIAL, REBUILT))
    return DataSet(OFFICIAL.folder, forms, OFFICIAL.megabytes)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download the official file where none is there, and check the MD5 of what is."""
    source(folder).prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Name the file that is read."""
    return source(folder).paths(folder)


def read(folder: Path | None) -> list[Question]:
    """Read all questions in the file's order, so that those of an article stand together.

    Raises StudyError for what is no such JSON, and that counts and names questions without an answer or whose answer
    does not stand in its passage at the place given.
    """
    (path,) = files(folder)
    try:
        questions = [
            Question(
                article=article["title"],
                context=paragraph["context"],
                question=asked["question"],
                answers=[_answer(answer) for answer in asked["answers"]],
            )
            for article in json.loads(read_text(path))["data"]
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is no SQuAD file: {type(error).__name__}: {error}. {AGAIN}") from error
    wrong = [question for question in questions if not _stands(question)]
    if wrong or not questions:
        first = f", first {wrong[0].question!r}" if wrong else ""
        raise StudyError(
            f"{path}: {len(wrong)} of {len(questions)} questions have no answer that stands in its passage{first}. "
            f"{AGAIN}"
        )
    return questions


def _answer(answer: dict[str, Any]) -> tuple[str, int]:
    return str(answer["text"]), int(answer["answer_start"])


def _stands(question: Question) -> bool:
    right = all(text and question.context[start : start + len(text)] == text for text, start in question.answers)
    return right and bool(question.answers) and bool(question.question.strip())
