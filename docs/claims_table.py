"""Write the table of all kept studies, and one over all their claims, into docs/results/README.md, each between its two marks.

python docs/claims_table.py            write it
python docs/claims_table.py --check    say whether it is current
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from headwise.experiments.arm import canonical_arms
from headwise.experiments.configuration import BASELINE
from headwise.files.durable import read_json
from headwise.files.errors import StudyError
from headwise.results.claim_record import ClaimsRecord, Verdict
from headwise.results.stored import checked_findings
from headwise.studies.registry import load_study, study_names

RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- claims -->", "<!-- end of claims -->"
STUDIES = "<!-- studies -->", "<!-- end of studies -->"
COMMAND = re.compile(r"Command: (`[^`]+`)")
TRAINED = re.compile(r"\d+ runs, [\d.]+ minutes|[\d.]+ minutes(?=\.)")
HEAD = ["claim", "published figure", "ours [95 %]", "verdict", "scale", "study"]


def kept_claims(results: Path) -> dict[str, ClaimsRecord]:
    """Return the judged claims of every kept study, by the folder's name.

    Raises:
        StudyError: for a file that cannot be read.
    """
    found = {}
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        claims, findings = folder / "claims.json", folder / "findings.json"
        if claims.is_file():
            try:
                found[folder.name] = ClaimsRecord.model_validate_json(claims.read_text(encoding="utf-8"))
            except ValidationError as error:
                raise StudyError(f"{claims} does not hold claims: {error}. Keep the results again.") from error
        elif findings.is_file():
            record = checked_findings(findings)
            found[folder.name] = ClaimsRecord(study=record.name, scale=record.scale, claims=record.claims)
    return {name: record for name, record in found.items() if record.claims}


def table(results: Path) -> str:
    """Return the table as Markdown, with the counts of the verdicts above it."""
    kept = kept_claims(results)
    verdicts = [claim.verdict for record in kept.values() for claim in record.claims]
    counts = [f"{verdict} {verdicts.count(verdict)}" for verdict in get_args(Verdict) if verdict in verdicts]
    said = f"{len(verdicts)} claims of {len(kept)} studies: {', '.join(counts)}."
    rows = [HEAD, ["---"] * len(HEAD)]
    for name, record in kept.items():
        seeds = f", {record.seeds} seeds" if record.seeds else ""
        for claim in record.claims:
            verdict = claim.verdict_words + (f": {claim.why}" if claim.why else "")
            text = f"{claim.text} ({claim.source})" if claim.source else claim.text
            figures = [claim.published_words or "–", claim.ours or "–"]
            rows.append([text, *figures, verdict, f"{record.scale or 'default'}{seeds}", f"[{name}]({name}/README.md)"])
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([said, "", *lines, *(f"\n{words}" for words in made_otherwise(results))])


def studies(results: Path) -> str:
    """Return the table of the kept studies as Markdown, and under it the names of the built-in ones that were not run."""
    rows, run = [["study", "command", "size", "what came out"]], set()
    rows.append(["---"] * len(rows[0]))
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if not (folder / "analysis.json").is_file() and not (folder / "findings.json").is_file():
            continue
        run.add(folder.name)
        page = (folder / "README.md").read_text(encoding="utf-8")
        # a title, the question, the answer
        answer = " ".join(page.split("\n\n")[2].split())
        command, trained = COMMAND.search(page), TRAINED.search(page)
        cells = [f"[{folder.name}]({folder.name}/README.md)", command[1] if command else "–"]
        rows.append([*cells, trained[0] if trained else "–", answer])
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    left = [name for name in study_names() if name not in run]
    return "\n".join([*lines, *([f"\n**Not run**: {', '.join(left)}."] if left else [])])


def made_otherwise(results: Path) -> list[str]:
    """Name the kept results whose arms are not those that their study has now."""
    found = []
    for folder in sorted(path for path in results.iterdir() if (path / "analysis.json").is_file()):
        if folder.name not in study_names():
            continue
        study = load_study(folder.name).STUDY
        now = {BASELINE, *canonical_arms(study.methods, study.task), *(arm for axis in study.axes for arm in axis.arms)}
        kept = _kept_arms(folder / "analysis.json")
        more, fewer = [arm for arm in kept if arm not in now], sorted(now - set(kept))
        if more or fewer:
            parts = [f"with {', '.join(f'`{arm}`' for arm in more)}"] if more else []
            parts += [f"without {', '.join(f'`{arm}`' for arm in fewer)}"] if fewer else []
            found.append(f"[{folder.name}]({folder.name}/README.md) was made {' and '.join(parts)}, unlike the study as it is now.")
    return found


def _kept_arms(path: Path) -> list[str]:
    """Return the arms of a kept analysis, of whatever version."""
    found = read_json(path)
    entries = found.get("arms", found.get("methods")) if isinstance(found, dict) else None
    labels = [entry.get("label") for entry in entries or [] if isinstance(entry, dict)]
    if not labels or None in labels:
        raise StudyError(f"{path} does not say which arms it is of. Keep the results again.")
    return labels


def filled(page: str, content: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Return the page with `content` between its marks.

    Raises:
        StudyError: where the page does not have both marks, once and in their order.
    """
    first, last = marks
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in after or last in before + after:
        raise StudyError(f"the page needs one line {first!r} and, below it, one line {last!r}.")
    return f"{before}{first}\n{content}\n{last}{after}"


def main() -> None:
    """Write the table, or say whether it is current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where the table is not current")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the kept results")
    given = parser.parse_args()
    path = given.results / "README.md"
    try:
        page = path.read_text(encoding="utf-8")
        wanted = filled(page, table(given.results))
        if STUDIES[0] in page:
            wanted = filled(wanted, studies(given.results), STUDIES)
    except (OSError, StudyError, ValueError) as error:
        parser.exit(1, f"{error}\n")
    if given.check:
        parser.exit(*((0, "") if page == wanted else (1, f"{path} is not current: run python docs/claims_table.py\n")))
    path.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
