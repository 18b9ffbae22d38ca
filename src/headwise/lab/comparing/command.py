"""The command `headwise compare`: choose the study, start the engine, run, report, print the table."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.files.durable import write_json
from headwise.files.json_output import json_alone
from headwise.files.provenance import describe_environment, usable_cores
from headwise.lab.comparing.progress import PlainLines, choose_display
from headwise.lab.comparing.request import Request, check, refuse_unused
from headwise.lab.engines import rank
from headwise.lab.engines.slurm_options import read_slurm_options
from headwise.lab.files.stops import raise_on_stops, stop_code, stopped_line
from headwise_verdict.files import explain
from headwise_verdict.results import StudyFiles

if TYPE_CHECKING:
    from headwise.lab.comparing.comparison import Engine
    from headwise.lab.experiments.study import Study


def run(request: Request) -> None:
    """Carry out the request; exit with 130 if stopped by Ctrl-C, with 143 by SIGTERM.

    Raises StudyError for errors that a user can correct.
    """
    check(request)
    rank.name_folder(request.folder)
    if (request.processes or 1) > 1 and not rank.is_one_of_several():
        # the launched processes print everything; this one only launches and ends them
        line = stopped_line(request.folder)
        sys.exit(rank.launch(request.processes or 1, functools.partial(run, request), line))
    with json_alone(request.as_json) as show:
        folder = _carried_out(request)
        if request.as_json and folder is not None:
            from headwise_verdict import results_of

            show(results_of([folder]))


def _carried_out(request: Request) -> Path | None:
    """Return the folder whose report was written; None for a plan, and in all but the first process."""
    # start it first: the workers import torch while this process reads the study
    engine = start_engine(request)
    try:
        # one of several processes handles stops in its own thread
        with nullcontext() if rank.is_one_of_several() else raise_on_stops():
            if request.of_study and not hasattr(request.studies.load(request.study), "STUDY"):
                engine.close()
                if not request.plan:
                    return run_findings(request)
                plan_findings(request)
                return None
            return run_comparison(request, engine)
    except KeyboardInterrupt as stop:
        print(stopped_line(request.folder), file=sys.stderr)
        sys.exit(stop_code(stop))
    except Exception:
        if rank.is_one_of_several():
            rank.wait_for_stop()
        raise
    finally:
        engine.close()


def start_engine(request: Request) -> Engine:
    """Return a started engine for the runs."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from headwise.lab.engines.local import HereEngine

        return HereEngine()
    if request.engine == "ray":
        from headwise.lab.engines.ray_cluster import RayEngine

        return RayEngine(request.ray_address)
    if request.engine == "slurm":
        from headwise.lab.engines.slurm_cluster import SlurmEngine

        return SlurmEngine(read_slurm_options(request.slurm), request.jobs)
    from headwise.lab.engines.local import LocalEngine

    if request.script is not None:
        # a script has the machine to itself unless --jobs says otherwise
        return LocalEngine(request.jobs or 1, trains=False)
    return LocalEngine(request.jobs or usable_cores())


def run_comparison(request: Request, engine: Engine) -> Path | None:
    """Carry out a study of arms × seeds, write its report, print its table, and return its folder, or None."""
    folder = carry_out(request, engine)
    if request.plan or int(os.environ.get("RANK", "0")) != 0:
        return None
    from headwise_verdict import show_report

    show_report(folder)
    return folder


