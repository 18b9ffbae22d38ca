"""One run of a script: its process is started, followed, ended with its children, and judged by what it recorded."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil
from filelock import FileLock, Timeout

from headwise.files.durable import open_to_append, write_all, write_json
from headwise.lab.experiments.configuration import SAME
from headwise.lab.experiments.task_source import source_file
from headwise.lab.files.script_run import TOLD, VARIABLE, read_told
from headwise.lab.training.job import ScriptOrder
from headwise.lab.training.script_result import DivergenceCheck, Telling, result_of, told_nothing
from headwise_verdict import StudyError
from headwise_verdict.files import as_record, plain_folder, read_json, refuse_link
from headwise_verdict.results import Divergence, RunFiles, RunResult

OUTPUT = "output.log"
# name of the subfolder of a run that belongs to its script
OWN = "own"
# seconds between two reads of a script's records
GLANCE = 0.05
# seconds between two progress events
TELLS = 1.0
# seconds of silence after which one note is given
LONG_SILENCE = 120.0
# seconds for a script and its children to end on their own before they are killed
PATIENCE = 5.0
# whole steps of a script that is only tried
TRIED = 3
# points that are enough although fewer steps were seen: of an optimizer that is not the model's only one
MANY_POINTS = 20
# seconds to wait for the lock: a killed worker frees it at once, one that is ending needs a moment
LOCK_PATIENCE = 20.0
# last lines of a script's output that an error message shows
LAST = 8
# the error of torchrun itself if one of its processes failed
LAUNCHER_RAISES = "ChildFailedError"
# variables of headwise's own launcher, which a script's launcher sets itself
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
# option of prctl: the signal sent to this process when its parent ends
PR_SET_PDEATHSIG = 1

Tell = Callable[[dict[str, Any]], None]


def carry_script(order: ScriptOrder, tell: Tell) -> RunResult:
    """Carry out one run of a script, which resumes on its own after an interruption, and return its result.

    Raises:
        StudyError: with the last lines of its output, if it fails, hangs, or does not record the study's outcomes.
    """
    order.files.make_folder()
    try:
        with FileLock(order.folder / ".lock", timeout=LOCK_PATIENCE):
            order.files.clear_partials()
            if damaged := order.damage():
                tell({"event": "note", "text": f"{order.folder}: {', '.join(damaged)}; the run starts again"})
                _clear(order.folder)
            return order.result() or _carry(order, tell)
    except Timeout:
        raise StudyError(f"another process works on {order.folder}. Wait for it, or choose another --out.") from None


def try_script(order: ScriptOrder, tell: Tell) -> dict[str, Any]:
    """Start a script, end it after its third step, and return layers, steps, parameters and step seconds.

    Figures that the script did not record are None.

    Raises:
        StudyError: with the last lines of its output, if it fails before.
    """
    order.files.make_folder()
    _clear(order.folder)
    write_json(order.files.config, order.configuration.model_dump(mode="json"))
    attempt = _attempt(order)
    code, _ = _run(order, attempt, tell)
    telling = Telling(order.folder)
    if code is not None and code != 0:
        raise failure(code, order.folder)
    fitted = telling.first("regularized")
    if order.configuration.methods and fitted is None:
        raise StudyError(
            f"{order.configuration.arm} was requested and never acted: the script never called run.regularize(model)."
        )
    if code == 0 and not telling.records():
        error = told_nothing(order, telling)
        error.printed = last_lines(order.folder)
        raise error
    shutil.rmtree(order.folder / OWN, ignore_errors=True)
    fitted = fitted or {}
    return {
        "layers": fitted.get("layers", []),
        "steps": fitted.get("steps") or (telling.first("takes") or {}).get("steps"),
        "parameters": (telling.first("weights") or {}).get("parameters"),
        "seconds": _step_seconds(telling),
        "evidence": telling.evidence(),
    }


def _step_seconds(telling: Telling) -> float | None:
    """Return the seconds per step between the last two logged points, else between the last two optimizer steps."""
    for points in (telling.logs(), [line for line in telling.last if line["told"] == "step"]):
        if len(points) > 1 and points[-1]["step"] > points[-2]["step"]:
            return float(points[-1]["at"] - points[-2]["at"]) / float(points[-1]["step"] - points[-2]["step"])
    return None


def _carry(order: ScriptOrder, tell: Tell) -> RunResult:
    _refuse_changed(order)
    write_json(order.files.config, order.configuration.model_dump(mode="json"))
    attempt = _attempt(order)
    code, divergence = _run(order, attempt, tell)
    if divergence is None and code != 0:
        raise failure(code, order.folder)
    try:
        result = result_of(order, divergence)
    except StudyError as error:
        error.printed = last_lines(order.folder)
        raise
    return order.files.write_result(result)


def _refuse_changed(order: ScriptOrder) -> None:
    file = source_file(order.task_place) if order.task_place else None
    if file is not None and hashlib.sha256(file.read_bytes()).hexdigest() != order.configuration.task_source:
        raise StudyError(f"{file} changed while the study runs. Start the command again to run the changed script.")


def _clear(folder: Path) -> None:
    files, own = RunFiles(folder), folder / OWN
    if own.exists():
        # a script resumes from any checkpoint that it finds in its folder; what it wrote there is the user's
        own.rename(next(path for n in itertools.count(1) if not (path := folder / f"{OWN}-{n}").exists()))
    for path in (files.result, files.metrics, files.health, *(folder / TOLD).glob("*")):
        path.unlink(missing_ok=True)


def _attempt(order: ScriptOrder) -> Path:
    """End what is left of an earlier start, write the file that the next start of a run reads, and return its path."""
    starts = order.attempts()
    if starts:
        _end_leftover(starts[-1])
    earlier = [line["told"] for path in starts for line in read_told(path.with_suffix(".jsonl"))]
    path = order.folder / TOLD / f"{1 + int(starts[-1].stem) if starts else 1}.json"
    plain_folder(path.parent)
    refuse_link(order.folder / OWN)
    configuration = order.configuration
    # numpy and others accept only 32 bits
    seed = configuration.draws % 2**32 if configuration.arm == SAME else configuration.seed
    terms = {
        "arm": configuration.arm,
        "seed": seed,
        "methods": configuration.methods,
        "purpose": configuration.purpose,
        "folder": str(order.folder / OWN),
        "resumed": "begin" in earlier,
        "counts": "saw" not in earlier,
        "acted": "acted" in earlier,
        "watch": order.watch,
        "tries": order.tries,
        "health": str(order.files.health),
    }
    write_json(path, terms)
    return path


def _run(order: ScriptOrder, attempt: Path, tell: Tell) -> tuple[int | None, Divergence | None]:
    """Start the script and follow it to its end; return its exit code, or the divergence that ended it."""
    from headwise.lab.experiments.script import command_line

    words, added = command_line(order.configuration.settings, order.folder)
    environment = _environment(order, attempt) | added
    with open_to_append(order.folder / OUTPUT) as output:
        write_all(output, f"--- start {attempt.stem}: {' '.join(words)}\n".encode())
        process = _start(words, order, environment, output)
    write_json(attempt, (read_json(attempt) or {}) | {"process": process.pid})
    try:
        return _listen(process, order, attempt, tell)
    finally:
        _end(process)


def _start(
    words: list[str], order: ScriptOrder, environment: dict[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words,
            cwd=order.started_in,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # when the study is stopped, this process ends the script and its children itself
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform.startswith("linux") else None,
        )
    except OSError as error:
        raise StudyError(
            f"{words[0]} could not be started ({error.strerror}). Check the command of --script, and start headwise "
            "where it runs."
        ) from error


def _end_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _environment(order: ScriptOrder, attempt: Path) -> dict[str, str]:
    """Return the environment of the user's command plus the run's variables; a worker's own variables are undone."""
    variables = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    for name, value in order.environment_before.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    if order.device.startswith("cuda:"):
        variables["CUDA_VISIBLE_DEVICES"] = order.device.partition(":")[2]
    # unbuffered, so that its output appears while it runs
    return variables | {VARIABLE: str(attempt), "PYTHONUNBUFFERED": "1"}


