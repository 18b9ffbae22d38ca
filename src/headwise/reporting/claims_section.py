"""Lay out what was claimed, what was published, what was seen here, and whether both agree."""

from __future__ import annotations

from headwise.pages.shell import Cell, Column, Section, table
from headwise.results.claim_record import JudgedClaim

INTRO = (
    "A verdict follows from paired differences by seed and their intervals, which hold for all tests of a claim together "
    "with 95\u00a0%; a claim whose published effect this study would have missed with more than 20\u00a0% cannot be told."
)
TONES = {"agrees": "better", "does not agree": "worse", "cannot be told": "plain"}


def claims_section(claims: list[JudgedClaim]) -> list[Section]:
    """Return the section of the claims; none where the study has none."""
    if not claims:
        return []
    columns = [Column("claim", wide=True), Column("verdict"), Column("published", wide=True), Column("ours", wide=True)]
    rows = [
        [
            claim.text,
            Cell(claim.verdict, tone=TONES[claim.verdict], small=claim.why),
            Cell(claim.published_words or "–", small=claim.source),
            claim.ours or "–",
        ]
        for claim in claims
    ]
    return [Section("Claims", table(columns, rows, caption="Claims that this study tests", sort=False), INTRO)]
