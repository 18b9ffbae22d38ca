"""Subject: what a study is about, with its settings, metrics and files. A `Task`, or a script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr

from headwise.experiments.evaluation import Metric
from headwise.experiments.phase import Phase
from headwise.files.data_set import DataSet


class Subject(BaseModel):
    """Hold the settings of what is compared, and say what is measured of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    title: ClassVar[str] = ""
    question: ClassVar[str] = "Which attention regularizers beat the plain model, paired by seed?"
    # the first decides, on the evaluation named by `decides_on`; none: `metric` under `metric_name`
    metrics: ClassVar[tuple[Metric, ...]] = ()
    decides_on: ClassVar[str] = "test"
    metric_name: ClassVar[str] = "accuracy"
    higher_is_better: ClassVar[bool] = True
    unit: ClassVar[str] = "%"
    # what a diverged run counts as in `metric`: chance; None leaves it out
    failure: ClassVar[float | None] = None

    _folder: Path | None = PrivateAttr(None)

    def has_setting(self, name: str) -> bool:
        """Return whether there is a setting of this name."""
        return name in type(self).model_fields

    def setting(self, name: str) -> Any:
        """Return the value of a setting."""
        return getattr(self, name)

    def phases(self) -> list[Phase]:
        """Return the parts of a run in their order."""
        return [Phase("train")]

    def files(self) -> list[Path]:
        """List the files the data comes from: their content is part of every run's identity."""
        return []

    def data_sets(self) -> list[DataSet]:
        """List what `prepare` makes ready, to be told with its size before; none where the data comes with packages."""
        return []

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Make the data ready once before the runs start, for example by a download."""

    def located(self, folder: Path | None) -> Self:
        """Return it as one that finds its data in `folder` (where data lies changes no number)."""
        self._folder = folder
        return self

    @property
    def folder(self) -> Path | None:
        """Name the folder given by `--data` or HEADWISE_DATA."""
        return self._folder

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the declared metrics, the deciding one first, and the loss where it is not among them."""
        short = Metric(self.metric_name, "", self.higher_is_better, self.unit, self.failure)
        found = self.metrics or (short,)
        known = any(metric.name == "loss" for metric in found)
        return found if known else (*found, Metric("loss", higher_is_better=False, unit="nats"))

    def primary(self) -> str:
        """Name the outcome that decides."""
        return f"{self.decides_on}/{self.all_metrics()[0].name}"
