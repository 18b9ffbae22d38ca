"""What `headwise compare` does: choose the study, start the engine, run, report, print the table."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.comparing.engines import rank
from headwise.comparing.engines.launch import launch
from headwise.comparing.progress import choose_display
from headwise.comparing.registry import load_study, study_names
from headwise.files.durable import write_json
from headwise.files.errors import StudyError, explain
from headwise.files.provenance import describe_environment, usable_cores

if TYPE_CHECKING:
    from headwise.comparing.compare import Engine
    from headwise.comparing.study import Study


@dataclass(frozen=True)
class Request:
    """Hold what was asked for on the command line; None leaves a choice to the study."""

    study: str = "digits"
    methods: tuple[str, ...] = ()
    task: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    seeds: int | None = None
    trials: int = 0
    jobs: int | None = None
    processes: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    device: str | None = None
    data: Path | None = None
    watch: bool = False
    out: Path | None = None
    command: str = "headwise compare"

    @property
    def folder(self) -> Path:
        """Name the folder of the results."""
        name = self.study if self.task is None else self.task.rpartition(":")[2]
        return self.out or Path("results") / name


def run(request: Request) -> None:
    """Carry out the request; exits with 130 when stopped by Ctrl-C. Raises StudyError for what a user can repair."""
    check(request)
    rank.name_folder(request.folder)
    if (request.processes or 1) > 1 and not rank.is_one_of_several():
        # the processes say what there is to say: this one only holds them together
        line = rank.stopped_line(request.folder)
        sys.exit(launch(request.processes or 1, functools.partial(run, request), line))
    # first of all: the workers import torch while this process still reads the study
    engine = start_engine(request)
    try:
        if request.task is None and not hasattr(load_study(request.study), "STUDY"):
            engine.close()
            run_findings(request)
        else:
            run_comparison(request, engine)
    except KeyboardInterrupt:
        print(rank.stopped_line(request.folder), file=sys.stderr)
        sys.exit(rank.STOPPED)
    except Exception:
        if rank.is_one_of_several():
            rank.wait_for_stop()
        raise
    finally:
        engine.close()


def check(request: Request) -> None:
    """Refuse what cannot be done before anything is started."""
    if request.engine not in ("local", "ray"):
        raise StudyError(f"--engine {request.engine!r} is not known. Engines: local, ray.")
    if request.ray_address is not None and request.engine != "ray":
        raise StudyError(f"--ray-address {request.ray_address} needs --engine ray.")
    _check_processes(request)
    if request.task is None and request.study not in study_names():
        raise StudyError(
            f"there is no study {request.study!r}. Studies: {', '.join(study_names())}; or give --task FILE.py:CLASS."
        )
    if request.out is not None and request.out.exists() and not request.out.is_dir():
        raise StudyError(f"--out {request.out} is a file. Choose a folder.")
    if request.data is not None and request.data.is_file():
        raise StudyError(f"--data {request.data} (or HEADWISE_DATA) is a file. Choose the folder of the data set.")


def _check_processes(request: Request) -> None:
    """Refuse several processes where they cannot be: with another number already launched, on Ray, or in a row of jobs."""
    launched, asked = int(os.environ.get("WORLD_SIZE", "1")), request.processes
    if asked is not None and launched > 1 and asked != launched:
        raise StudyError(
            f"--processes {asked}, but {launched} processes were launched. Leave --processes out, or launch {asked}."
        )
    if max(asked or 1, launched) == 1:
        return
    if request.engine != "local":
        raise StudyError(f"--engine {request.engine} gives each run one process. Leave --processes or --engine out.")
    if request.jobs is not None and request.jobs > 1:
        raise StudyError(f"--jobs {request.jobs}: runs of several processes go one after the other. Leave --jobs out.")
    if request.trials:
        raise StudyError("--tune works with one process a run. Tune with one, then run with several.")


def start_engine(request: Request) -> Engine:
    """Start the engine that carries out the runs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from headwise.comparing.engines.in_process import HereEngine

        return HereEngine()
    if request.engine == "ray":
        from headwise.comparing.engines.ray_cluster import RayEngine

        return RayEngine(request.ray_address)
    from headwise.comparing.engines.local import LocalEngine

    return LocalEngine(request.jobs or usable_cores())


