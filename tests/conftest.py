"""What all tests share: one thread, the torchvision stub, and no silent skips where everything must be installed."""

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

import pytest
import torch
import torchvision_stub  # noqa: F401  (before timm and transformers)

torch.set_num_threads(int(os.environ.get("HEADWISE_TEST_THREADS", "1")))
sys.path.insert(0, str(Path(__file__).parent))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn skips into failures in CI: there, nothing may be absent but a CUDA device."""
    report = yield
    if report.skipped and os.environ.get("CI") and "cuda" not in item.keywords and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


@pytest.fixture(autouse=True, scope="module")
def _fused_attention_is_given_back():
    """Let no test file leave a fitted model behind that routes the next file's attention."""
    yield
    import torch.nn.functional as F

    passes = sys.modules.get("headwise.core.recompute")
    if passes is not None:
        gc.collect()
        for fitted in passes.enrolled():
            fitted.alive = False
        if "headwise.attention.computation" in sys.modules:
            F.scaled_dot_product_attention = sys.modules["headwise.attention.computation"].fused
