"""The judged claims of all kept studies, and the place of each in its source, from docs/results/sources.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.analysis_record import AGAINST, HELD, KINDS_COUNTED, SIGNS, ClaimsRecord, JudgedClaim
from headwise_verdict.results.stored import checked_findings

RESULTS = Path(__file__).parent / "results"
SOURCES = "sources.toml"
# kinds of claims; all but the first are counted separately
KINDS = {"published": "published", "own": "own questions", "text": "text", "elsewhere": "other papers"}
# what is counted separately in every summary
APART = KINDS_COUNTED
# words of a line, and of an answer on the first screen
MOST_WORDS, MOST_OF_ANSWERS = 20, 28
METHOD = re.compile(r"\b([A-Z]\w+)\(")


@dataclass(frozen=True)
class Placed:
    """A judged claim with its study, its short line, and a caveat."""

    study: str
    scale: str
    seeds: int | None
    claim: JudgedClaim
    said: str = ""
    care: str = ""
    # the day until which it counted as the source's, and was contrary
    refiled: str = ""
    kind: str = "published"

    @property
    def line(self) -> str:
        """Return the claim in at most twenty words."""
        return self.said or self.claim.text

    @property
    def setting(self) -> str:
        """Return the scale and the number of seeds with which the claim was judged."""
        if self.seeds is None:
            return "calculation"
        return f"{self.scale or 'default'}, {self.seeds} seeds"

    @property
    def verdict(self) -> str:
        """Return the verdict in words; of an undecided claim, whether what was measured points the other way."""
        words = self.claim.verdict_words
        if self.claim.verdict != "undecided":
            return words
        # with an amount to exceed, a mean below 0 may still have the claim's direction
        ends = {
            test.mean * SIGNS[test.says] >= 0
            for test in self.claim.tests
            if test.verdict == "undecided" and test.says in SIGNS and test.mean is not None and test.by is None
        }
        return words if ends <= {True} else f"{words}, measured {'in part ' if True in ends else ''}the other way"

    @property
    def marks(self) -> str:
        """Return the marks behind a verdict: the setting, what the claim is if not measured, its earlier verdicts."""
        kind = self.claim.kind
        words = [self.setting] if kind in ("measured", "calculation") else [self.setting, APART[kind]]
        return " ".join([*(f"`{one}`" for one in words), self.earlier]).rstrip()

    @property
    def earlier(self) -> str:
        """Return the earlier verdicts with their dates and reasons, or ""."""
        words = [f"*{one.verdict} until {one.until}: {one.why}*" for one in self.claim.before]
        return "; ".join([*words, *([f"*the source's until {self.refiled}, and contrary*"] if self.refiled else [])])

    @property
    def methods(self) -> list[str]:
        """Return the names of the methods that the claim is about, including weight decay."""
        text = " ".join([self.claim.text, *(f"{test.arm} {test.against}" for test in self.claim.tests)])
        names = [name for name in METHOD.findall(text) if name != "Theorem"]
        names += [
            name for name in ("NeuTRENO", "SigmaReparam", "FeatScale", "Decorrelation") if name in self.claim.text
        ]
        names += (
            ["weight decay"]
            if re.search(r"(?<!no )\bdecay|norms of", self.claim.text) and "norm, warm-up" not in self.claim.text
            else []
        )
        return list(dict.fromkeys(names))


@dataclass(frozen=True)
class Part:
    """A table, figure or sentence of a source: its claims, or why nothing was run, or why there is nothing to test."""

    place: str
    kind: str = "published"
    claims: tuple[Placed, ...] = ()
    # claims whose runs cannot decide them: they are part of what is missing
    folded: tuple[Placed, ...] = ()
    missing: str = ""
    nothing: str = ""


@dataclass(frozen=True)
class Source:
    """A source with its parts in their own order, and sentences on what held, failed, is open, or was not tested."""

    key: str
    name: str
    title: str
    about: str
    held: str
    failed: str
    open: str
    untested: str
    topic: str = ""
    link: str = ""
    parts: tuple[Part, ...] = field(default=())

    def of_kind(self, kind: str) -> list[Placed]:
        """Return the claims of one kind."""
        return [one for part in self.parts if part.kind == kind for one in part.claims]

    @property
    def refiled(self) -> list[Placed]:
        """Return the claims that were contrary as the source's, and were filed apart after their runs."""
        return [one for part in self.parts for one in part.claims if one.refiled]

    @property
    def once_contrary(self) -> int:
        """Return how many of the source's claims stood contrary until they were judged otherwise or filed apart."""
        return sum(one.claim.once_contrary for one in self.of_kind("published")) + len(self.refiled)

    @property
    def against(self) -> str:
        """Return what did not hold, and how many claims once stood contrary."""
        many = self.once_contrary
        return f"{self.failed} Once contrary: {many}." if many else self.failed


