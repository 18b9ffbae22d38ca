"""Write the page and plot of each source, and the summary in docs/results/README.md, from kept claims and sources.toml.

python docs/source_pages.py            write them
python docs/source_pages.py --check    check whether they are current
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from claims_forest import forest
from claims_placed import APART, KINDS, RESULTS, Part, Placed, Source, sources
from claims_table import filled

from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.analysis_record import HELD

MARKS = "<!-- sources -->", "<!-- end of sources -->"
# the sentence of counts on the first page of the project, if it has these marks
COUNTS = "<!-- claims counted -->", "<!-- end of claims counted -->"
COUNTED = (
    "as published",
    "smaller or larger",
    "no effect",
    "contrary",
    "margin too wide",
    "undecided",
    "not testable",
    "not run",
    "once contrary",
    "once as published",
)
ANSWERS = ("held", "did not hold: seen instead", "undecided", "could not be tested here")
COMMAND = "python docs/source_pages.py"


def column(one: Placed) -> str:
    """Return the column of the table of counts for a claim's verdict."""
    if one.claim.verdict in HELD[1:]:
        return "smaller or larger"
    return "not testable" if one.claim.verdict == "not testable here" else one.claim.verdict


def row_of(cells: Sequence[object]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def counts(claims: list[Placed], missing: int = 0, refiled: int = 0) -> list[object]:
    """Return the number of claims with each verdict, and of those that once had another; a dash for none.

    Claims that were contrary as the source's until they were filed apart count with it, as `refiled`, and nowhere else.
    """
    columns = [column(one) for one in claims]
    numbers = [columns.count(name) for name in COUNTED[:-3]]
    held = sum(
        one.claim.verdict not in HELD and any(earlier.verdict in HELD for earlier in one.claim.before) for one in claims
    )
    contrary = refiled + sum(one.claim.once_contrary and not one.refiled for one in claims)
    return [one or "–" for one in [*numbers, missing, contrary, held]]


def counted(name: str, source: Source) -> list[str]:
    """Return the rows of counts of a source's own claims: those that were measured, then each other kind."""
    claims, missing = source.of_kind("published"), sum(bool(part.missing) for part in source.parts)
    measured = [one for one in claims if one.claim.kind == "measured"]
    rows = [row_of([name, *counts(measured, missing, len(source.refiled))])]
    for kind, words in APART.items():
        if of_this_kind := [one for one in claims if one.claim.kind == kind]:
            rows.append(row_of([f"– {words}", *counts(of_this_kind)]))
    return rows


def table_of_counts(all_sources: list[Source]) -> list[str]:
    """Return the table of counts: the claims of each source, then those that are no source's own."""
    head = ["claims of", *COUNTED]
    lines = [row_of(head), row_of(["---", *["---:"] * len(COUNTED)])]
    for one in all_sources:
        lines += counted(_named(one), one)
    for kind, words in KINDS.items():
        of_this_kind = [claim for one in all_sources for claim in one.of_kind(kind)]
        if kind != "published" and of_this_kind:
            lines.append(row_of([f"apart: {words}", *counts(of_this_kind)]))
    return lines


def sentence(all_sources: list[Source]) -> str:
    """Return the sentence that counts the sources' own claims: what was measured, and what counts apart."""
    claims = [claim for one in all_sources for claim in one.of_kind("published")]
    measured = [column(one) for one in claims if one.claim.kind == "measured"]
    missing = sum(bool(part.missing) for one in all_sources for part in one.parts)
    apart = [f"{sum(one.claim.kind == kind for one in claims)} {words}" for kind, words in APART.items()]
    return (
        f"{len(measured)} claims of the {len(all_sources)} sources were written down before their figures were known "
        f"and measured in runs. {measured.count('as published')} came out as published, and "
        f"{measured.count('smaller or larger')} in the published direction with another size. "
        f"{measured.count('contrary')} came out contrary, {measured.count('no effect')} without effect and "
        f"{measured.count('undecided')} undecided. {measured.count('margin too wide')} have a margin too wide to tell, "
        f"and {measured.count('not testable')} could not be tested here. {missing} experiments were not run. "
        f"Counted apart: {', '.join(apart[:-1])} and {apart[-1]}. "
        f"{sum(one.once_contrary for one in all_sources)} of the sources' claims were first judged contrary, and "
        "otherwise, or filed as own questions, after the runs. Their rows name the earlier verdict and the day."
    )


def screen(all_sources: list[Source]) -> str:
    """Return the summary for docs/results/README.md: the answers for each source, and the counts of its verdicts."""
    head = ["source", *ANSWERS]
    lines = [row_of(head), row_of(["---"] * len(head))]
    lines += [row_of([_named(one), *_answers(one)]) for one in all_sources]
    return "\n".join([*lines, "", sentence(all_sources), "", *table_of_counts(all_sources)])


def _named(source: Source) -> str:
    topic = f", {source.topic}" if source.topic else ""
    return f"[{source.name}](sources/{source.key}.md){topic}"


def _answers(source: Source) -> list[str]:
    return [source.held, source.against, source.open, source.untested]


def page(source: Source) -> str:
    """Return the page of a source: its answers, its plot, and every part in the source's order."""
    published = [one for part in source.parts if part.kind == "published" for one in part.claims]
    title = f"[{source.title}]({source.link})" if source.link else source.title
    lines = [f"# {source.name}", "", f"{title}. {source.about}", ""]
    lines += [row_of(ANSWERS), row_of(["---"] * len(ANSWERS)), row_of(_answers(source)), ""]
    if forest(published):
        lines += [f"![Effects of the published claims, with intervals of 95 %]({source.key}.svg)", ""]
        lines += [
            "One row per claim: the part that decides it. Full: the published direction was seen; open: "
            "undecided, or the margin too wide; triangle: contrary or no effect. "
            "Claims without an interval, and those that could not be tested, are only in the table.",
            "",
        ]
    lines += [row_of(["claims", *COUNTED]), row_of(["---", *["---:"] * len(COUNTED)])]
    lines += [*counted("measured", source), ""]
    lines += ["## In the source's order", "", *_table([part for part in source.parts if part.kind == "published"]), ""]
    for kind, words in KINDS.items():
        parts = [part for part in source.parts if part.kind == kind]
        if kind != "published" and parts:
            lines += [f"## Apart: {words}", "", *_table(parts), ""]
    lines += [
        "What each verdict means: [results](../README.md#verdicts). Intervals, tests, premises and settings are on "
        "the pages of the studies.",
        "",
        f"Written by `{COMMAND}` from the kept results.",
    ]
    return "\n".join(lines) + "\n"


def _table(parts: list[Part]) -> list[str]:
    head = ["where", "claim", "verdict, setting", "study"]
    lines = [row_of(head), row_of(["---"] * len(head))]
    for part in parts:
        if part.missing or part.nothing:
            what = part.missing or f"nothing to test: {part.nothing}"
            pages = dict.fromkeys(f"[{one.study}](../{one.study}/README.md)" for one in part.folded)
            verdict = "**not run**" if part.missing else "–"
            lines.append(row_of([part.place, what, verdict, ", ".join(pages) or "–"]))
        lines_of = [one.line for one in part.claims]
        for at, one in enumerate(part.claims):
            # the study distinguishes equal sentences on several data sets
            line = f"{one.line} ({one.study})" if lines_of.count(one.line) > 1 else one.line
            claim = f"{line} *{one.care}*" if one.care else line
            study = f"[{one.study}](../{one.study}/README.md)"
            lines.append(row_of(["" if at else part.place, claim, f"**{one.verdict}** {one.marks}", study]))
    return lines


def current_texts(results: Path) -> dict[Path, str]:
    """Return the text of every file that is generated from the kept results.

    Raises:
        StudyError: if sources.toml does not match the results, or README.md has no marks.
    """
    all_sources, readme = sources(results), results / "README.md"
    texts = {readme: filled(readme.read_text(encoding="utf-8"), screen(all_sources), MARKS)}
    first = results.parent.parent / "README.md"
    if first.is_file() and COUNTS[0] in (front := first.read_text(encoding="utf-8")):
        texts[first] = filled(front, sentence(all_sources), COUNTS)
    for one in all_sources:
        texts[results / "sources" / f"{one.key}.md"] = page(one)
        if plot := forest(one.of_kind("published")):
            texts[results / "sources" / f"{one.key}.svg"] = plot
    return texts


def main() -> None:
    """Write the pages, or check which are not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    options = parser.parse_args()
    try:
        files = current_texts(options.results)
    except (OSError, StudyError, ValueError, TypeError) as error:
        parser.exit(1, f"{error}\n")
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    obsolete = [path for path in (options.results / "sources").glob("*.*") if path not in files]
    if options.check and stale + obsolete:
        parser.exit(1, f"not current: {', '.join(path.name for path in stale + obsolete)}. Run {COMMAND}.\n")
    for path in () if options.check else stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    for path in () if options.check else obsolete:
        path.unlink()


if __name__ == "__main__":
    main()
