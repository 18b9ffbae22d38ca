"""Read the files of a study and its runs, refusing by name what does not hold what it should."""

from __future__ import annotations

import json
from pathlib import Path

AGAIN = "Delete it and run the study again: it goes on where it stopped."


def checked_study(path: Path) -> dict:
    """Return what study.json holds; raise ValueError naming each entry that is absent or of another kind."""
    study = _dictionary(path, read_json(path))
    metric = study.get("metric")
    fitting = {
        "methods": _all(str, study.get("methods")) and study["methods"],
        "baseline": isinstance(study.get("baseline"), str),
        "seeds": _all(int, study.get("seeds")),
        "metric": isinstance(metric, dict)
        and all(isinstance(metric.get(key), str) for key in ("name", "label"))
        and isinstance(metric.get("higher_is_better"), bool),
        "settings": isinstance(study.get("settings", {}), dict),
        "notes": _all(str, study.get("notes", [])),
        "runs": isinstance(study.get("runs", []), list) and all(map(_hash, study.get("runs", []))),
    }
    absent = [key for key in ("methods", "baseline", "seeds", "metric") if key not in study]
    wrong = [key for key, fits in fitting.items() if not fits and key not in absent]
    for words, keys in (("lacks", absent), ("holds something else than it should under", wrong)):
        if keys:
            raise ValueError(f"{path} {words} {', '.join(keys)}; run `headwise compare` on this folder again.")
    return study


def checked_config(path: Path) -> dict:
    """Return what config.json of a run holds; raise ValueError when it names no method or seed."""
    config = _dictionary(path, read_json(path))
    if not isinstance(config.get("method"), str) or not _number(config.get("seed")):
        raise ValueError(f"{path} names no method and seed. {AGAIN}")
    return config


def checked_result(path: Path) -> dict:
    """Return what result.json of a run holds; raise ValueError when that is no result."""
    result = _dictionary(path, read_json(path))
    if result.get("status") not in ("finished", "diverged") or not isinstance(result.get("metrics"), dict):
        raise ValueError(f"{path} holds no result: a status (finished, diverged) and metrics are missing. {AGAIN}")
    return result


def read_epochs(path: Path) -> list[dict]:
    """Return the lines of metrics.jsonl; raise ValueError for a line that names no epoch."""
    records = read_lines(path)
    for number, record in enumerate(records, 1):
        if not _number(record.get("epoch")):
            raise ValueError(f"{path}, line {number}, names no epoch. {AGAIN}")
    return records


def read_json(path: Path) -> dict:
    """Return the content of a JSON file; raise ValueError naming the file when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). {AGAIN}") from error


def read_lines(path: Path, *, torn_anywhere: bool = False) -> list[dict]:
    """Return the records of a file of JSON lines; empty when there is none. A torn last line is left out.

    Raises ValueError for a damaged line before the last, unless `torn_anywhere` says that those too are left out.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if torn_anywhere or number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}, is not valid JSON ({error}).") from error
        if isinstance(record, dict):
            records.append(record)
        elif not torn_anywhere:
            raise ValueError(f"{path}, line {number}, holds no record but {line.strip()[:40]}.")
    return records


def _dictionary(path: Path, found) -> dict:
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {json.dumps(found)[:40]}, where a dictionary should be. {AGAIN}")
    return found


def _hash(entry) -> bool:
    return isinstance(entry, str) or (isinstance(entry, dict) and isinstance(entry.get("hash"), str))


def _number(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _all(kind: type, values) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
