"""The kernels of rows, means, pairs of heads and linear attention on a GPU: checked against fp64, then timed.

python benchmarks/rows_on_cuda.py              # all, within half a minute
python benchmarks/rows_on_cuda.py --only norm  # those whose names contain the text

Each line has the largest error of the results and gradients, the time of forward and backward on the device by the
kernel and by operators of PyTorch, and what one such call keeps the host busy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attend.attention import head_rows, linear, means, pairs, wide_head

# GPT-2 small with 16 samples.
BATCH, HEADS, TOKENS, SIZE = 16, 12, 1024, 64
Form = Callable[..., Any]


def tensors(*kinds: str, tokens: int = TOKENS) -> list[Tensor]:
    """Return random tensors in bf16: "rows" as one product gives queries, keys and values, or "gain" per head."""
    g = torch.Generator(device="cuda").manual_seed(0)
    made = []
    for kind in kinds:
        if kind == "rows":
            x = torch.randn(BATCH, tokens, 3, HEADS, SIZE, generator=g, device="cuda")[:, :, 1].transpose(1, 2)
        elif kind == "tokens":
            x = torch.randn(BATCH, tokens, HEADS * SIZE, generator=g, device="cuda")
        else:
            count = {"gain": HEADS, "pair": 2 * SIZE, "channels": HEADS * SIZE}[kind]
            x = 1 + 0.3 * torch.randn(count, generator=g, device="cuda")
        made.append(x.to(torch.bfloat16).requires_grad_())
    return made


def jobs() -> dict[str, tuple[tuple[str, ...], Form, Form]]:
    """Return for each name: the tensors, the form by operators of PyTorch, and that by kernels."""
    rows, h, m, p = ("rows", "rows"), head_rows, means, pairs
    factor = torch.tensor(0.6, device="cuda")

    def moved(kind: int, causal: bool, same: bool = False) -> tuple[Form, Form]:
        def kernel(o: Tensor, *more: Tensor) -> Tensor:
            v, gains = (None, more) if same else (more[0], more[1:])
            return m._Moved.apply(o, v, 0.3, kind, causal, *gains)[0]

        def by_form(o: Tensor, *more: Tensor) -> Tensor:
            v, gains = (None, more) if same else (more[0], more[1:])
            return m.form(o, v, 0.3, kind, causal, *gains)

        return by_form, kernel

    def similar(y: Tensor) -> Tensor:
        unit = F.normalize(y, dim=-1)
        products = (unit @ unit.mT).masked_fill(~torch.ones(TOKENS, TOKENS, device="cuda").tril().bool(), -torch.inf)
        return products.softmax(-1) @ y

    return {
        "QKNorm": (
            (*rows, "gain", "gain"),
            lambda q, k, a, b: (h._normalised(q, a, 1e-6, False), h._normalised(k, b, 1e-6, False)),
            lambda q, k, a, b: h.normalised(q, k, a, b, 1e-6, False),
        ),
        "XSA": (
            rows,
            lambda o, v: h._without_own(o, v, None, 0.7, False, 1e-12),
            lambda o, v: h.without_own(o, v, torch.tensor(0.7), None, False, 1e-12),
        ),
        "GFSA, mixture": (
            (*rows, "gain"),
            lambda x, y, a: h._mixed(x, y, a, -2.0, 3.0),
            lambda x, y, a: h.mixed(x, y, a, -2.0, 3.0),
        ),
        "LSA, temperature": (("rows", "gain"), h._divided, h.divided),
        "RelaxedAttention, causal": (rows, *moved(m.SHARE, True)),
        "AttnScale, causal": ((*rows, "gain"), *moved(m.HEADS, True)),
        "RelaxedAttention": (("rows",), *moved(m.SHARE, False, same=True)),
        "AttnScale": (("rows", "gain"), *moved(m.HEADS, False, same=True)),
        "DifferentialAttention, difference": (
            rows,
            lambda x, y: p._difference(x, y, factor.to(x.dtype)),
            lambda x, y: p.difference(x, y, factor),
        ),
        "DifferentialAttention, norm": (
            ("rows", "pair"),
            lambda x, a: p._pair_norm(x, a, 0.8, 1e-5),
            lambda x, a: p.pair_norm(x, a, 0.8, 1e-5),
        ),
        "Disagreement": (("rows",), lambda x: (x, p.agreement_of(x)), lambda x: p.agreement(x, None)),
        "LinearAttention": (
            (*rows, "rows"),
            lambda q, k, v: linear.form(q, k, v, None, False),
            lambda q, k, v: linear.linear_attention(q, k, v, None, False),
        ),
        "LinearAttention, causal": (
            (*rows, "rows"),
            lambda q, k, v: linear.form(q, k, v, None, True),
            lambda q, k, v: linear.linear_attention(q, k, v, None, True),
        ),
        "ContraNorm, causal": (("tokens",), similar, lambda y: wide_head.mean_of_similar(y, 1.0, None, True)),
        # For comparison: forward and backward of the attention itself.
        "fused attention, causal": (
            (*rows, "rows"),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
    }


def step(form: Form, given: list[Tensor], cotangents: list[Tensor] | None = None) -> tuple[list[Tensor], ...]:
    """Run a form forward and backward; return its results and gradients."""
    found = form(*given)
    found = [found] if isinstance(found, Tensor) else list(found)
    cotangents = [torch.ones_like(x) for x in found] if cotangents is None else cotangents
    return found, list(torch.autograd.grad(found, given, cotangents))


def error(form: Form, kernel: Form, given: list[Tensor]) -> float:
    """Return the largest error of two samples' results and gradients against fp64, over the largest number wanted."""
    given = [x.detach()[:2].requires_grad_() if x.dim() > 1 else x.detach().requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = form(*wide)
    wanted = [wanted] if isinstance(wanted, Tensor) else list(wanted)
    g = torch.Generator(device="cuda").manual_seed(1)
    weights = [torch.randn(x.shape, generator=g, device="cuda") for x in wanted]
    right = torch.autograd.grad(wanted, wide, [w.double() for w in weights])
    found = kernel(*given)
    found = [found] if isinstance(found, Tensor) else list(found)
    made = torch.autograd.grad(found, given, [w.to(x.dtype) for w, x in zip(weights, found, strict=True)])
    pairs_of = zip((*found, *made), (*wanted, *right), strict=True)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs_of)


def times(form: Form, given: list[Tensor], rounds: int = 20) -> tuple[float, float]:
    """Return milliseconds of the device and microseconds of the host for one forward and backward."""
    found, _ = step(form, given)
    cotangents = [torch.randn_like(x) for x in found]
    del found
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # The device waits first, so that all is queued before it begins and no launch is waited for.
    torch.cuda._sleep(40_000_000)
    started = time.perf_counter()
    begin.record()
    for _ in range(rounds):
        step(form, given, cotangents)
    end.record()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds, host / rounds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="text in the names of what to run")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    print("| | largest error | device ms: kernel | PyTorch | host µs: kernel | PyTorch |\n|---|---|---|---|---|---|")
    for name, (kinds, form, kernel) in jobs().items():
        if options.only not in name:
            continue
        given = tensors(*kinds)
        try:
            wrong = error(form, kernel, given)
            device, host = times(kernel, given)
            device_form, host_form = times(form, given, 5)
        except Exception as failed:
            print(f"| {name} | {type(failed).__name__}: {str(failed)[:100]} | | | | |", flush=True)
            continue
        verdict = "right" if wrong <= 3e-2 else "WRONG"
        print(
            f"| {name} | {wrong:.1e} {verdict} | {device:.3f} | {device_form:.3f} | {host:.0f} | {host_form:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
