"""Subject: what a study compares, with its settings, phases, metrics and files. It is a `Task` or a `Script`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from headwise.lab.experiments.evaluation import Metric
from headwise.lab.files.data_set import DataSet
from headwise_verdict import StudyError
from headwise_verdict.results import RunFiles

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
    checkpoint = RunFiles(folder).checkpoint
    if checkpoint.is_file():
        return [checkpoint]
    files = sorted(folder.glob(OTHERS))
    if not files:
        lacks = "holds no" if folder.is_dir() else "is not a folder, so it contains no"
        raise StudyError(
            f"a phase starts from {folder}, which {lacks} {checkpoint.name} (the folder of a run, "
            f"results/STUDY/runs/HASH) and no {OTHERS} (a model's folder). Check the path."
        )
    return files


class Subject(BaseModel):
    """The settings of what a study compares, and the declaration of its metrics."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    title: ClassVar[str] = ""
    question: ClassVar[str] = "Which attention regularizers beat the plain model, paired by seed?"
    # the first metric decides, on the evaluation `decides_on`; if empty, `metric` under `metric_name` is the only one
    metrics: ClassVar[tuple[Metric, ...]] = ()
    decides_on: ClassVar[str] = "test"
    metric_name: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "%"
    # the value of `metric` that a diverged run counts as: chance; None leaves diverged runs out
    failure: ClassVar[float | None] = None

    _folder: Path | None = PrivateAttr(None)

    def has_setting(self, name: str) -> bool:
        """Return whether there is a setting of this name."""
        return name in type(self).model_fields

    def setting(self, name: str) -> Any:
        """Return the value of a setting."""
        return getattr(self, name)

    def phases(self) -> list[Phase]:
        """Return the phases of a run in their order."""
        return [Phase("train")]

    def files(self) -> list[Path]:
        """Return the files the data comes from; their content is part of every run's identity."""
        return []

    def data_sets(self) -> list[DataSet]:
        """Return the data sets that `prepare` makes available; none if the data comes with packages."""
        return []

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Make the data available once before the runs start, for example by a download."""

    def located(self, folder: Path | None) -> Self:
        """Return the subject with its data in `folder`; where data is stored changes no number."""
        self._folder = folder
        return self

    @property
    def folder(self) -> Path | None:
        """Return the folder given by `--data` or HEADWISE_DATA."""
        return self._folder

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the declared metrics, the deciding one first, and the loss if it is not among them."""
        single = Metric(self.metric_name, "", self.higher_is_better, self.unit, self.failure)
        declared = self.metrics or (single,)
        known = any(metric.name == "loss" for metric in declared)
        return declared if known else (*declared, Metric("loss", higher_is_better=False, unit="nats"))

    def primary(self) -> str:
        """Return the name of the deciding outcome."""
        return f"{self.decides_on}/{self.all_metrics()[0].name}"
