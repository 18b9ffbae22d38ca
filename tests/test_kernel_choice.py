"""The kernel of a small call depends on the kind of the method's matrix-free form, not on the processor."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headwise.attend.methods.text import parse
from headwise.numerics import kernels as choice
from headwise.testing.calls import attend_with, fit_standalone, standalone_site


def kernels(text, tokens, heads=330):
    q = torch.randn(1, heads, tokens, 4, generator=torch.Generator().manual_seed(0))
    methods = parse(text)
    fitted = fit_standalone(methods, standalone_site(q, q))
    attend_with(methods, q, q, q, fitted=fitted)
    return fitted.kernels


@pytest.mark.parametrize("tokens", [40, 48, 65, 66, 67, 80])
@pytest.mark.parametrize(
    ("text", "largest"),
    [
        ("DropKey(p=0.1, unit='column')", 0),
        ("Temperature(value=0.5)", 0),
        ("DropAttention(p=0.1)", 48),
        ("DropColumn()", 66),
        ("AttnScale()", 66),
        ("EntropyPenalty()", 66),
        ("DropColumn() + EntropyPenalty()", 66),
        ("DropColumn() + DropAttention(p=0.1)", 48),
        ("EntropyPenalty() + DropKey(p=0.1, unit='column')", 0),
    ],
)
def test_the_matrix_is_made_up_to_the_measured_size_of_each_form(text, largest, tokens):
    alone = "DropAttention" in text and "+" in text
    # Dropping after an edit has no matrix-free form at all.
    assert ("explicit" in kernels(text, tokens)) == (tokens <= largest or alone)


def test_with_little_to_gain_the_hosts_kernel_stays():
    assert kernels("DropColumn()", 40, heads=320) == {"fused"}
    assert kernels("DropColumn()", 40, heads=330) == {"explicit"}


@pytest.mark.parametrize("triton", [True, False])
def test_a_compiled_call_asks_for_kernels_without_a_cache_or_a_search_for_modules(triton, monkeypatch):
    monkeypatch.setattr(choice, "HAS_TRITON", triton)
    device = torch.device("cuda")

    def asked(x):
        return x + choice.kernels_run_on(device)

    # Dynamo warns of a cached function, and warnings are errors.
    assert torch.compile(asked, fullgraph=True, backend="eager")(torch.zeros(())) == triton


def test_a_kernel_is_noted_where_it_runs_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(choice, "operators_run_on", lambda device: True)
    on_device = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    names = set()
    choice.note("before", on_device)
    choice.note_into(names)
    try:
        choice.note("runs", on_device)
        choice.note("on a CPU", torch.zeros(1))
        choice.note("in fp64", SimpleNamespace(is_cuda=True, dtype=torch.float64, device=on_device.device))
        monkeypatch.setattr(choice, "operators_run_on", lambda device: False)
        choice.note("switched off", on_device)
    finally:
        choice.note_into(None)
    assert names == {"runs"}


def test_a_build_for_cuda_without_a_driver_is_not_asked_whether_a_stream_is_captured(monkeypatch):
    def no_driver():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    code = compile(Path(choice.__file__).read_text(encoding="utf-8"), choice.__file__, "exec")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", no_driver)
    # what the module asks of torch when it is imported counts, too
    module = {"__name__": choice.__name__}
    exec(code, module)
    assert module["capturing"]() is False
