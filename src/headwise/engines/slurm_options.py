"""What `--slurm name=value,...` may say: the resources of each job, and which of submitit's executors runs it."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from headwise.files.errors import StudyError

EXECUTORS = ("slurm", "local", "debug")
# these have a meaning wherever jobs run; the others are Slurm's own
SHARED = ("name", "timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")
# sbatch knows these, and submitit takes them as they are
PASSED_ON = ("reservation", "licenses")


@dataclass(frozen=True)
class SlurmOptions:
    """Hold the options of `--slurm`; None leaves a choice to the cluster. Times are minutes and seconds, memory is GB.

    `executor` is slurm, or local (processes of this machine) and debug (this process) to try a study out.
    `gpus_per_node` is 1 where the study runs on a GPU, `cpus_per_task` the threads of a run. `signal_delay_s` is how
    long before its end a job is told of it.
    """

    executor: str = "slurm"
    name: str = "headwise"
    timeout_min: int = 60
    mem_gb: float | None = None
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    reservation: str | None = None
    licenses: str | None = None
    setup: str | None = None
    signal_delay_s: int = 90

    @property
    def wants_gpu(self) -> bool:
        """Return whether a GPU is asked for by name."""
        return bool(self.gpus_per_node) or (self.gres or "").startswith("gpu")

    def parameters(self, device: str, threads: int) -> dict[str, Any]:
        """Return what submitit's AutoExecutor takes, for runs of so many threads on a device."""
        chosen = self
        if self.cpus_per_task is None:
            chosen = replace(chosen, cpus_per_task=threads)
        if device.startswith("cuda") and not self.wants_gpu:
            chosen = replace(chosen, gpus_per_node=1)
        given = {one.name: value for one in fields(chosen) if (value := getattr(chosen, one.name)) not in (None, False)}
        passed_on = {name: given.pop(name) for name in PASSED_ON if name in given}
        del given["executor"]
        setup = given.pop("setup", None)
        named = {name if name in SHARED else f"slurm_{name}": value for name, value in given.items()}
        if setup is not None:
            named |= {"slurm_setup": [setup], "local_setup": [setup]}
        return named | ({"slurm_additional_parameters": passed_on} if passed_on else {})


def read_slurm_options(texts: tuple[str, ...]) -> SlurmOptions:
    """Read the texts behind `--slurm`: name=value, several with commas between them.

    Raises:
        StudyError: naming the option that is unknown, is given twice or has a value of another kind.
    """
    found: dict[str, Any] = {}
    # a comma inside a value, as in a list of nodes, is followed by no name
    for part in (part for text in texts for part in re.split(r",(?=\s*\w+=)", text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        kind = _kinds().get(name)
        if kind is None:
            known = list(_kinds())
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise StudyError(f"--slurm {part!r}: there is no option {name!r}.{guess} Options: {', '.join(known)}.")
        if not equals or not value:
            raise StudyError(f"--slurm {part!r}: a value is missing. Write {name}=VALUE.")
        if name in found:
            raise StudyError(f"--slurm: {name} is given twice. Give it once.")
        found[name] = _value(part, value, kind)
    executor = found.get("executor", "slurm")
    if executor not in EXECUTORS:
        raise StudyError(f"--slurm executor={executor}: executors are {', '.join(EXECUTORS)}.")
    return SlurmOptions(**found)


def _kinds() -> dict[str, str]:
    """Return the kind of each option: the first word of its annotation."""
    return {one.name: str(one.type).split(" ")[0] for one in fields(SlurmOptions)}


def _value(part: str, value: str, kind: str) -> Any:
    if kind == "bool":
        if value not in ("true", "false"):
            raise StudyError(f"--slurm {part!r}: true or false is wanted.")
        return value == "true"
    if kind == "str":
        return value
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and "gpus" not in part):
        wanted = "a whole number" if kind == "int" else "a number"
        raise StudyError(f"--slurm {part!r}: {wanted} above 0 is wanted.")
    return number
