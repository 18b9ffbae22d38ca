"""Study: a task, the methods to compare on it, and the seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from headwise.comparing.run.configuration import BASELINE, RunConfiguration
from headwise.comparing.task import Task
from headwise.comparing.task_source import file_digests, source_digest
from headwise.files.errors import StudyError

# the blog's seven methods at the blog's settings, and NeuTRENO at its DeiT setting
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


class Study(BaseModel):
    """Hold what is compared: the task, the arms besides the baseline, how many seeds, and how runs compute."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: str
    title: str
    question: str
    task: SerializeAsAny[Task]
    # "file.py:Class" or "package.module:Class", from which a worker builds the task
    task_place: str
    methods: tuple[str, ...] = BLOG_METHODS
    seeds: int = Field(10, ge=1)
    threads: int = Field(1, ge=1)
    processes: int = Field(1, ge=1)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    notes: tuple[str, ...] = ()

    @property
    def arms(self) -> tuple[str, ...]:
        """Give the labels of all arms, the baseline first."""
        return (BASELINE, *self.methods)

    def configurations(self) -> list[RunConfiguration]:
        """Give the final runs, seed by seed, so that a stopped study holds whole pairs."""
        return [self.configuration(arm, seed) for seed in range(self.seeds) for arm in self.arms]

    def configuration(self, arm: str, seed: int, **changes: Any) -> RunConfiguration:
        """Give the configuration of one run; `changes` are fields of it or, as `settings`, of the task."""
        settings = self.task.model_dump(mode="json") | changes.pop("settings", {})
        return RunConfiguration(
            study=self.name,
            **self._origin,
            settings=settings,
            method=arm,
            methods=resolved_methods(arm),
            seed=seed,
            threads=self.threads,
            processes=self.processes,
            device=self.device,
            dtype=self.dtype,
            **changes,
        )

    @property
    def _origin(self) -> dict:
        file, _, name = self.task_place.rpartition(":")
        if not file.endswith(".py"):
            return {"task": self.task_place, "data": self._digests}
        # where the file lies changes no number; what it says does
        source = source_digest(Path(file))
        return {"task": f"{Path(file).name}:{name}", "task_source": source, "data": self._digests}

    @property
    def _digests(self) -> dict[str, str]:
        # reading large data files once is enough
        if "digests" not in self.__dict__:
            self.__dict__["digests"] = file_digests(self.task)
        return self.__dict__["digests"]


def canonical_methods(texts: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Parse method texts and write each as its `repr`, its label everywhere; the baseline is always there."""
    written: dict[str, str] = {}
    for text in texts:
        if text.strip() == BASELINE:
            continue
        arm = _canonical(text)
        if arm in written:
            raise StudyError(f"--method {written[arm]!r} and {text!r} are the same arm, {arm}. Give one of them.")
        written[arm] = text
    return tuple(written)


def _canonical(text: str) -> str:
    from headwise import parse

    try:
        return " + ".join(map(repr, parse(text)))
    except ValueError as error:
        raise StudyError(f"--method {text!r}: {error}") from error


def resolved_methods(arm: str) -> list[dict]:
    """Give every setting of an arm's methods, defaults included: a default that changes is another run."""
    if arm == BASELINE:
        return []
    from headwise import parse

    return [{"name": type(method).__name__, "settings": method.settings()} for method in parse(arm)]
