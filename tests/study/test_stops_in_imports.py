"""A stop that comes while a library is imported waits for the import: torch aborts the process otherwise."""

import importlib
import os
import signal
import sys
import time

import pytest

from headwise.lab.files import stops

BODY = """
import os, signal
os.kill(os.getpid(), signal.{name})
for _ in range(1000):
    pass
complete = True
"""


def import_and_wait(name):
    assert importlib.import_module(name).complete
    time.sleep(5)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_stop_in_an_import_is_raised_after_it(tmp_path, monkeypatch, name):
    (tmp_path / "stopped_library.py").write_text(BODY.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stopped_library", raising=False)
    before = {number: signal.getsignal(number) for number in stops.STOPS}
    # a shell ignores Ctrl-C for tests that it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(stops.Stopped) as stop, stops.raise_on_stops():
            import_and_wait("stopped_library")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stops.stop_code(stop.value) == 128 + getattr(signal, name)


def test_a_worker_that_is_ended_in_an_import_ends_after_it(tmp_path, monkeypatch):
    (tmp_path / "ended_library.py").write_text(BODY.format(name=stops.END.name))
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(stops.END)
    try:
        stops.end_in_order()
        with pytest.raises(SystemExit):
            import_and_wait("ended_library")
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), stops.END)
    finally:
        signal.signal(stops.END, before)