def _listen(
    process: subprocess.Popen[bytes], order: ScriptOrder, attempt: Path, tell: Tell
) -> tuple[int | None, Divergence | None]:
    follower = Follower(order, attempt)
    size, active, reported, noted = -1, time.monotonic(), 0.0, False
    while True:
        ended = _wait(process)
        printed = _size(order.folder / OUTPUT)
        if follower.read() or printed != size:
            size, active = printed, time.monotonic()
        if follower.divergence is not None:
            return None, follower.divergence
        if order.tries and follower.has_begun:
            return None, None
        if follower.point is not None and time.monotonic() - reported > TELLS:
            reported = time.monotonic()
            tell(follower.progress())
        if ended:
            return process.returncode, None
        if not noted and time.monotonic() - active > LONG_SILENCE:
            noted = True
            tell({"event": "note", "text": _silence_note(order)})
        if order.timeout is not None and time.monotonic() - active > order.timeout:
            hang = StudyError(
                f"it printed and logged nothing for {order.timeout:g} s and was ended. Give a longer --timeout, or "
                "find out what it waits for."
            )
            hang.printed = last_lines(order.folder)
            raise hang


def _silence_note(order: ScriptOrder) -> str:
    ends = "" if order.timeout is not None else " --timeout ends a run that hangs."
    return (
        f"{order.configuration.arm}, seed {order.configuration.seed}, has been silent for {LONG_SILENCE:g} s."
        f"{ends}{last_lines(order.folder)}"
    )


