"""The configuration of one run, and its hash: the run's identity."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

BASELINE = "baseline"


class RunConfiguration(BaseModel):
    """Hold everything that changes a number of one run; nothing else belongs here."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # raised when the training loop itself changes its numbers
    format: int = 1
    study: str
    task: str
    task_source: str | None = None
    data: dict[str, str] = {}
    settings: dict[str, Any]
    method: str
    # every setting of every method of the arm, which `method` shows only where it differs from the default
    methods: list[dict[str, Any]] = []
    seed: int
    purpose: Literal["final", "trial"] = "final"
    threads: int = 1
    processes: int = 1
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def identity(self) -> str:
        """Give the 12 hexadecimal digits that name the run's folder."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def derive(seed: int, *names: object) -> int:
    """Derive an independent seed for one purpose, so that no draw shifts another."""
    text = json.dumps([seed, *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