def carry_out(request: Request, engine: Engine, *, silent: bool = False) -> Path:
    """Carry out a study of arms × seeds and return its folder."""
    from headwise.lab.comparing.choosing import choose_study, started
    from headwise.lab.comparing.compare import compare
    from headwise.lab.comparing.comparison import Comparison
    from headwise.lab.comparing.plan import plan_without

    study = choose_study(request)
    folder = choose_folder(request, study)
    rank.name_folder(folder)
    with PlainLines(io.StringIO()) if silent else choose_display() as display:
        task = study.task.located(request.data.resolve() if request.data else None)
        for line in announce(study, folder, request.trials):
            display.say(line)
        absent = [data for data in task.data_sets() if data.downloads and not data.is_here(task.folder)]
        if request.plan and absent:
            took = request.studies.took(request.study, study.scale) if request.of_study else ""
            for line in plan_without(absent, study, request.trials, took):
                display.say(line)
            return folder
        try:
            task.prepare(display.say)
        except OSError as error:
            raise explain(error, request.data or Path.cwd(), "--data") from error
        comparison = Comparison(
            study.model_copy(update={"task": task}),
            folder,
            engine,
            display,
            data=task.folder,
            watch=study.watch,
            graphs=request.graphs,
            trials=request.trials,
            command=request.command,
            script=started(request) if request.script is not None else None,
            require_pairs=request.require_pairs,
            rehearse=not request.no_rehearsal,
            plan_only=request.plan,
            jobs=request.jobs or (1 if request.script is not None else usable_cores()),
        )
        compare(comparison)
    return folder


def choose_folder(request: Request, study: Study) -> Path:
    """Return the folder of the results: --out, or one for each study; raise StudyError if it holds another study."""
    from headwise.lab.comparing.compare import free_folder, refuse_other_study

    folder = request.out or free_folder(request.folder, study, request.trials)
    refuse_other_study(folder, study, request.trials)
    return folder


# records call these "other"; printed with their names
SCALES = {"other": "custom"}


def announce(study: Study, folder: Path, trials: int) -> list[str]:
    """Return the lines printed before anything trains: what is compared, the number of seeds, and the folder."""
    from headwise_verdict import seeds_for_a_verdict

    needed, data = seeds_for_a_verdict(), study.task.data_sets()
    enough = "enough for a verdict" if study.seeds >= needed else f"a verdict needs {needed}: --seeds {needed}"
    facts = {
        "study": f"{study.name}: {study.title}",
        "arms": f"{len(study.arms)}: {'; '.join(study.arms)}",
        **({"scale": SCALES.get(study.scale, study.scale)} if study.scale not in ("", "default") else {}),
        "seeds": f"{study.seeds}, {enough}",
        **({"trials": f"{trials} per arm, scored on validation data before the seeds"} if trials else {}),
        "folder": str(folder),
        **({"data": "; ".join(each.words(study.task.folder) for each in data)} if data else {}),
    }
    lines = []
    for name, text in facts.items():
        begin = f"{name + ':':<8}"
        lines += textwrap.wrap(
            text, 80, initial_indent=begin, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False
        )
    return lines


def plan_findings(request: Request) -> None:
    """Print how long a study without arms takes, as far as it is known; nothing can be tried beforehand."""
    module = request.studies.load(request.study)
    refuse_unused(request)
    took = request.studies.took(request.study, "") or "How long it takes is not known."
    print(f"study:  {request.study}: {module.TITLE}\nfolder: {request.folder}")
    text = f"it has no arms to try. {took}"
    print(textwrap.fill(text, 80, initial_indent="plan:   ", subsequent_indent=" " * 8, break_on_hyphens=False))


def run_findings(request: Request) -> Path:
    """Carry out a study that is not a table of methods × seeds, as its module says; return its folder."""
    from headwise.lab.comparing.choosing import choose_device
    from headwise.lab.comparing.compare import locked

    module, out = request.studies.load(request.study), request.folder
    refuse_unused(request)
    try:
        StudyFiles(out).claim()
        with locked(out), choose_display() as display:
            # the arguments of its run() show whether it reads data
            reads = {"data": request.data} if "data" in inspect.signature(module.run).parameters else {}
            began = time.monotonic()
            findings = module.run(
                out,
                seeds=request.seeds,
                jobs=request.jobs or usable_cores(),
                device=choose_device(request.device),
                progress=display.say,
                **reads,
            )
            write_json(
                StudyFiles(out).findings,
                {**describe_environment(), "command": request.command, "seconds": time.monotonic() - began, **findings},
            )
    except OSError as error:
        raise explain(error, out) from error
    from headwise_verdict import show_report

    show_report(out)
    return out
