"""The configuration of one run, and its hash: the run's identity."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

# names that scripts use for their learning rate, the most frequent first
RATES = ("lr", "learning_rate", "learning-rate", "optimizer.lr", "optim.lr", "optimizer.learning_rate")
BASELINE = "baseline"
# the baseline under another name, with its own random draws: its verdict must be "no evidence"
SAME = "same"


class RunConfiguration(BaseModel):
    """Everything that changes a number of one run; nothing else belongs here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # increased when a change of the training loop changes numbers
    format: int = 2
    study: str
    # the class name alone: the module of a class changes no number
    task: str
    task_source: str | None = None
    data: dict[str, str] = {}
    # settings of recipe and task, including the arm's changes
    settings: dict[str, Any]
    # in its canonical form: methods, where and when they act, changes
    arm: str
    # every setting of every method of the arm, which `arm` shows only where it differs from the default
    methods: list[dict[str, Any]] = []
    seed: int
    purpose: Literal["final", "trial"] = "final"
    threads: int = 1
    processes: int = 1
    device: str = "cpu"
    # what torch.compile compiles: nothing, or forward, loss and backward of a training step
    compile: Literal["off", "step"] = "off"

    @model_serializer(mode="wrap")
    def _leave_out_off(self, rest: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `compile` where it is off, so that runs keep the identity that they had before it was a field."""
        fields: dict[str, Any] = rest(self)
        return {name: value for name, value in fields.items() if (name, value) != ("compile", "off")}

    @property
    def draws(self) -> int:
        """Return the seed of all random draws except the choice of examples; the control arm `same` has its own."""
        return derive(self.seed, SAME) if self.arm == SAME else self.seed

    @property
    def identity(self) -> str:
        """Return the 12 hexadecimal digits that name the run's folder."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def derive(seed: int, *names: object) -> int:
    """Return an independent seed for one purpose, so that draws for one purpose do not shift those for another."""
    text = json.dumps([seed, *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
