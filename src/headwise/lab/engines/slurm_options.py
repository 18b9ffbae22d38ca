"""The options of `--slurm name=value,...`: the resources of each job, and the submitit executor that runs it."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any

from headwise_verdict import StudyError

EXECUTORS = ("slurm", "local", "debug")
# these options apply to every executor; the others are Slurm's own
SHARED = ("name", "timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")
# options of sbatch that submitit passes on unchanged
PASSED_ON = ("reservation", "licenses")


@dataclass(frozen=True)
class SlurmOptions:
    """The options of `--slurm`; None leaves a choice to the cluster. Times are in minutes or seconds, memory is in GB.

    `executor` is slurm, or local (processes of this machine) or debug (this process) to try a study out.
    `gpus_per_node` defaults to 1 if the study runs on a GPU, `cpus_per_task` to the threads of a run. `signal_delay_s`
    is how long before its time limit a job receives a signal.
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
        """Return whether the options request a GPU."""
        return bool(self.gpus_per_node) or (self.gres or "").startswith("gpu")

    def parameters(self, device: str, threads: int) -> dict[str, Any]:
        """Return the arguments of submitit's AutoExecutor for runs with `threads` threads on a device."""
        chosen = self
        if self.cpus_per_task is None:
            chosen = replace(chosen, cpus_per_task=threads)
        if device.startswith("cuda") and not self.wants_gpu:
            chosen = replace(chosen, gpus_per_node=1)
        values = {
            one.name: value for one in fields(chosen) if (value := getattr(chosen, one.name)) not in (None, False)
        }
        passed_on = {name: values.pop(name) for name in PASSED_ON if name in values}
        del values["executor"]
        setup = values.pop("setup", None)
        named = {name if name in SHARED else f"slurm_{name}": value for name, value in values.items()}
        if setup is not None:
            named |= {"slurm_setup": [setup], "local_setup": [setup]}
        return named | ({"slurm_additional_parameters": passed_on} if passed_on else {})


def read_slurm_options(texts: tuple[str, ...]) -> SlurmOptions:
    """Return the options in the texts of `--slurm`: name=value, separated by commas.

    Raises:
        StudyError: naming the option that is unknown, is given twice or has a value of the wrong kind.
    """
    options: dict[str, Any] = {}
    # a comma inside a value, as in a list of nodes, is not followed by a name and `=`
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
        if name in options:
            raise StudyError(f"--slurm: {name} is given twice. Give it once.")
        options[name] = _value(part, value, kind)
    executor = options.get("executor", "slurm")
    if executor not in EXECUTORS:
        raise StudyError(f"--slurm executor={executor}: executors are {', '.join(EXECUTORS)}.")
    return SlurmOptions(**options)


def _kinds() -> dict[str, str]:
    """Return the kind of each option: the first word of its annotation."""
    return {one.name: str(one.type).split(" ")[0] for one in fields(SlurmOptions)}


def _value(part: str, value: str, kind: str) -> Any:
    if kind == "bool":
        if value not in ("true", "false"):
            raise StudyError(f"--slurm {part!r}: write true or false.")
        return value == "true"
    if kind == "str":
        return value
    try:
        number = int(value) if kind == "int" else float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (number == 0 and "gpus" not in part):
        wanted = "a whole number" if kind == "int" else "a number"
        raise StudyError(f"--slurm {part!r}: write {wanted} above 0.")
    return number
