"""Write the tables of all claims and of all kept studies into docs/results/claims.md, each between its two marks.

python docs/claims_table.py            write them
python docs/claims_table.py --check    check whether they are current
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import get_args

from claims_forest import deciding
from claims_placed import APART, RESULTS, Placed, kept_claims, sources

from headwise.lab.studies.registry import load_study, study_names
from headwise_verdict.files.durable import read_json
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.analysis_record import Verdict
from headwise_verdict.results.records import ClaimKind

PAGE = "claims.md"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
STUDIES = "<!-- studies -->", "<!-- end of studies -->"
# figures that are kept next to a study's own have a command too, above the study's
COMMAND = re.compile(r"(?m)^Command: (`[^`]+`)")
TRAINED = re.compile(r"\d+ runs, [\d.]+ minutes|[\d.]+ minutes(?=\.)")
# the words of the page above the table of studies before the list of commands with fewer seeds
FEWER = re.compile(r"(a\s+command\s+names\s+fewer\s+seeds\s+than\s+the\s+study\s+has) \([^)]*\)")
HEAD = ["claim", "source", "method", "verdict", "setting", "published", "ours [95 %]", "study"]


def table(results: Path) -> str:
    """Return the table of all claims as Markdown, below the counts of the verdicts."""
    placed = [(source.name, one) for source in sources(results) for part in source.parts for one in part.claims]
    if not placed:
        records = kept_claims(results)
        placed = [
            ("–", Placed(name, record.scale, record.seeds, claim))
            for name, record in records.items()
            for claim in record.claims
        ]
    many = len({one.study for _, one in placed})
    counts = [f"{len(placed)} claims of {many} studies."]
    for kind in get_args(ClaimKind):
        verdicts = [one.claim.verdict for _, one in placed if one.claim.kind == kind]
        by_verdict = ", ".join(f"{one} {verdicts.count(one)}" for one in get_args(Verdict) if one in verdicts)
        if verdicts:
            counts.append(f"{APART.get(kind, kind).capitalize()}, {len(verdicts)}: {by_verdict}.")
    contrary = sum(one.claim.once_contrary for _, one in placed)
    counts += [f"{contrary} once stood contrary and were judged otherwise after the runs."] if contrary else []
    folded = [one for source in sources(results) for part in source.parts for one in part.folded]
    if folded:
        names = ", ".join(f"[{name}]({name}/README.md)" for name in dict.fromkeys(one.study for one in folded))
        counts.append(f"Not listed, because their runs cannot decide them: {len(folded)} of {names}.")
    rows = [HEAD, ["---"] * len(HEAD), *(_row(name, one) for name, one in placed)]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([" ".join(counts), "", *lines, *(f"\n{words}" for words in made_otherwise(results))])


def _row(source: str, one: Placed) -> list[str]:
    """Return the cells of a claim with its deciding test; its other tests are on the study's page."""
    test, kind = deciding(one), "" if one.kind == "published" else f" ({one.kind})"
    ours = one.claim.ours if test is None else test.ours
    more = f" (1 of {len(one.claim.tests)} parts)" if test is not None and len(one.claim.tests) > 1 else ""
    figures = [one.claim.published_words or "–", f"{ours}{more}" or "–"]
    study = f"[{one.study}]({one.study}/README.md)"
    return [
        one.line,
        f"{source}{kind}",
        ", ".join(one.methods) or "–",
        "; before: ".join(filter(None, [one.verdict, one.earlier])),
        one.setting if one.claim.kind in ("measured", "calculation") else f"{one.setting}; {APART[one.claim.kind]}",
        *figures,
        study,
    ]


def studies(results: Path) -> str:
    """Return the table of the kept studies as Markdown, and below it the names of the studies that were not run."""
    rows, kept = [["study", "command", "size", "what came out"]], set()
    rows.append(["---"] * len(rows[0]))
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if not (folder / "analysis.json").is_file() and not (folder / "findings.json").is_file():
            continue
        kept.add(folder.name)
        page = (folder / "README.md").read_text(encoding="utf-8")
        # the page begins with title, question and answer
        answer = " ".join(page.split("\n\n")[2].split())
        commands = list(COMMAND.finditer(page))
        command = commands[-1] if commands else None
        trained = TRAINED.search(page, command.start() if command else 0)
        cells = [f"[{folder.name}]({folder.name}/README.md)", command[1] if command else "–"]
        rows.append([*cells, trained[0] if trained else "–", answer])
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    not_run = [name for name in study_names() if name not in kept]
    return "\n".join([*lines, *([f"\n**Not run**: {', '.join(not_run)}."] if not_run else [])])


def with_fewer_seeds(results: Path) -> str:
    """Return the names of the kept studies that have fewer seeds than their scale, each with both numbers."""
    fewer = []
    for name, record in kept_claims(results).items():
        study = getattr(load_study(name), "STUDY", None) if name in study_names() else None
        if study is None or record.seeds is None:
            continue
        scale = study.scales.get(record.scale)
        planned = (scale.seeds if scale else None) or study.seeds
        if record.seeds < planned:
            fewer.append(f"{name}: {record.seeds} of {planned}")
    return ", ".join(fewer) or "none now"


def made_otherwise(results: Path) -> list[str]:
    """Return a sentence on each kept result whose arms differ from the current ones of its study."""
    sentences = []
    for folder in sorted(path for path in results.iterdir() if (path / "analysis.json").is_file()):
        if folder.name not in study_names():
            continue
        study = load_study(folder.name).STUDY
        current = set(study.arms)
        kept = _kept_arms(folder / "analysis.json")
        added, removed = [arm for arm in kept if arm not in current], sorted(current - set(kept))
        if added or removed:
            parts = [f"with {', '.join(f'`{arm}`' for arm in added)}"] if added else []
            parts += [f"without {', '.join(f'`{arm}`' for arm in removed)}"] if removed else []
            sentences.append(
                f"[{folder.name}]({folder.name}/README.md) was made {' and '.join(parts)}, unlike the study as it is "
                "now."
            )
    return sentences


def _kept_arms(path: Path) -> list[str]:
    """Return the arms of a kept analysis of any version."""
    analysis = read_json(path)
    entries = analysis.get("arms", analysis.get("methods")) if isinstance(analysis, dict) else None
    labels = [entry.get("label") for entry in entries or [] if isinstance(entry, dict)]
    if not labels or None in labels:
        raise StudyError(f"{path} does not name its arms. Keep the results again.")
    return labels


def filled(page: str, content: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return the page with `content` between its marks.

    Raises:
        StudyError: if the page does not have both marks, once each and in order.
    """
    first, last = marks
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in after or last in before + after:
        raise StudyError(f"the page needs one line {first!r} and, below it, one line {last!r}.")
    return f"{before}{first}\n{content}\n{last}{after}"


def main() -> None:
    """Write the tables, or check whether they are current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is not current")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    options = parser.parse_args()
    path = options.results / PAGE
    try:
        page = path.read_text(encoding="utf-8")
        renewed = filled(page, table(options.results))
        if STUDIES[0] in page:
            renewed = filled(renewed, studies(options.results), STUDIES)
            renewed = FEWER.sub(lambda found: f"{found[1]} ({with_fewer_seeds(options.results)})", renewed)
    except (OSError, StudyError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    if options.check:
        parser.exit(*((0, "") if page == renewed else (1, f"{path} is not current: run python docs/claims_table.py\n")))
    path.write_text(renewed, encoding="utf-8")


if __name__ == "__main__":
    main()
