"""Run code as if libraries were not installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from typing import NoReturn

LIMIT = 300  # seconds


def in_new_process(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process in which these libraries can be neither found nor imported."""
    program = f"import sys\nsys.modules.update(dict.fromkeys({sorted(names)!r}))\n{code}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=LIMIT)


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fork in which headwise has yet to be imported, and these libraries can be neither found nor
    imported.

    It takes a fraction of the time of a new process, as torch is there. Other libraries that were imported before are
    there too: what must not be imported at all is for `in_new_process`. Warnings and logs go to pytest.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warnings.catch_warnings():
            # from Python 3.12 on a fork of a process with threads warns; torch's threads are idle here
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _run(names, code, out.fileno(), err.fileno())
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(names, ended, *texts)


def _run(names: set[str], code: str, out: int, err: int) -> NoReturn:
    """Run code and end this process, whatever happens."""
    failed = 1
    try:
        signal.alarm(LIMIT)
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        absent = {"headwise", "headwise_verdict", *names}
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(names))
        exec(code, {"__name__": "__main__"})
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(failed)
