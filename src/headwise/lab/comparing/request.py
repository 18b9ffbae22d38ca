"""A request of the command line, and the checks of its options."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Protocol

from headwise.files.errors import suggest
from headwise.lab.engines.slurm_options import read_slurm_options
from headwise_verdict import StudyError
from headwise_verdict.files import argument, option

ENGINES = ("local", "ray", "slurm")
# whether training steps are captured as CUDA graphs
GRAPHS = ("auto", "on", "off")
# what torch.compile compiles
COMPILED = ("off", "step")


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
    """The options of `headwise compare`, each declared here alone; None leaves a choice to the study."""

    study: str = argument(
        "digits",
        help="Run this study (headwise studies lists them), or your own: FILE.py:STUDY.",
        show_default="digits",
    )
    studies: Studies = NoStudies()
    methods: tuple[str, ...] = option(
        (),
        "--method",
        help="Compare this arm instead of the study's: 'DropHead(p=0.1) + RelaxedAttention()', "
        "'NeuTRENO(strength=0.6) @ 2-5', 'baseline | weight_decay=0.1'. Repeat for more.",
    )
    sweeps: tuple[str, ...] = option(
        (), "--sweep", help="Compare arms along an axis: 'NeuTRENO(strength={0,0.3,0.6})'. Repeat for more."
    )
    # as written: name=value
    settings: tuple[str, ...] = option(
        (), "--set", help="Set name=value in all arms. Repeat for more. STUDY --help lists the names."
    )
    scale: str | None = option(None, help="Run the study at this size, if it has several.")
    task: str | None = option(None, help="Compare on your own task instead: FILE.py:CLASS.")
    script: str | None = option(
        None, help="Compare with your own training script: the command that trains once, 'python train.py --epochs 3'."
    )
    outcomes: tuple[str, ...] = option(
        (), "--outcome", help="Compare this outcome of the script: val_loss:lower. Repeat for more; the first decides."
    )
    arguments: str | None = option(
        None, help="Pass changes after '|' to the script in this form: argparse, hydra, environment or yaml:PATH."
    )
    timeout: float | None = option(None, help="Kill a run of the script after this many silent seconds.")
    require_pairs: bool = option(
        False, "--require-pairs", help="Stop if two arms of a seed differ in initial weights or data."
    )
    plan: bool = option(False, "--plan", help="Try every arm for a few steps, print the plan, and stop.")
    no_rehearsal: bool = option(False, "--no-rehearsal", help="Start at once, without trying the arms.")
    seeds: int | None = option(None, min=1, help="Train each arm with this many seeds. A verdict needs six.")
    epochs: int | None = option(None, min=1, help="Train for this many epochs.")
    train_size: int | None = option(None, min=1, help="Train on this many examples, drawn for each seed.")
    test_size: int | None = option(None, min=1, help="Test on this many examples, the same in all runs.")
    trials: int = option(0, "--tune", min=0, help="Tune each arm with this many trials, scored on validation data.")
    jobs: int | None = option(
        None, min=1, help="Run this many at a time. Results do not change. Default: one per core."
    )
    processes: int | None = option(
        None, min=1, help="Train each run with this many processes; runs execute one at a time."
    )
    engine: str = option("local", help="Run on this engine: local, ray or slurm.")
    ray_address: str | None = option(
        None, help="Use the Ray cluster at this address. Default: the running one, or a new one."
    )
    # as written: name=value,...
    slurm: tuple[str, ...] = option(
        (),
        help="Request these resources for each Slurm job: partition=gpu,gpus_per_node=1,timeout_min=60; "
        "executor=local tries it without Slurm. See docs/slurm.md.",
    )
    device: str | None = option(None, help="Train on cpu or cuda. Default: cuda if available.")
    graphs: str = option("auto", help="Capture training steps as CUDA graphs: auto, on or off. A CPU has none.")
    compile: str = option("off", help="Compile training steps by torch.compile: off or step.")
    data: Path | None = option(None, envvar="HEADWISE_DATA", help="Read the data set from this folder.")
    watch: bool = option(False, "--watch", help="Record the health of every head in each run.")
    out: Path | None = option(None, help="Write results into this folder. Default: results/STUDY.")
    as_json: bool = option(False, "--json", help="Print one JSON object; progress goes to standard error.")
    command: str = "headwise compare"

    @property
    def changes(self) -> dict[str, int | None]:
        """Return the sizes of the task, with None for those of the study."""
        return {"epochs": self.epochs, "train_size": self.train_size, "test_size": self.test_size}

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
    if request.compile not in COMPILED:
        raise StudyError(f"--compile {request.compile!r} is not known. Choices: {', '.join(COMPILED)}.")
    if request.compile != "off" and request.graphs == "on":
        raise StudyError(f"--graphs on --compile {request.compile}: a compiled step is not captured. Leave one out.")
    if request.compile != "off" and request.script is not None:
        raise StudyError(f"--compile {request.compile}: a script takes its own steps. Leave --compile out.")
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
            "`headwise studies` lists them; or give FILE.py:STUDY, or --task FILE.py:CLASS."
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
        "--compile": request.compile != "off",
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
