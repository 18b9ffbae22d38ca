"""Draw the figures of every kept result from its kept files, and write the gallery of results.

python docs/site/gallery.py FOLDER    only the gallery and its figures, without Sphinx
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SITE = Path(__file__).resolve().parent
RESULTS = SITE.parent / "results"
if __name__ == "__main__":
    sys.path[:0] = [str(SITE.parent), *(str(SITE.parents[1] / part) for part in ("src", "verdict/src"))]

import keep_results  # noqa: E402

from headwise_verdict.files.ownership import claim, owned  # noqa: E402
from headwise_verdict.pages.shell import page  # noqa: E402
from headwise_verdict.reporting.difference_section import axis_sections, forest_section, panels_section  # noqa: E402
from headwise_verdict.reporting.export import figures_in, svg  # noqa: E402
from headwise_verdict.reporting.rebuild import findings_page  # noqa: E402
from headwise_verdict.results.analysis_record import KINDS_IN_WORDS, ClaimsRecord  # noqa: E402
from headwise_verdict.results.stored import checked_analysis, checked_findings, read_whole_json  # noqa: E402

FIGURES = "figures"
# folders without a study
AUDITED = "audit"
APART = (AUDITED, "sources")
COMMAND = "python docs/site/gallery.py FOLDER"


def write(results: Path, made: Path) -> None:
    """Write gallery.md and figures/<study>/*.svg for all kept results into `made`."""
    kept = [path for path in sorted(results.iterdir()) if (path / "README.md").is_file() and path.name != AUDITED]
    cards, names = [], [path.name for path in sorted(kept, key=_rank)]
    for name in names:
        target = made / FIGURES / name
        claim(target, [f"{figure}.svg" for figure, _ in specifications(results / name)], shared=True)
        drawn = [figure for figure, spec in specifications(results / name) if _put(target / f"{figure}.svg", svg(spec))]
        for old in owned(target) or ():
            if Path(old).stem not in drawn:
                (target / old).unlink(missing_ok=True)
        cards.append(_card(results / name, drawn))
    others = sorted(path.name for path in results.iterdir() if path.is_dir() and path.name not in (*names, *APART))
    _put(made / "gallery.md", _gallery(cards, names, others))


def shown(folder: Path) -> list[str]:
    """Return the names of the figures that the page of a kept result shows itself, in their order."""
    return re.findall(r"!\[[^\]]*\]\(([\w-]+)\.svg\)", (folder / "README.md").read_text(encoding="utf-8"))


def specifications(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the charts from the kept files of a study, by name; none if only its page was kept, or if that has
    figures.

    Raises:
        ValueError: if a kept file cannot be read.
    """
    if shown(folder):
        return []
    if (folder / "findings.json").is_file():
        return list(figures_in(findings_page(checked_findings(folder / "findings.json"))))
    if not (folder / "analysis.json").is_file():
        return []
    analysis = checked_analysis(folder / "analysis.json")
    kept = keep_results.kept_outcomes(analysis)
    fewer = {
        "outcomes": {name: analysis.outcomes[name] for name in kept},
        "trends": [t for t in analysis.trends if t.outcome in kept],
    }
    analysis = analysis.model_copy(update=fewer)
    # single runs are not kept: the points of seeds along an axis are omitted
    study: Any = SimpleNamespace(seeds=[])
    sections = [*forest_section(analysis), *panels_section(analysis), *axis_sections(study, analysis)]
    return list(figures_in(page("", sections)))


def figures_of(name: str, up: str) -> str:
    """Return the part of a kept result's page that shows its figures; `up` leads from the page to docs/."""
    figures = sorted((SITE.parent / "generated" / FIGURES / name).glob("*.svg"))
    if not figures:
        return ""
    shown = [f"![{_words(path.stem)}]({up}generated/{FIGURES}/{name}/{path.name})" for path in figures]
    return "\n\n".join(["\n\n## Figures", *shown, f"Drawn from the kept files by `{COMMAND}`."]) + "\n"


def _card(folder: Path, drawn: list[str]) -> str:
    lines = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    title = lines[0].removeprefix("# ")
    text = [line for line in lines[1:] if line and not line.startswith(("|", "#"))][:2]
    parts = [f"## [{title}](../results/{folder.name}/README.md)", *text]
    if (verdicts := _verdicts(folder / keep_results.CLAIMS)) is not None:
        parts.append(verdicts)
    if own := shown(folder):
        parts.append(f"![{_words(own[0])}](../results/{folder.name}/{own[0]}.svg)")
    elif drawn:
        first = next((name for name in drawn if name.startswith("paired-differences")), drawn[0])
        parts.append(f"![{_words(first)}]({FIGURES}/{folder.name}/{first}.svg)")
    return "\n\n".join(parts)


def _rank(folder: Path) -> int:
    """Sort studies with enough seeds for a verdict first, then other studies, then pages without figures."""
    if (folder / "analysis.json").is_file():
        return 0 if len(read_whole_json(folder / "analysis.json")["seeds"]) >= 6 else 1
    return 0 if (folder / "findings.json").is_file() else 2


def _verdicts(path: Path) -> str | None:
    """Return the verdicts of the study's claims, counted."""
    if not path.is_file():
        return None
    record = ClaimsRecord.model_validate_json(path.read_text(encoding="utf-8"))
    counted: dict[str, int] = {}
    for one in record.claims:
        kind = f" ({KINDS_IN_WORDS[one.kind]})" if one.kind in KINDS_IN_WORDS else ""
        counted[f"{one.verdict}{kind}"] = counted.get(f"{one.verdict}{kind}", 0) + 1
    counts = ", ".join(f"{verdict} {count}" for verdict, count in counted.items())
    return f"Verdicts of its claims: {counts}." + (f" Scale: {record.scale}." if record.scale else "")


def _gallery(cards: list[str], names: list[str], others: list[str]) -> str:
    intro = (
        "Every kept result: the question, the answer, the verdicts of its claims, and its figures. "
        "Tables, intervals, settings and the "
        "command that repeats it are on its page. By source: [results](../results/README.md); one table of all: "
        "[claims](../results/claims.md). "
        "Figures were saved with a result by `python docs/keep_results.py`, or are drawn from its kept files by "
        f"`{COMMAND}`."
    )
    toctree = "\n".join(["```{toctree}", ":hidden:", *(f"../results/{name}/README" for name in names), "```"])
    rest = f"No result is kept yet for: {', '.join(others)}." if others else ""
    return "\n\n".join(["# Gallery", intro, *cards, rest, toctree]) + "\n"


def _words(name: str) -> str:
    return re.sub(r"-+", " ", name)


def _put(path: Path, text: str) -> bool:
    # an unchanged file keeps its modification time, so that its page is not built again
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
    return True


if __name__ == "__main__":
    write(RESULTS, Path(sys.argv[1]))
