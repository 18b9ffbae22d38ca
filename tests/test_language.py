"""Phrases that a reader has to read twice stay out of code, messages and pages; each has a plain form."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# phrase → what to write instead
INSTEAD = {
    r"hangs? on (the|its|what|whether|where)\b": "depends on",
    r"[Ww]ith nothing beside": "alone",
    r"\bbeside (the|it|this|that|them|each|a|an|these)\b": "next to, or along with",
    r"of one core that others shared": "measured on a shared machine",
    r"\bquiet (machine|cores)": "idle machine",
    r"\bstays in when": "remains when",
    r"too little of its tokens' norm": "the tokens of a layer are nearly equal",
    r"[Tt]he settings stand in": "the settings are in",
    r'"""(Give|Returns|Tell whether) ': '"""Return ',
    r"\b[Ff]oretells?\b|\bforetold\b": "predict",
    r"\b[Ll]ikewise\b": "in the same way, or too",
    r"\b[Ww]hoever\b": "anyone who, or the person who",
    r"\b[Nn]obody\b": "no one, or the passive voice",
    r"\bthat nobody asked for\b": "that was not requested",
    r"(?<!run )\banew\b": "again",
    r"\bon the mean\b(?! (over|of))": "on average",
    r"\bin the place of\b": "instead of",
    r"\b(go|goes|going|went) on (from|with|at|where|to|training)\b": "continue, or resume",
    r"\b(others|training|same command|runs?|jobs|study) (go|goes) on\b": "continue, or resume",
    r"\bcould not go on\b|\bcannot go on\b": "cannot continue",
    r"\bone's own\b": "your own, or custom",
    r"\ba \w+ of (one's|its|their|his|your|our) own\b": "its own, or a separate",
    r"\b(methods|tasks|metrics|layers|kernels|draws|batches) of (its|their|your|our) own\b": "own, custom or separate",
    r"\b(folder|function|script|package|method|task|examples) of (yours|ours|theirs)\b": "your, our or their",
    r"\b(is|are|was|were) told (by|as|at|once|in|so|with)\b": "is reported",
    r"\btold (apart|by name)\b|\btells? .{1,20} apart\b": "distinguish",
    r"\bheld against (the|it|its|a|an|what|\d)": "compared with",
    r"\)? gave (None|none|\{)": "returned",
    r"\b[Gg]ave (a|an|no|the) (list|dict|tensor|module|metric|figure)s?\b": "returned",
    r"\botherwise than\b": "differently from",
    r"\b(?<!there )(?<!There )is no (number|Python|such|plain|single|matrix|schedule|axis|slice)\b": "is not a",
    r"\bare no (plain|such|numbers|means|matrices)\b": "are not",
    r"\bstands? (in|on|at|under|beside|behind|above|below|there) (the|a|an|its|no|each|one|this)\b": "is",
    r"\blies? (there|beside|behind)\b": "is",
    r"\bcomes? of (a|an|the|it|chance)\b": "comes from",
    r"\blook(s|ed)? (ahead|after)\b": "see later tokens, or check",
    r"\bthrice\b": "three times",
    r"\b(as|than) ever\b": "as before",
    r"\bunwell\b": "unhealthy",
    r"\bfor want of\b": "for lack of",
    r"\btakes? no part\b": "is left out",
    r"\bread off\b": "read from",
    r"\bto be had\b": "available",
    r"\bsays? nothing of\b|\bsaid of\b|\btells? of\b": "does not describe, or describes",
    r"\bthe worrying (side|end|one)s?\b": "unhealthy",
    r"\ba step's own\b": "of the step",
}
PLACES = (
    "src/**/*.py",
    "verdict/src/**/*.py",
    "papers/src/**/*.py",
    "papers/*.md",
    "docs/*.md",
    "docs/*.py",
    "docs/site/*.py",
    "benchmarks/*.py",
    "examples/**/*.py",
    "skills/**/*.md",
    "tests/*.py",
    "*.md",
    "llms.txt",
)
# the log's entries are old, and this file has the phrases
EXCEPT = ("log.md", Path(__file__).name)
FILES = sorted(
    path
    for pattern in PLACES
    for path in ROOT.glob(pattern)
    if path.name not in EXCEPT and ".egg-info" not in str(path)
)
# kinds that a reader meets in messages and on the pages of the first hour
SHOWN = {
    r"\b(is|are) (that|those) of\b": "comes from, uses, or the name of the thing",
    r"\bof (its|their|your|our|one's) own\b(?! (entries|worlds|kernel))": "its own, custom or separate",
    r"\bwould have been (seen|decided|found)\b": "80 % power to detect",
    r"\b(and|or) \S+ more like (it|them)\b": "in two other heads, or the number",
    r"\bcounts as hanging\b|\bis ended\b(?! after)": "is killed",
    r"\bwas asked for\b": "was requested",
    r"\btold (in|on|by) (a|the|standard)\b|\b(is|are|or|and) told\b": "reported, named or noted",
    r"\bone after the other\b.{0,20}\btogether\b": "runs execute one at a time",
    r"\bsays nothing: ": "is dead, or what is the matter",
    r"\bfor each of which\b|\bof the which\b": "two sentences",
    r"\bnot (un|in)(known|usual|common|likely|frequent)\w*\b": "the plain word",
}
FIRST_HOUR = (
    "README AGENTS docs/index docs/start docs/training_script docs/trainer docs/your_script docs/compare docs/judge "
    "docs/exit_codes docs/my_loss_exploded docs/audit docs/at_home docs/fine_tuning docs/published docs/own_task "
    "docs/tasks skills/headwise/SKILL"
).split()
# words that were fixed before the seeds of a study and are kept with its results
FIXED = re.compile(r"run anew on each prefix|source says of them|brings? along|a random shift, beside a random ")


ANY = re.compile("|".join(f"(?:{phrase})" for phrase in INSTEAD))


def phrases_in(text):
    """Return the lines of a text that contain a phrase, each with what to write instead."""
    return [
        f"line {number}: {line.strip()[:90]!r}: write {better!r}"
        for number, line in enumerate(text.splitlines(), 1)
        if ANY.search(line) and not FIXED.search(line)
        for phrase, better in INSTEAD.items()
        if re.search(phrase, line)
    ]


def current_part(path):
    """Return the text of a file; of the changelog, only the part that is not released."""
    text = path.read_text(encoding="utf-8")
    return text.split("\n## [", 2)[1] if path.name == "CHANGELOG.md" else text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_that_is_read_twice(path):
    lines = phrases_in(current_part(path))
    assert not lines, f"{path.relative_to(ROOT)}:\n" + "\n".join(lines)


def test_a_phrase_is_found_with_its_plain_form():
    assert phrases_in("the result does not hang on the order\n") == [
        "line 1: 'the result does not hang on the order': write 'depends on'"
    ]


# ordinary English, which no rule may refuse
ORDINARY = """
The loss depends on the mean over tokens, and there is no such file.
The run continues from its last checkpoint; it stands for the class token.
A value of 0 gives the plain model. The two figures lie in the same range.
Training on a GPU of the cluster; each node has its own queue.
It is no longer needed. The message tells you which option is missing.
You were told that the interval is wide; the best rate lies between two values.
"""


def test_ordinary_english_is_not_refused():
    assert phrases_in(ORDINARY) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "what one world foretells about another",
        "a figure that stands in the table",
        "the run goes on from its checkpoint",
        "a folder of its own",
        "its parts are told apart by name",
        "the method gave None",
        "a mask of one's own",
    ],
)
def test_the_dialect_is_refused(sentence):
    assert phrases_in(sentence)


def shown_in(path):
    """Return the texts of a file of code that a user may see, with their lines: strings with a space, no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and " " in node.value
        and id(node) not in docstrings
    ]


