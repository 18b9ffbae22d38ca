"""A request of the command line, and the checks of its options."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from headwise.files.errors import suggest
from headwise.lab.engines.slurm_options import read_slurm_options
from headwise_verdict.files.errors import StudyError

ENGINES = ("local", "ray", "slurm")
# whether training steps are captured as CUDA graphs
GRAPHS = ("auto", "on", "off")


def is_of_file(study: str) -> bool:
    """Return whether a study is named by a file of the user's own: my_study.py:study."""
    return ".py:" in study


class Studies(Protocol):
    """A collection of studies by name; the command line provides the built-in ones."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def load(self, name: str) -> ModuleType | SimpleNamespace: ...

    def missing(self, name: str) -> str | None: ...

    def took(self, name: str, scale: str) -> str: ...


@dataclass(frozen=True)
class NoStudies:
    """An empty collection: only the user's own tasks can be compared."""

    names: tuple[str, ...] = ()

    def load(self, name: str) -> ModuleType | SimpleNamespace:
        """Raise StudyError: there is no study."""
        raise StudyError(f"there is no study {name!r}. Give --task FILE.py:CLASS.")

    def missing(self, name: str) -> str | None:
        """Return None: no package is known."""
        return None

    def took(self, name: str, scale: str) -> str:
        """Return an empty text: no kept runs are known."""
        return ""


@dataclass(frozen=True)
class Request:
    """The options of the command line; None leaves a choice to the study."""

    study: str = "digits"
    studies: Studies = NoStudies()
    methods: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    task: str | None = None
    # the command that trains once, the form in which its arguments are passed, and its outcomes: NAME:higher or
    # NAME:lower
    script: str | None = None
    arguments: str | None = None
    outcomes: tuple[str, ...] = ()
    timeout: float | None = None
    require_pairs: bool = False
    plan: bool = False
    rehearsal: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    # as written: name=value
    settings: tuple[str, ...] = ()
    scale: str | None = None
    seeds: int | None = None
    trials: int = 0
    jobs: int | None = None
    processes: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    # as written: name=value,...
    slurm: tuple[str, ...] = ()
    device: str | None = None
    graphs: str = "auto"
    data: Path | None = None
    watch: bool = False
    out: Path | None = None
    # print one JSON object on standard output, and all else on standard error
    as_json: bool = False
    command: str = "headwise compare"

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        name = (self.task or self.study).rpartition(":")[2]
        if self.script is not None:
            from headwise.lab.experiments.script import name_of

            name = name_of(self.script)
        return self.out or Path("results") / name

    @property
    def of_study(self) -> bool:
        """Return whether the request is for an installed study, not for the user's own task or script."""
        return self.task is None and self.script is None


def check(request: Request) -> None:
    """Raise StudyError for invalid options before anything is started."""
    _check_numbers(request)
    _check_script(request)
    if request.as_json and request.plan:
        raise StudyError("--json prints the verdicts, and --plan trains nothing. Leave one of them out.")
    if request.engine not in ENGINES:
        raise StudyError(f"--engine {request.engine!r} is not known. Engines: {', '.join(ENGINES)}.")
    if request.graphs not in GRAPHS:
        raise StudyError(f"--graphs {request.graphs!r} is not known. Choices: {', '.join(GRAPHS)}.")
    if request.graphs == "on" and request.script is not None:
        raise StudyError("--graphs on: a script takes its own steps. Leave --graphs out.")
    if request.ray_address is not None and request.engine != "ray":
        raise StudyError(f"--ray-address {request.ray_address} needs --engine ray.")
    if request.slurm and request.engine != "slurm":
        raise StudyError(f"--slurm {request.slurm[0]} needs --engine slurm.")
    read_slurm_options(request.slurm)
    _check_processes(request)
    if request.of_study and request.study not in request.studies.names and not is_of_file(request.study):
        raise StudyError(
            request.studies.missing(request.study)
            or f"there is no study {request.study!r}.{suggest(request.study, list(request.studies.names))} "
            f"Studies: {', '.join(request.studies.names)}; or give FILE.py:STUDY, or --task FILE.py:CLASS."
        )
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise StudyError(f"--out {request.out} is a file. Choose a folder.")
    if request.data is not None and request.data.is_file():
        raise StudyError(f"--data {request.data} (or HEADWISE_DATA) is a file. Choose the folder of the data set.")


