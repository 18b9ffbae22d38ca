"""Studies from Python: `compare` runs one and returns its result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import headwise.lab.comparing.compare  # noqa: F401  # a missing library is reported on import, not when a study runs
from headwise.lab.comparing.command import carry_out, start_engine
from headwise.lab.comparing.request import Request, check, is_of_file
from headwise.lab.engines.local import HereEngine
from headwise.lab.experiments.study import Study
from headwise.lab.experiments.subject import Subject
from headwise.lab.experiments.task_source import module_of_file
from headwise.lab.studies.registry import Installed
from headwise_verdict import StudyError, StudyResult

if TYPE_CHECKING:
    from headwise.attend import Method


def compare(
    subject: str | type[Subject] | Subject,
    methods: Sequence[str | Method | Sequence[Method]] = (),
    *,
    seeds: int | None = None,
    out: str | Path | None = None,
    outcome: str | Sequence[str] = (),
    sweeps: Sequence[str] = (),
    settings: Sequence[str] = (),
    trials: int = 0,
    jobs: int = 1,
    engine: str = "local",
    watch: bool = False,
    data: str | Path | None = None,
    device: str | None = None,
    graphs: str = "auto",
    compile: str = "off",
    arguments: str | None = None,
    timeout: float | None = None,
    require_pairs: bool = False,
    silent: bool = False,
) -> StudyResult:
    """Run a study like `headwise compare`, and return its result; a second call continues an interrupted study.

    Args:
        subject: a task (class or object of an importable file, or "file.py:Class"), a study (the name of an installed
            one, or "file.py:NAME"), or the command of a training script: "python train.py --epochs 3".
        methods: the arms besides the baseline: methods, sequences of methods that act together, or texts of arms.
        seeds: number of seeds; None means that of the study, else 10.
        out: the folder of the results; None means `results/NAME`.
        outcome: for a script, the outcomes that it records, such as "accuracy:higher"; the first decides.
        sweeps, settings, trials, engine, watch, data, device, graphs, compile, arguments, timeout, require_pairs: as
            on the command line.
        jobs: number of runs at a time. A single one runs in this process. More run in other processes, which import the
            file of this program, so that the call must be under `if __name__ == "__main__"`.
        silent: print nothing.

    Raises:
        StudyError: if the study cannot run; the message has the remedy, as on the command line.

    Example:
        >>> import headwise, tempfile
        >>> from headwise.lab.studies.digits import Digits
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     task = Digits(epochs=1, train_size=50, test_size=50)
        ...     result = headwise.compare(task, methods=[headwise.DropHead(p=0.2)], seeds=2, out=folder, silent=True)
        >>> result.analysis.seeds
        [0, 1]
    """
    if subject is None or isinstance(subject, bool | int | float | list | tuple | dict):
        raise TypeError(
            "compare() takes a task, a study or the command of a training script, such as 'python train.py', got "
            f"{subject!r}"
        )
    request = Request(
        **_kind_and_name(subject),
        studies=Installed(),
        methods=tuple(map(_text, methods)),
        sweeps=tuple(sweeps),
        settings=(*_settings(subject), *settings),
        seeds=seeds,
        trials=trials,
        jobs=jobs,
        engine=engine,
        device=device,
        graphs=graphs,
        compile=compile,
        data=None if data is None else Path(data),
        watch=watch,
        out=None if out is None else Path(out),
        outcomes=(outcome,) if isinstance(outcome, str) else tuple(outcome),
        arguments=arguments,
        timeout=timeout,
        require_pairs=require_pairs,
        command="headwise.compare(...)",
    )
    check(request)
    runner = HereEngine() if engine == "local" and jobs == 1 else start_engine(request)
    threads = torch.get_num_threads()
    try:
        return StudyResult(carry_out(request, runner, silent=silent))
    finally:
        runner.close()
        # a run in this process sets the number of its study
        torch.set_num_threads(threads)


def _kind_and_name(subject: str | type[Subject] | Subject) -> dict[str, Any]:
    if not isinstance(subject, str):
        return {"task": _place(subject if isinstance(subject, type) else type(subject))}
    if subject in Installed().names:
        return {"study": subject}
    # a task or study ends in a colon and a name; everything else is a command
    name = subject.rpartition(":")[2]
    if " " in subject or ":" not in subject or not name.isidentifier():
        return {"script": subject}
    path = Path(subject.rpartition(":")[0])
    is_study = is_of_file(subject) and path.is_file() and isinstance(vars(module_of_file(path)).get(name), Study)
    return {"study": subject} if is_study else {"task": subject}


def _place(kind: type[Subject]) -> str:
    """Return the file or module, and class, from which a run can build a task again."""
    module = sys.modules.get(kind.__module__)
    if "." in kind.__qualname__:
        raise StudyError(f"{kind.__qualname__} is defined inside a function or class. Define it at the top of a file.")
    if kind.__module__ != "__main__" and module is not None and not kind.__module__.startswith("headwise_task_"):
        return f"{kind.__module__}:{kind.__name__}"
    try:
        file = inspect.getsourcefile(kind)
    except (TypeError, OSError):
        file = None
    if (
        file is None
        or not Path(file).is_file()
        or f"class {kind.__name__}" not in Path(file).read_text(encoding="utf-8")
    ):
        raise StudyError(
            f"{kind.__name__} is not defined in a file, so that a run cannot build it again. Write it into one: "
            "my_task.py."
        )
    return f"{file}:{kind.__name__}"


def _settings(subject: Any) -> list[str]:
    """Return the settings of a task object that are not defaults, in the form of the command line."""
    if not isinstance(subject, Subject):
        return []
    from headwise.lab.experiments.arm_settings import write_setting

    plain = type(subject)().model_dump()
    return [write_setting(name, value, subject) for name, value in subject.model_dump().items() if plain[name] != value]


def _text(arm: Any) -> str:
    if isinstance(arm, str):
        return arm
    return " + ".join(map(repr, arm)) if isinstance(arm, (list, tuple)) else repr(arm)