def kinds_in(texts):
    """Return the lines of shown texts that are of a kind, each with what to write instead."""
    return [
        f"line {number}: {text.strip()[:90]!r}: write {better!r}"
        for number, text in texts
        for kind, better in SHOWN.items()
        if re.search(kind, text)
    ]


def test_messages_are_of_no_kind_that_is_read_twice():
    code = [
        path
        for place in ("src", "verdict/src", "papers/src/headwise_papers/league")
        for path in sorted((ROOT / place).rglob("*.py"))
    ]
    assert len(code) > 300
    wrong = {str(path.relative_to(ROOT)): lines for path in code if (lines := kinds_in(shown_in(path)))}
    assert not wrong, wrong


@pytest.mark.parametrize("page", FIRST_HOUR)
def test_the_first_hour_is_of_no_kind_that_is_read_twice(page):
    text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
    wrong = kinds_in(enumerate(text.splitlines(), 1))
    assert not wrong, "\n".join(wrong)


def test_a_kind_is_found_in_a_message_and_not_in_a_docstring(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""The weights are those of a layer."""\nraise ValueError(f"{x}: these weights are those of {y}")\n'
    )
    assert kinds_in(shown_in(path)) == [
        "line 2: ': these weights are those of': write 'comes from, uses, or the name of the thing'"
    ]
