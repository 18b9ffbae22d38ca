"""List the installed studies for `headwise studies`."""

from __future__ import annotations

import textwrap

from headwise.studies.registry import PAPERS, load_study, study_names


def print_studies() -> None:
    """Print each study: its name, its question, its arms and seeds; then what another package would add."""
    for name in study_names():
        print(name)
        for line in _about(name):
            print(textwrap.fill(line, 80, initial_indent="    ", subsequent_indent="    "))
    missing = [name for name in PAPERS if name not in study_names()]
    if missing:
        print(f"\npip install headwise-papers adds {len(missing)} studies of the literature, such as {missing[0]}.")


def _about(name: str) -> list[str]:
    module = load_study(name)
    study = getattr(module, "STUDY", None)
    if study is None:
        return [module.TITLE, "figures of its own kind: no arms to choose"]
    scales = f"; scales {', '.join(study.scales)}" if study.scales else ""
    return [study.question, f"{len(study.arms)} arms x {study.seeds} seeds{scales}"]
