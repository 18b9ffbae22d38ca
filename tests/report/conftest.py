"""The headless Chromium of the tests that look at pages."""

import os
import shutil

import pytest

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    executable = os.environ.get("HEADWISE_CHROMIUM") or next(
        (found for name in names if (found := shutil.which(name))), None
    )
    if executable is None:
        pytest.skip("no Chromium on this machine (set HEADWISE_CHROMIUM to its path)")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield chromium
        chromium.close()
