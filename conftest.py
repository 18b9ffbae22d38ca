"""What all tests share: one thread, the torchvision stub, and no silent skips where everything must be installed."""

import gc
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "tests"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# torch's profiler writes two lines a session, which bury what a failed test says; read when torch is imported
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
# Inductor's cache does not tell instruction sets apart: what was compiled for AVX512 gave gradients of 1e18 under avx2.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/inductor_{os.getuid()}_{os.environ.get('ATEN_CPU_CAPABILITY')}"
)
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

import pytest
import torch
import torchvision_stub  # noqa: F401  (before timm and transformers)

torch.set_num_threads(int(os.environ.get("HEADWISE_TEST_THREADS", "1")))

# torch.manual_seed formats the whole stack for each kind of device that is absent: a twentieth of the time of the
# contract tests.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

# The files that take longest, longest first. A worker that begins one of them at the end keeps the others waiting.
LONG = (
    "tests/report/test_browser.py",
    "tests/contract/test_contract.py",
    "tests/study/test_script.py",
    "tests/hosts/test_hugging_face.py",
    "verdict/tests/report/test_write.py",
    "tests/watch/test_watch_training.py",
    "tests/study/test_damage.py",
    "tests/integration/test_compile.py",
    "tests/report/test_accessible.py",
    "tests/study/test_engines.py",
    "tests/shipping/test_saving.py",
    "tests/integration/test_cuda_without_a_gpu.py",
    "tests/study/test_several_processes.py",
    "tests/test_twins.py",
    "tests/report/test_keep_results.py",
    "papers/tests/test_data_sets.py",
    "papers/tests/test_findings_studies.py",
    "tests/test_plugins.py",
    "tests/integration/test_checkpointing.py",
    "tests/test_site.py",
    "tests/hosts/test_torch_mha.py",
    "papers/tests/test_pretrained_encoder.py",
    "verdict/tests/report/test_terminal.py",
    "tests/hosts/test_fused_compile.py",
    "tests/study/test_phases.py",
    "tests/integration/test_distributed.py",
)

# it asks what is installed in the environment of `make verdict`
collect_ignore = ["verdict/tests/test_alone.py"]


def pytest_collection_modifyitems(config, items):
    """Let the longest files begin first."""
    place = {config.rootpath / name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what is imported with the tests out of every later collection of garbage, which took a second each."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Turn skips into failures in CI: there, nothing may be absent but a CUDA device."""
    report = yield
    if report.skipped and os.environ.get("CI") and "cuda" not in item.keywords and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report


# As it is before any test, and as each file must leave it.
PLAIN = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind(request):
    """Fail the test file that leaves a fitted model, or something in fused attention's place, to the next file."""
    failed = request.session.testsfailed
    yield
    told = _taken_back()
    # what this file imported stays: a quarter of the suite's time went into looking through it again
    gc.freeze()
    # The traceback of a failed test keeps its models alive, and the file is red already.
    if told and request.session.testsfailed == failed:
        pytest.fail(
            f"{request.path.name} leaves behind {' and '.join(told)}: remove() what it regularizes", pytrace=False
        )


def _taken_back():
    """Name what was left, and take it back all the same, so that the next file is not blamed for it."""
    told = []
    live = sys.modules.get("headwise.attend.attention.fitted_layer")
    if live is not None:
        # Models that were thrown away without remove() lie in cycles: they are no leak. What a finalizer let go of
        # takes a second pass.
        gc.collect()
        gc.collect()
        sites = live.FittedLayer.live()
        if sites:
            told.append(
                f"{len(sites)} fitted site(s), such as {sites[0].site!r} of {type(sites[0].site.model).__name__}"
            )
        for fitted in sites:
            fitted.alive = False
        # With no site left the function passes calls on, and goes with the next site: late, but no leak.
        if not sites and "headwise.attend.hosts.sdpa.call" in sys.modules:
            sys.modules["headwise.attend.hosts.sdpa.call"].step_aside()
    now = torch.nn.functional.scaled_dot_product_attention
    if now is not PLAIN:
        told.append(f"{now!r} instead of F.scaled_dot_product_attention")
        torch.nn.functional.scaled_dot_product_attention = PLAIN
        if "headwise.attend.hosts.sdpa.call" in sys.modules:
            sys.modules["headwise.attend.hosts.sdpa.call"].replacement.on = False
    return told