class Follower:
    """A reader of one start of a script: its latest point, and whether its loss has diverged."""

    def __init__(self, order: ScriptOrder, attempt: Path) -> None:
        self.divergence: Divergence | None = None
        self.point: dict[str, Any] | None = None
        self._order, self._stream = order, attempt.with_suffix(".jsonl")
        self._read, self._rest, self._points, self._steps, self._closed = 0, b"", 0, 0, False
        self._judge: DivergenceCheck | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether a script that is only tried has recorded enough: three whole steps, or its end.

        A forgotten `loss()` or `after_step()` is an error before the third step of the optimizer. Points count where
        no step is seen, as without an optimizer of torch.
        """
        return self._closed or self._steps > TRIED or self._points > (MANY_POINTS if self._steps else TRIED - 1)

    def read(self) -> bool:
        """Read the new records; return whether there were any."""
        if not self._stream.exists():
            return False
        with open(self._stream, "rb") as stream:
            stream.seek(self._read)
            content = stream.read()
        self._read += len(content)
        *whole, self._rest = (self._rest + content).split(b"\n")
        for line in whole:
            self._take(as_record(line.decode(errors="replace")))
        return bool(content)

    def progress(self) -> dict[str, Any]:
        """Return the progress event of the run."""
        assert self.point is not None
        figures = {name: float(value) for name, value in self.point["figures"].items()}
        return {"event": "progress", "step": self.point["step"], "figures": figures, "done": 0.0}

    def _take(self, line: dict[str, Any] | None) -> None:
        if line is None:
            return
        self._closed = self._closed or line["told"] in ("record", "evaluate")
        self._steps += line["told"] == "step"
        if line["told"] != "log":
            return
        if self._judge is None:
            # when a start resumes, the losses of earlier starts count up to its first step
            earlier = [
                point
                for point in Telling(self._order.folder, leave_out=self._stream).logs()
                if point["step"] < line["step"]
            ]
            self._judge = DivergenceCheck(self._order.configuration.settings)
            self._judge.hear(earlier)
        self.point, self._points = line, self._points + 1
        self.divergence = self.divergence or self._judge.hear([line])


def _wait(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=GLANCE)
    except subprocess.TimeoutExpired:
        return False
    return True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and its descendants; launchers start their own sessions, which a group signal does not reach."""
    if process.poll() is None:
        children = _children(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        _kill(children)
        process.kill()
        process.wait()
    # processes left in its own group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _children(number: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(number).children(recursive=True))
    except psutil.Error:
        return []


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            # psutil compares start times: a process that reuses the number is left alone
            process.kill()
    psutil.wait_procs(processes, timeout=PATIENCE)


def _end_leftover(attempt: Path) -> None:
    """End the process of an earlier start if it still runs; its environment names the run."""
    number = (read_json(attempt) or {}).get("process")
    if not isinstance(number, int):
        return
    try:
        process = psutil.Process(number)
        if process.environ().get(VARIABLE) == str(attempt):
            _kill([*process.children(recursive=True), process])
    except psutil.Error:
        return


def _ended(code: int | None) -> str:
    assert code is not None
    return (
        f"it was ended by signal {-code} (9 often means: out of memory)"
        if code < 0
        else f"it ended with exit code {code}"
    )


def failure(code: int | None, folder: Path) -> StudyError:
    """Return the error of a script that ended with an exit code: its exception, traceback and last lines."""
    raised, trace = raised_in(_printed(folder))
    error = StudyError(f"{_ended(code)}{f': {raised}' if raised else '.'}")
    error.printed, error.trace = last_lines(folder), trace
    return error


def raised_in(lines: list[str]) -> tuple[str, str]:
    """Return the line and traceback of the exception that ended a script, of the first process that failed."""
    exceptions: list[tuple[str, str]] = []
    begin: int | None = None
    # each process of torch's launcher prints its rank first
    plain = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines]
    for at, line in enumerate(plain):
        if line.startswith("Traceback (most recent call last)"):
            begin = at
        elif begin is not None and line and not line.startswith(" "):
            exceptions.append((line, "\n".join(plain[begin : at + 1])))
            begin = None
    own = [each for each in exceptions if LAUNCHER_RAISES not in each[0]]
    if not own:
        return "", ""
    # a launcher reports after its processes, and the first of these is the cause
    return own[0] if len(own) < len(exceptions) else own[-1]


def _printed(folder: Path) -> list[str]:
    """Return the lines printed by the last start (at most 64 KiB); a progress bar counts with its last state."""
    path = folder / OUTPUT
    if not path.exists():
        return []
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - 65536))
        text = stream.read().decode(errors="replace").replace("\r\n", "\n")
    return [line.rpartition("\r")[2].rstrip() for line in text.rpartition("\n--- start")[2].split("\n")]


def last_lines(folder: Path) -> str:
    """Return the last lines that a script printed, indented, with the path of the whole output."""
    path = folder / OUTPUT
    if not path.exists():
        return ""
    lines = [line for line in _printed(folder) if line and not line.startswith("--- start")]
    shown = "".join(f"\n    {line}" for line in lines[-LAST:])
    return f" Its last lines ({path}):{shown}" if shown else f" It printed nothing ({path})."