def _check_numbers(request: Request) -> None:
    """Refuse numbers of seeds, trials, jobs and processes that are not whole or too small, and such a timeout."""
    least = {"seeds": 1, "trials": 0, "jobs": 1, "processes": 1}
    for name, smallest in least.items():
        value: Any = getattr(request, name)
        if value is None and name != "trials":
            continue
        if not isinstance(value, Integral) or isinstance(value, bool) or value < smallest:
            raise StudyError(
                f"{name}={value!r} is not a whole number of at least {smallest}. Give one, or leave it out."
            )
    timeout: Any = request.timeout
    if timeout is None:
        return
    if not isinstance(timeout, Real) or isinstance(timeout, bool):
        raise StudyError(f"timeout={timeout!r} is not a number. Give seconds above 0, or leave it out.")
    if not 0 < float(timeout) < math.inf:
        raise StudyError(f"--timeout {float(timeout):g}: give seconds above 0.")


def _check_script(request: Request) -> None:
    """Refuse options of scripts without a script, and options of tasks with one."""
    if request.script is None:
        only = {
            "--arguments": request.arguments,
            "--outcome": request.outcomes,
            "--timeout": request.timeout,
            "--require-pairs": request.require_pairs,
        }
        given = [name for name, value in only.items() if value]
        if given:
            raise StudyError(
                f"{', '.join(given)} belongs to --script. Give the command that trains once with --script."
            )
        return
    if request.task is not None:
        raise StudyError("--script and --task are two ways to say what is trained: pass one of the two.")
    sized = [f"--{name.replace('_', '-')}" for name, value in request.changes.items() if value is not None]
    if request.scale is not None:
        sized.append("--scale")
    if sized:
        raise StudyError(
            f"{sized[0]} applies to tasks only. A script takes its own arguments: write them in --script, or "
            "--set name=value."
        )
    if (request.processes or 1) > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise StudyError(
            'a script starts its own processes: write --script "torchrun --nproc-per-node 2 train.py", and start '
            "headwise once."
        )


def _check_processes(request: Request) -> None:
    """Refuse several processes with another number launched, with another engine, with --jobs or with --tune."""
    launched, requested = int(os.environ.get("WORLD_SIZE", "1")), request.processes
    if requested is not None and launched > 1 and requested != launched:
        raise StudyError(
            f"--processes {requested}, but {launched} processes were launched. Leave --processes out, or launch "
            f"{requested}."
        )
    if max(requested or 1, launched) == 1:
        return
    if request.engine != "local":
        raise StudyError(f"--engine {request.engine} gives each run one process. Leave --processes or --engine out.")
    if request.jobs is not None and request.jobs > 1:
        raise StudyError(f"--jobs {request.jobs}: runs of several processes run one after the other. Leave --jobs out.")
    if request.trials:
        raise StudyError("--tune works with one process a run. Tune with one, then run with several.")


def refuse_unused(request: Request) -> None:
    """Refuse options that have no meaning for a study that is not a table of arms × seeds."""
    unused = {
        "--method": request.methods,
        "--sweep": request.sweeps,
        "--set": request.settings,
        "--tune": request.trials,
        f"--engine {request.engine}": request.engine != "local",
        "--watch": request.watch,
        "--graphs": request.graphs != "auto",
        **{f"--{name.replace('_', '-')}": value for name, value in request.changes.items()},
    }
    given = [name for name, value in unused.items() if value]
    if given:
        raise StudyError(
            f"{request.study} is a study without arms, for which {', '.join(given)} has no meaning. "
            "It takes --seeds, --jobs, --device and --out."
        )
    if request.scale not in (None, "small"):
        raise StudyError(f"{request.study} has one scale: small. Leave --scale {request.scale} out.")
