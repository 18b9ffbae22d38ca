"""Phase: a part of a run with its own data, settings, methods and beginning."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.files.errors import StudyError
from headwise.results.digests import CHECKPOINT

# the weights in the folder of a model
OTHERS = "model*.safetensors"


@dataclass(frozen=True)
class Phase:
    """Describe one part of a run; most runs have one.

    `changes` are settings of recipe and task, seen by `model`, `batch` and `loss` of this phase. Weights whose names
    match `carry` come from `start` ("previous": the phase before; "fresh": none; else a folder with a checkpoint), the
    others begin anew. Parameters whose names match `learn` are trained, the others stay. Patterns are those of a shell
    (`head.*`).

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
        """Return the folder of the checkpoint this phase starts from, None where it starts from none."""
        return None if self.start in ("previous", "fresh") else Path(self.start)


def checkpoint_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint's folder: a finished run's, or a model's in safetensors.

    Raises StudyError where the folder holds neither.
    """
    if (folder / CHECKPOINT).is_file():
        return [folder / CHECKPOINT]
    found = sorted(folder.glob(OTHERS))
    if not found:
        what = "holds no" if folder.is_dir() else "is no folder, so it holds no"
        raise StudyError(
            f"a phase starts from {folder}, which {what} {CHECKPOINT} (the folder of a run, results/STUDY/runs/HASH) "
            f"and no {OTHERS} (a model's folder). Check the path."
        )
    return found
