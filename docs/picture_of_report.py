"""Take the README's picture of a report: its answer and its forest plot as a small PNG, in light and in dark.

    python docs/picture_of_report.py docs/results/digits docs/report.png

The folder is a study's, with its report.html, or one of kept results, whose report is then built from the kept files,
so that the picture agrees with docs/results.

Needs playwright and a Chromium on this machine (`pip install playwright`; HEADWISE_CHROMIUM names another executable).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from judge_again import kept_study
from playwright.sync_api import sync_playwright

from headwise.lab.studies.registry import load_study
from headwise_verdict.reporting.study_page import study_page
from headwise_verdict.results.stored import checked_analysis

WIDTH, MARGIN = 1120, 24
FOREST = "section#paired-differences"
# The table below the plot repeats it in numbers and is too large for the picture.
PICTURED = (
    f"section:not(#paired-differences), nav, .printing {{ display: none !important }} {FOREST} {{ margin-top: 0 }}"
)


def take(report: Path, picture: Path, scheme: str) -> None:
    """Write a picture of the report, from its title to the end of its forest plot, in a colour scheme."""
    executable = os.environ.get("HEADWISE_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, color_scheme=scheme)
        page.goto(report.resolve().as_uri())
        page.wait_for_selector("html[data-charts=ready]")
        page.add_style_tag(content=PICTURED)
        page.wait_for_selector(f"{FOREST} svg")
        end = page.locator(f"{FOREST} figure").evaluate(
            "figure => figure.getBoundingClientRect().bottom + window.scrollY"
        )
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": round(end) + MARGIN}
        page.screenshot(path=picture, clip=clip, full_page=True)
        browser.close()


def kept_report(folder: Path) -> str:
    """Return the report of kept results, without the parts that need the runs, such as learning curves."""
    analysis, study = checked_analysis(folder / "analysis.json"), load_study(folder.name).STUDY
    kept = kept_study(folder, analysis, study, "")
    named = {"name": study.name, "title": study.title, "question": study.question}
    return study_page(replace(kept, study=kept.study.model_copy(update=named)), analysis)


def main() -> None:
    """Read the command line and take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of a study, with its report.html, or of kept results")
    parser.add_argument(
        "picture", type=Path, help="where to write the light picture; the dark one gets -dark in its name"
    )
    options = parser.parse_args()
    report = options.folder / "report.html"
    if not report.is_file() and not (options.folder / "analysis.json").is_file():
        parser.error(f"{report} does not exist; make it with: headwise report {options.folder}")
    with tempfile.TemporaryDirectory() as folder:
        if not report.is_file():
            report = Path(folder) / "report.html"
            report.write_text(kept_report(options.folder), encoding="utf-8")
        take(report, options.picture, "light")
        take(report, options.picture.with_stem(options.picture.stem + "-dark"), "dark")


if __name__ == "__main__":
    main()
