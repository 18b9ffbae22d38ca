"""Lay out what was claimed, what was published, what was seen here, and whether both agree."""

from __future__ import annotations

from headwise.pages.shell import Cell, Column, Section, table
from headwise.results.claim_record import JudgedClaim, JudgedPremise

INTRO = (
    "A claim holds where each of its tests does at 5 %; it is contradicted where one of them does so in intervals that "
    "hold for all its tests together. Where a premise fails, a claim is not testable here, whatever its interval says."
)
TONES = {"as published": "better", "contrary": "worse"}
STATES = {True: "holds", False: "fails", None: "not recorded"}


def claims_section(claims: list[JudgedClaim], premises: list[JudgedPremise] | None = None) -> list[Section]:
    """Return the section of the claims, and of what they rest on; none where the study has none."""
    if not claims:
        return []
    columns = [Column("claim", wide=True), Column("verdict"), Column("published", wide=True), Column("ours", wide=True)]
    rows = [
        [
            claim.text,
            Cell(claim.verdict_words, tone=TONES.get(claim.verdict, "plain"), small=claim.why),
            Cell(claim.published_words or "–", small=claim.source),
            claim.ours or "–",
        ]
        for claim in claims
    ]
    claimed = Section("Claims", table(columns, rows, caption="Claims that this study tests", sort=False), INTRO)
    return [claimed, *_premises(premises or [])]


def _premises(premises: list[JudgedPremise]) -> list[Section]:
    if not premises:
        return []
    columns = [Column("premise", wide=True), Column("here"), Column("ours", wide=True)]
    rows = [[one.text or one.name, STATES[one.holds], one.ours or "–"] for one in premises]
    return [
        Section(
            "Premises", table(columns, rows, caption="What must be true for the claims to mean anything", sort=False)
        )
    ]
