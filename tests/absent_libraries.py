"""Run code as if libraries were not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
import warnings


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fork in which headwise has yet to be imported, and these libraries can be neither found nor
    imported; its error, if any, is in `stderr` as Python prints it."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warnings.catch_warnings():
            # from Python 3.12 on a fork of a process with threads warns; torch's threads are idle here
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _run(names, code, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(names, code, *texts)


def _run(names: set[str], code: str, out: int, err: int) -> None:
    """Run code and end this process, whatever happens."""
    failed = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        absent = {"headwise", *names}
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(names))
        warnings.resetwarnings()
        exec(code, {"__name__": "__main__"})
        failed = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failed)
