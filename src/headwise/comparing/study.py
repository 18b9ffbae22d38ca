"""Study: a task, the methods to compare on it, and the seeds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny

from headwise.comparing.arms.arm import read_arm
from headwise.comparing.run.configuration import BASELINE, RunConfiguration
from headwise.comparing.task import Task
from headwise.comparing.task_place import source_file
from headwise.comparing.task_source import file_digests, source_digest

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
        """Give the configuration of one run; `changes` are fields of it or, as `settings`, of the task over the arm's own."""
        read = read_arm(arm, self.task)
        settings = read.task(self.task).model_dump(mode="json") | changes.pop("settings", {})
        return RunConfiguration(
            study=self.name,
            **self._origin,
            settings=settings,
            arm=arm,
            methods=read.resolved(),
            seed=seed,
            threads=self.threads,
            processes=self.processes,
            device=self.device,
            dtype=self.dtype,
            **changes,
        )

    @property
    def _origin(self) -> dict[str, Any]:
        # where a class or a file lies changes no number; what it says does
        file = source_file(self.task_place)
        name = self.task_place.rpartition(":")[2]
        return {"task": name, "task_source": source_digest(file) if file else None, "data": self._digests}

    @property
    def _digests(self) -> dict[str, str]:
        # reading large data files once is enough
        if "digests" not in self.__dict__:
            self.__dict__["digests"] = file_digests(self.task)
        return self.__dict__["digests"]