def kept_claims(results: Path) -> dict[str, ClaimsRecord]:
    """Return the judged claims of every kept study, by the folder's name.

    Raises:
        StudyError: for a file that cannot be read.
    """
    records = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        claims, findings = folder / "claims.json", folder / "findings.json"
        if claims.is_file():
            try:
                records[folder.name] = ClaimsRecord.model_validate_json(claims.read_text(encoding="utf-8"))
            except ValidationError as error:
                raise StudyError(f"{claims} does not hold claims: {error}. Keep the results again.") from error
        elif findings.is_file():
            record = checked_findings(findings)
            records[folder.name] = ClaimsRecord(study=record.name, scale=record.scale, claims=record.claims)
    return {name: record for name, record in records.items() if record.claims}


def sources(results: Path) -> list[Source]:
    """Return every source with its claims in their places; empty if the folder has no sources.toml.

    Raises:
        StudyError: if a claim has no place or two, a name matches no claim, a line is too long, or a sentence rests on
            a verdict that has changed.
    """
    path = results / SOURCES
    if not path.is_file():
        return []
    records, used = kept_claims(results), set()
    placed, problems = [], []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["source"]:
        parts = []
        for part in entry.pop("part", []):
            kind, claims = part.get("kind", "published"), []
            folded = [{"of": name} for name in part.pop("folded", [])]
            for reference in [*part.pop("claims", []), *folded]:
                one = _find_claim(records, reference["of"], problems)
                if one is None:
                    continue
                name, claim = one
                if (name, claim.text) in used:
                    problems.append(f"{reference['of']!r} is in two places")
                used.add((name, claim.text))
                record = records[name]
                texts = {key: reference[key] for key in ("said", "care", "refiled") if key in reference}
                claims.append(Placed(name, record.scale, record.seeds, claim, kind=kind, **texts))
            if folded and any(one.claim.verdict in (*HELD, *AGAINST) or one.claim.once_contrary for one in claims):
                problems.append(f"{part.get('place')!r} folds a claim that is decided, or was contrary")
            claims, folds = ([], claims) if folded else (claims, [])
            if kind not in KINDS or bool(claims) + ("missing" in part) + ("nothing" in part) != 1:
                problems.append(
                    f"{part.get('place')!r} needs claims, or why there are none, and a kind of {', '.join(KINDS)}"
                )
            parts.append(Part(claims=tuple(claims), folded=tuple(folds), **part))
        for name, verdict in entry.pop("rests", {}).items():
            one = _find_claim(records, name, problems)
            if one and one[1].verdict != verdict:
                problems.append(
                    f"{entry['key']} rests on {verdict!r} of {name!r}, which is {one[1].verdict!r} now: read its "
                    "sentences again"
                )
        placed.append(Source(parts=tuple(parts), **entry))
    problems += [
        f"{name}: {claim.text!r} is in no place"
        for name, record in records.items()
        for claim in record.claims
        if (name, claim.text) not in used
    ]
    problems += [
        f"{words!r} has more than {most} words"
        for one in placed
        for lines, most in ((_lines(one), MOST_WORDS), (_answers(one), MOST_OF_ANSWERS))
        for words in lines
        if len(words.split()) > most
    ]
    problems += _wrongly_refiled(placed)
    if problems:
        raise StudyError("\n".join([f"{path} does not match the kept results:", *problems]))
    return placed


def _wrongly_refiled(all_sources: list[Source]) -> list[str]:
    return [
        f"{one.line!r} is refiled, and is the source's still, or never was contrary"
        for source in all_sources
        for one in source.refiled
        if one.kind == "published" or not (one.claim.verdict == "contrary" or one.claim.once_contrary)
    ]


def _answers(source: Source) -> list[str]:
    return [source.held, source.failed, source.open, source.untested]


def _lines(source: Source) -> list[str]:
    lines: list[str] = []
    for part in source.parts:
        lines += [part.missing, part.place, *(line for one in part.claims for line in (one.line, one.care))]
        lines += [earlier.why for one in part.claims for earlier in one.claim.before]
    return lines


def _find_claim(records: dict[str, ClaimsRecord], name: str, problems: list[str]) -> tuple[str, JudgedClaim] | None:
    study, _, start = name.partition(": ")
    claims: list[Any] = (
        [claim for claim in records[study].claims if claim.text.startswith(start)] if study in records else []
    )
    if len(claims) != 1:
        problems.append(f"{name!r} finds {len(claims)} claims")
        return None
    return study, claims[0]
