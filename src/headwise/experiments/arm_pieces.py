"""Cut a text at marks that stand outside of brackets and quotes."""

from __future__ import annotations

from headwise.files.errors import StudyError

OPEN, CLOSE = "([{", ")]}"


def cut(text: str, marks: str) -> list[tuple[str, str]]:
    """Give the pieces of `text` with the mark before each ("" before the first); `marks` are single characters.

    Raises:
        StudyError: where a bracket or a quote is not closed.
    """
    pieces, begin, mark, depth, quote, escaped = [], 0, "", 0, "", False
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and not escaped else quote
            escaped = letter == "\\" and not escaped
        elif letter in "'\"":
            quote = letter
        elif letter in OPEN + CLOSE:
            depth += 1 if letter in OPEN else -1
            if depth < 0:
                raise StudyError(f"{text!r} closes a bracket that was not opened: {letter!r} at character {place + 1}.")
        elif letter in marks and not depth:
            pieces.append((mark, text[begin:place].strip()))
            begin, mark = place + 1, letter
    if quote or depth:
        raise StudyError(f"{text!r} does not close {'a quote' if quote else 'a bracket'}.")
    return [*pieces, (mark, text[begin:].strip())]


def split(text: str, mark: str) -> list[str]:
    """Give the pieces between marks, without them."""
    return [piece for _, piece in cut(text, mark)]
