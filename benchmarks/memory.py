"""Tensor memory of one call at T = 8192, one head: the peak above the previous level."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from headwise.testing.calls import attend_with, fit_standalone, standalone_site


def peak(run) -> int:
    """Return the peak of bytes allocated for tensors while `run` runs, above the level before, from memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        top = max(top, level)
    return top


def ratios(methods, causal: bool, size: int = 8192) -> list[tuple[object, float]]:
    """Return for each method its peak divided by that of plain attention, forward and backward."""
    shape = (1, 1, size, 64)
    q, k, v, first = (torch.randn(shape, requires_grad=True) for _ in range(4))
    grad = torch.randn(shape)

    def plain() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=causal).backward(grad)

    def with_method(method) -> None:
        fitted = fit_standalone([method], standalone_site(q, k), first_values=first)
        out, penalty = attend_with([method], q, k, v, fitted=fitted, causal=causal)
        torch.autograd.backward([out, penalty], [grad, None]) if penalty.requires_grad else out.backward(grad)

    def fresh(run) -> int:
        run()
        for tensor in (q, k, v, first):
            tensor.grad = None
        return peak(run)

    base = fresh(plain)
    return [(method, fresh(lambda m=method: with_method(m)) / base) for method in methods]


def memory(methods) -> None:
    """Print the table of peaks, non-causal and causal."""
    print("\n### Tensors allocated at T=8192, one head, forward + backward, / plain attention (bar 1.5)\n")
    print("| method | non-causal | causal |\n|---|---|---|")
    for (method, plain), (_, causal) in zip(ratios(methods, False), ratios(methods, True), strict=True):
        print(f"| {method!r} | {plain:.2f} | {causal:.2f} |", flush=True)
