"""Text and JSON of strangers: what acts on terminals, spreadsheets and drawings instead of being shown is replaced.

So is what a terminal's encoding lacks.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import unicodedata
from typing import Any

# control characters except tab and line feed, marks that turn the direction of a text, and what no XML can hold
ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
# what is shown in its place
REPLACED = "\ufffd"
# by which a spreadsheet knows a formula
FORMULA = re.compile(r"[=+\-@\t\r\n]")
# how a character is written where the encoding lacks it, and its letters without marks do not say it
SPELLED = {
    "−": "-",
    "–": "-",
    "×": "x",
    "·": "*",
    "±": "+/-",
    "≥": ">=",
    "≤": "<=",
    "→": "->",
    "←": "<-",
    "√": "sqrt",
    "∞": "inf",
}
SPELLED |= {
    "“": '"',
    "”": '"',
    "’": "'",
    "‖": "||",
    "✓": "yes",
    "✗": "no",
    "Σ": "sum",
    "φ": "phi",
    "─": "-",
    "│": "|",
    "━": "-",
}
# no file of headwise nests this deep
DEEPEST = 100


def printable(value: Any) -> Any:
    """Return a text, or a JSON value with its texts, in which "\ufffd" stands for each character that acts."""
    if isinstance(value, str):
        return ACTING.sub(REPLACED, value)
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, (list, tuple)) else value


def spell_out(*streams: Any) -> None:
    """Let text streams write what their encoding lacks in plain characters: a minus sign of cp1252 is "-"."""
    codecs.register_error("headwise.spelled", _spelled)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="headwise.spelled")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(SPELLED.get(one) or _bare(one) or "?" for one in lacking), error.end


def _bare(character: str) -> str:
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()


def as_cell(value: Any) -> Any:
    """Return a value for a cell of a CSV file; a text that a spreadsheet would take for a formula begins with "'"."""
    if not isinstance(value, str):
        return value
    text = ACTING.sub(REPLACED, value)
    return f"'{text}" if FORMULA.match(value) and not _is_number(value) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_as_json(text: str | bytes) -> Any:
    """Return a JSON value.

    Raises:
        ValueError: if the text is not JSON, or nests deeper than any file of headwise, so that reading it would fail.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level, depth = [value], 0
    while level := [item for each in level if isinstance(each, (dict, list)) for item in _items(each)]:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return value


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value
