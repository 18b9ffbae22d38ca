"""Study: a task, the arms to compare on it, and the seeds."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializeAsAny

from headwise.lab.experiments.arm import Arm, read_arm, read_arms
from headwise.lab.experiments.configuration import BASELINE, RunConfiguration
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task_source import file_digests, files_read, module_of_file, source_digest, source_file
from headwise_verdict import StudyError
from headwise_verdict.results import AxisRecord, Claim, Premise

VALUES = re.compile(r"([\w.-]+)\s*=\s*\{([^{}]*)\}")


def read_sweep(text: str, task: Subject) -> tuple[AxisRecord, dict[str, Arm]]:
    """Return the axis in `NeuTRENO(strength={0,0.1})` or `baseline | epochs={1,2}`, and its arms by label.

    Raises:
        StudyError: if the text has no values or values in several places, or a value is not a number.
    """
    matches = VALUES.findall(text)
    if len(matches) != 1 or text.count("{") != 1 or text.count("}") != 1:
        raise StudyError(f"--sweep {text!r} needs one setting with values in braces, such as strength={{0,0.1,0.2}}.")
    name, inside = matches[0]
    values = [_number(value.strip(), text) for value in inside.split(",")]
    if len(values) < 2 or len(set(values)) < len(values):
        raise StudyError(f"--sweep {text!r} needs at least two values, each once.")
    arms: list[Arm] = []
    for value in sorted(values):
        try:
            arms.append(_plain(read_arm(VALUES.sub(f"{name}={_written(value)}", text), task), task))
        except StudyError as error:
            raise StudyError(f"--sweep {text!r}, at {name}={_written(value)}: {error}") from error
    labels = [arm.text for arm in arms]
    return AxisRecord(name=name, values=sorted(values), arms=labels, text=text), dict(zip(labels, arms))


def _written(value: float) -> str:
    """Return a value with all digits, and a whole number without a decimal point, as integer fields require."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _plain(arm: Arm, task: Subject) -> Arm:
    """Return the baseline if the value is the task's own, so that the same runs are not made twice."""
    return Arm(BASELINE) if arm.name == BASELINE and arm.task(task) == task else arm


def _number(value: str, text: str) -> float:
    try:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(value)
        return number
    except ValueError:
        raise StudyError(
            f"--sweep {text!r}: {value!r} is not a finite number, so an axis cannot order it. Give each as an arm: "
            "--method."
        ) from None


# the seven methods of the blog at its settings, and NeuTRENO at its DeiT setting
BLOG_METHODS = (
    "DropColumn(p=0.2)",
    "DropHead(p=0.2)",
    "RelaxedAttention(gamma=0.1)",
    "InputNoise(scale=0.01)",
    "InputNoise(scale=0.01, per_head=True)",
    "Decorrelation(strength=1.0)",
    "AttentionNormPenalty(strength=1.0)",
    "NeuTRENO(strength=0.6)",
)


