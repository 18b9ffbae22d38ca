"""One folder holds one study: another set of arms or settings gets a folder of its own, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headwise.experiments.study import Study
from headwise.files.durable import read_json
from headwise.files.errors import StudyError


def free_folder(folder: Path, study: Study, trials: int) -> Path:
    """Return `folder`, or beside it one named by the study's identity where `folder` holds another study."""
    if other_study(folder, study, trials) is None:
        return folder
    return folder.with_name(f"{folder.name}-{study.identity(trials)[:6]}")


def refuse_other_study(folder: Path, study: Study, trials: int) -> None:
    """Refuse to write over what a folder holds: another study, or more seeds of this one.

    Raises:
        StudyError: saying what the folder holds.
    """
    why = other_study(folder, study, trials) or _more_seeds(folder, study)
    if why:
        raise StudyError(
            f"{folder} holds {why}. Its report is not written over: choose another --out, or delete {folder}."
        )


def other_study(folder: Path, study: Study, trials: int) -> str | None:
    """Say which other study a folder holds, or None where it holds none or this one."""
    findings, known = read_json(folder / "findings.json"), read_json(folder / "study.json")
    if isinstance(findings, dict):
        return f"the findings of the study {findings.get('name', '?')}"
    if not isinstance(known, dict) or known.get("identity") == study.identity(trials):
        return None
    if "identity" not in known:
        return f"the study {known.get('name', '?')} of an earlier version"
    arms = [arm for arm in known.get("arms", []) if isinstance(arm, str)]
    missing = [arm for arm in arms if arm not in study.arms]
    added = [arm for arm in study.arms if arm not in arms]
    if known.get("name") != study.name or (not missing and not added):
        return f"the study {known.get('name', '?')} with other settings{_settings(known, study)}"
    parts = [f"with {', '.join(missing)}"] if missing else []
    parts += [f"without {', '.join(added)}"] if added else []
    return f"the study {study.name} {' and '.join(parts)}"


def _settings(known: dict[str, Any], study: Study) -> str:
    before, now = known.get("settings"), study.task.model_dump(mode="json")
    if not isinstance(before, dict):
        return ""
    changed = [f"{name} {before[name]}" for name, value in now.items() if name in before and before[name] != value]
    return f" ({', '.join(changed[:3])})" if changed else ""


def _more_seeds(folder: Path, study: Study) -> str | None:
    known = read_json(folder / "study.json")
    seeds = known.get("seeds") if isinstance(known, dict) else None
    if isinstance(seeds, list) and len(seeds) > study.seeds:
        return f"{len(seeds)} seeds of this study, and --seeds {study.seeds} would leave some out of its report"
    return None
