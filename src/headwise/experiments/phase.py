"""Phase: a part of a run with its own data, settings, methods and initial weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.files.errors import StudyError
from headwise.results.digests import CHECKPOINT

# pattern of the weight files in a model's folder
OTHERS = "model*.safetensors"


@dataclass(frozen=True)
class Phase:
    """One part of a run; most runs have a single phase.

    `changes` are settings of recipe and task, seen by `model`, `batch` and `loss` of this phase. Weights whose names
    match `carry` come from `start` ("previous": the previous phase; "fresh": none; else a folder with a checkpoint),
    the others are initialized. Parameters whose names match `learn` are trained, the others stay fixed. Patterns are
    those of a shell (`head.*`).

    Example:
        >>> from headwise.study import Phase
        >>> probe = Phase("probe", changes={"epochs": 20}, methods=False, carry=("encoder.*",), learn=("head.*",))
        >>> probe.start
        'previous'
    """

    name: str
    data: str = "train"
    changes: dict[str, Any] = field(default_factory=dict)
    start: str | Path = "previous"
    methods: bool = True
    carry: tuple[str, ...] = ("*",)
    learn: tuple[str, ...] = ("*",)

    @property
    def folder(self) -> Path | None:
        """Return the folder of the checkpoint this phase starts from, or None if it starts from none."""
        return None if self.start in ("previous", "fresh") else Path(self.start)


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the weight files in a checkpoint's folder: of a finished run, or of a model in safetensors.

    Raises StudyError if the folder contains neither.
    """
    if (folder / CHECKPOINT).is_file():
        return [folder / CHECKPOINT]
    files = sorted(folder.glob(OTHERS))
    if not files:
        lacks = "holds no" if folder.is_dir() else "is no folder, so it holds no"
        raise StudyError(
            f"a phase starts from {folder}, which {lacks} {CHECKPOINT} (the folder of a run, results/STUDY/runs/HASH) "
            f"and no {OTHERS} (a model's folder). Check the path."
        )
    return files