def run_comparison(request: Request, engine: Engine) -> None:
    """Carry out a study of methods × seeds, then write its report and print its table."""
    from headwise.comparing.compare import Comparison, compare

    study = choose_study(request)
    with choose_display() as display:
        task = study.task.located(request.data.resolve() if request.data else None)
        try:
            task.prepare(display.say)
        except OSError as error:
            raise explain(error, request.data or Path.cwd(), "--data") from error
        comparison = Comparison(
            study.model_copy(update={"task": task}),
            request.folder,
            engine,
            display,
            data=task.folder,
            watch=request.watch,
            trials=request.trials,
            command=request.command,
        )
        compare(comparison)
    if int(os.environ.get("RANK", "0")) == 0:
        write_report(request.folder)


def choose_study(request: Request) -> Study:
    """Build the study that was asked for, with the changes of the command line."""
    from headwise.comparing.arms.arm import canonical_arms
    from headwise.comparing.study import Study
    from headwise.comparing.task_source import build_task, load_task

    if request.task is None:
        study = load_study(request.study).STUDY
    else:
        place, _, name = request.task.rpartition(":")
        place = f"{Path(place).resolve()}:{name}" if place.endswith(".py") else request.task
        kind = load_task(request.task)
        study = Study(
            name=name, title=kind.title or name, question=kind.question, task=build_task(kind, {}), task_place=place
        )
    changes = {name: value for name, value in request.changes.items() if value is not None}
    task = build_task(type(study.task), study.task.model_dump() | changes)
    update = {
        "task": task,
        "methods": canonical_arms(request.methods or study.methods, task),
        "seeds": request.seeds or study.seeds,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "device": choose_device(request.device),
    }
    return study.model_copy(update=update)


def choose_device(asked: str | None) -> str:
    """Give cpu or cuda: what was asked for if it is there, else the GPU where there is one."""
    import torch

    if asked not in (None, "cpu", "cuda"):
        raise StudyError(f"--device {asked!r} is not known. Devices: cpu, cuda.")
    if asked == "cuda" and not torch.cuda.is_available():
        raise StudyError("--device cuda: torch finds no CUDA device here. Use --device cpu, or install torch for CUDA.")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def run_findings(request: Request) -> None:
    """Carry out a study that is no table of methods × seeds: its module gives the findings."""
    from headwise.comparing.compare import locked

    module, out = load_study(request.study), request.folder
    _refuse_unused(request)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with locked(out), choose_display() as display:
            found = module.run(
                out,
                seeds=request.seeds,
                jobs=request.jobs or usable_cores(),
                device=choose_device(request.device),
                progress=display.say,
            )
            write_json(out / "findings.json", {**describe_environment(), "command": request.command, **found})
    except OSError as error:
        raise explain(error, out) from error
    write_report(out)


def _refuse_unused(request: Request) -> None:
    unused = {
        "--method": request.methods,
        "--tune": request.trials,
        "--engine ray": request.engine == "ray",
        "--watch": request.watch,
        **{f"--{name.replace('_', '-')}": value for name, value in request.changes.items()},
    }
    given = [name for name, value in unused.items() if value]
    if given:
        raise StudyError(
            f"{request.study} is a study of its own kind, for which {', '.join(given)} has no meaning. "
            "It takes --seeds, --jobs, --device and --out."
        )


def write_report(folder: Path) -> None:
    """Write the report of a folder and print its table."""
    from headwise.comparing.report import write
    from headwise.comparing.results.table import print_answer

    page = write(folder)
    print_answer(folder)
    print(f"\nreport: {page}")
