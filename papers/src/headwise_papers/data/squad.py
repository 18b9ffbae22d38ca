"""SQuAD 1.1's development questions (Rajpurkar et al. 2016, arXiv 1606.05250), with passages that contain the answers.

They are read from the official file, or from one rebuilt from the official site's pages, in which the position of an
answer is its first occurrence.
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
    """A question on a passage of an article, with every annotator's answer and the index of its first character."""

    article: str
    context: str
    question: str
    answers: list[tuple[str, int]]


def source(folder: Path | None) -> Source:
    """Return the official file as the source, or the rebuilt one if only that exists."""
    official, rebuilt = OFFICIAL.paths(folder)[0], REBUILT.paths(folder)[0]
    return REBUILT if rebuilt.is_file() and not official.is_file() else OFFICIAL


def described() -> DataSet:
    """Return the description of the data set."""
    forms = tuple(tuple(form.files) for form in (OFFICIAL, REBUILT))
    return DataSet(OFFICIAL.folder, forms, OFFICIAL.megabytes)


def prepare(folder: Path | None, tell: Callable[[str], None]) -> None:
    """Download the official file if neither exists, and check the MD5 of the existing one."""
    source(folder).prepare(folder, tell)


def files(folder: Path | None) -> list[Path]:
    """Return the file to read."""
    return source(folder).paths(folder)


def read(folder: Path | None) -> list[Question]:
    """Return all questions in the file's order, which keeps those of an article together.

    Raises StudyError for an invalid file, and for questions without an answer or whose answer is not in the passage at
    the given position.
    """
    (path,) = files(folder)
    try:
        questions = [
            Question(
                article=article["title"],
                context=paragraph["context"],
                question=entry["question"],
                answers=[_answer(answer) for answer in entry["answers"]],
            )
            for article in json.loads(read_text(path))["data"]
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is not a SQuAD file: {type(error).__name__}: {error}. {AGAIN}") from error
    invalid = [question for question in questions if not _is_valid(question)]
    if invalid or not questions:
        first = f", first {invalid[0].question!r}" if invalid else ""
        raise StudyError(
            f"{path}: {len(invalid)} of {len(questions)} questions have no answer that is in its passage{first}. "
            f"{AGAIN}"
        )
    return questions


def _answer(answer: dict[str, Any]) -> tuple[str, int]:
    return str(answer["text"]), int(answer["answer_start"])


def _is_valid(question: Question) -> bool:
    right = all(text and question.context[start : start + len(text)] == text for text, start in question.answers)
    return right and bool(question.answers) and bool(question.question.strip())