class Scale(BaseModel):
    """One size of a study: settings of the task, and the number of seeds if it differs.

    Example:
        >>> from headwise.study import Scale
        >>> Scale(settings={"epochs": 2}, seeds=6).seeds
        6
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any] = {}
    seeds: int | None = Field(default=None, ge=1)


class Study(BaseModel):
    """A comparison: the task, the arms besides the baseline, the number of seeds, and how runs compute.

    Example:
        >>> import torch
        >>> from headwise.study import Study, Task, VisionTransformer
        >>> class Bright(Task):
        ...     epochs: int = 2
        ...     def model(self):
        ...         return VisionTransformer(
        ...             classes=2, image_size=8, channels=1, dim=16, depth=1, heads=2, head_dim=8, mlp_dim=16
        ...         )
        ...     def data(self, split):
        ...         images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(len(split)))
        ...         return images, (images.mean((1, 2, 3)) > 0.5).long()
        >>> study = Study(
        ...     name="bright", title="Bright", question="?", task=Bright(), task_place="bright.py:Bright",
        ...     methods=("DropHead(p=0.1)",), seeds=2
        ... )
        >>> study.arms
        ('baseline', 'DropHead(p=0.1)')
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    title: str
    question: str
    task: SerializeAsAny[Subject]
    # "file.py:Class" or "package.module:Class", from which a worker builds the task
    task_place: str
    # the arms besides the baseline, as text
    methods: tuple[str, ...] = BLOG_METHODS
    # further arms; each text is an axis: "NeuTRENO(strength={0,0.1,0.2})"
    sweeps: tuple[str, ...] = ()
    seeds: int = Field(default=10, ge=1)
    threads: int = Field(default=1, ge=1)
    processes: int = Field(default=1, ge=1)
    device: str = "cpu"
    compile: Literal["off", "step"] = "off"
    # whether every run records the health of its heads
    watch: bool = False
    # in the unit of the primary metric; a difference within it counts as none
    margin: float | None = Field(default=None, gt=0)
    claims: tuple[Claim, ...] = ()
    # what must hold for the claims to be meaningful; fixed, like them, before the final seeds
    premises: tuple[Premise, ...] = ()
    scales: dict[str, Scale] = {}
    # the scale that matches the settings; "other" if none does
    scale: str = ""
    notes: tuple[str, ...] = ()

    # cache of parsed arms and axes with the texts and task they come from; a copy with others parses again
    _read: tuple[tuple[Any, ...], dict[str, Arm], tuple[AxisRecord, ...]] | None = PrivateAttr(default=None)

    def _parsed_texts(self) -> tuple[dict[str, Arm], tuple[AxisRecord, ...]]:
        sources = (self.task, self.methods, self.sweeps)
        if self._read is None or not all(map(operator.is_, self._read[0], sources)):
            swept = [read_sweep(text, self.task) for text in self.sweeps]
            arms = {BASELINE: Arm(BASELINE)} | read_arms(self.methods, self.task)
            for _, axis_arms in swept:
                arms |= {label: arm for label, arm in axis_arms.items() if label not in arms}
            self._read = sources, arms, tuple(axis for axis, _ in swept)
        return self._read[1:]

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the labels of all arms, the baseline first; raises the errors of `parsed`."""
        return tuple(self.parsed)

    @property
    def parsed(self) -> dict[str, Arm]:
        """Return all arms by their labels, the baseline first; each text is parsed once.

        Raises:
            StudyError: if a text is not an arm, or two texts are the same arm.
        """
        return self._parsed_texts()[0]

    @property
    def axes(self) -> tuple[AxisRecord, ...]:
        """Return the axes that the sweeps define."""
        return self._parsed_texts()[1]

    def arm(self, text: str) -> Arm:
        """Return an arm of the study by its label, or parse another."""
        return self.parsed.get(text) or read_arm(text, self.task)

    def identity(self, trials: int = 0) -> str:
        """Return a hash of everything but the seeds, which distinguishes studies in the same folder."""
        parts = {
            "name": self.name,
            **self._source,
            "settings": self.task.model_dump(mode="json"),
            "arms": sorted(self.arms),
            "trials": trials,
            **self.computing,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    def configurations(self) -> list[RunConfiguration]:
        """Return the final runs, seed by seed, so that a stopped study has complete pairs."""
        return [self.configuration(arm, seed) for seed in range(self.seeds) for arm in self.arms]

    def configuration(self, arm: str, seed: int, **changes: Any) -> RunConfiguration:
        """Return the configuration of one run; `changes` set fields of it, and their `settings` override the arm's."""
        read = self.arm(arm)
        task = read.task(self.task)
        settings = task.model_dump(mode="json") | changes.pop("settings", {})
        return RunConfiguration(
            study=self.name,
            **self._source,
            data=self._digests_of(task),
            settings=settings,
            arm=arm,
            methods=read.resolved(),
            seed=seed,
            **self.computing,
            **changes,
        )

    @property
    def computing(self) -> dict[str, Any]:
        """Return how runs compute, without what is off."""
        compiled = {"compile": self.compile} if self.compile != "off" else {}
        return self.model_dump(include={"threads", "processes", "device"}) | compiled

    @property
    def _source(self) -> dict[str, Any]:
        # the location of a class or a file changes no number; its content does
        file = source_file(self.task_place)
        name = self.task_place.rpartition(":")[2]
        return {"task": name, "task_source": source_digest(file) if file else None}

    def _digests_of(self, task: Subject) -> dict[str, str]:
        # read large files only once; an arm may read others, such as another checkpoint to start from
        known: dict[tuple[Path, ...], dict[str, str]] = self.__dict__.setdefault("digests", {})
        files = tuple(files_read(task))
        if files not in known:
            known[files] = file_digests(task)
        return known[files]


def load_study_file(text: str) -> Study:
    """Return the study that "file.py:NAME" names; a task that its `task_place` names by a file is next to it.

    Raises:
        StudyError: if there is no such file or no such study in it.
    """
    place, _, name = text.rpartition(":")
    path = Path(place)
    found = vars(module_of_file(path))
    if not isinstance(study := found.get(name), Study):
        there = [other for other, value in found.items() if isinstance(value, Study)]
        raise StudyError(f"{path} has no study {name!r}. Studies there: {', '.join(there) or 'none'}.")
    module, _, task = study.task_place.rpartition(":")
    if not module.endswith(".py"):
        return study
    return study.model_copy(update={"task_place": f"{(path.parent / module).resolve()}:{task}"})
