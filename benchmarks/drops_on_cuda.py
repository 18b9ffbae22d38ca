"""The kernels of draws and of dropped weights on a GPU: checked against the CPU, then timed, within a minute.

python benchmarks/drops_on_cuda.py             # checks, and times against plain fused attention and its own dropout
python benchmarks/drops_on_cuda.py --tune      # also other block sizes of each kernel, as long as --seconds allow
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial

import torch
import torch.nn.functional as F

from headwise.attend.attention.dropped_elements import attend_dropped
from headwise.attend.attention.element_draw import Drawn
from headwise.attend.core import random_draws

KEY, SALT, P = 0xFEDCBA98, 0x7FFFFFF1, 0.1
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def milliseconds(run, rounds: int = 10) -> float:
    """Return the time of one run on the device, after a warm-up."""
    for _ in range(3):
        run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


def check_draws() -> None:
    """Compare each kind of draw with the CPU's."""
    shape, p = (2, 4, 33, 65), torch.tensor(0.3)
    draws = {
        "uniform": lambda device: random_draws.uniform(KEY, SALT, shape, device),
        "elements": lambda device: random_draws.uniform_matrix(KEY, SALT, shape, device, slice(5, 20)),
        "kept": lambda device: random_draws.kept(KEY, SALT, p, shape, device).float(),
        "normal": lambda device: random_draws.normal(KEY, SALT, shape, device),
    }
    for name, draw in draws.items():
        error = (draw(CUDA).cpu() - draw(CPU)).abs().max().item()
        verdict = "right" if error <= (1e-5 if name == "normal" else 0.0) else "WRONG"
        print(f"draw {name}: largest difference from the CPU {error:.1e}: {verdict}", flush=True)
    large = (16, 12, 1024, 1024)
    for name, kind in (("uniform", random_draws.uniform), ("elements", random_draws.uniform_matrix)):
        took = milliseconds(partial(kind, KEY, SALT, large, CUDA))
        print(f"draw {name} of {large}: {took:.3f} ms", flush=True)
    tokens = (16, 1024, 768)
    print(f"draw normal of {tokens}: {milliseconds(lambda: random_draws.normal(KEY, SALT, tokens, CUDA)):.3f} ms")


def dropped(q, k, v, causal: bool, renormalize: bool, mask=None):
    """Return the operator's output with the script's draw."""
    settings = (mask, causal, q.shape[-1] ** -0.5, torch.tensor(KEY), SALT, torch.tensor(P), 1, renormalize, q.shape[0])
    return attend_dropped(q, k, v, *settings)[0]


def check_dropped() -> None:
    """Compare outputs and gradients with those of the blocks in Python on the CPU."""
    torch.manual_seed(0)
    for dtype, size, causal, renormalize in itertools.product(
        (torch.float32, torch.bfloat16), (64,), (False, True), (False, True)
    ):
        tensors = [torch.randn(2, 3, 333, size, dtype=dtype) for _ in range(4)]
        mask = None if causal else torch.rand(2, 1, 333, 333) > 0.3
        found = []
        for device in (CPU, CUDA):
            q, k, v = (x.to(device).requires_grad_() for x in tensors[:3])
            out = dropped(q, k, v, causal, renormalize, None if mask is None else mask.to(device))
            grads = torch.autograd.grad(out, (q, k, v), tensors[3].to(device))
            found.append([x.detach().float().cpu() for x in (out, *grads)])
        errors = [((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found)]
        right = all(error <= (1e-5 if dtype == torch.float32 else 3e-2) for error in errors)
        name = f"{dtype}, head size {size}, {'causal' if causal else 'masked'}, {'keys' if renormalize else 'weights'}"
        print(f"{name}: {' '.join(f'{e:.1e}' for e in errors)}: {'right' if right else 'WRONG'}", flush=True)


def time_dropped() -> None:
    """Print forward + backward over plain fused attention, and the same for torch's own fused dropout."""
    for shape in ((16, 12, 1024, 64), (1, 12, 16384, 64), (4, 16, 4096, 128)):
        q, k, v, g = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))

        plain = milliseconds(partial(step, plainly, q, k, v, g.detach()))
        print(f"{shape} causal bf16, forward + backward: plain {plain:.3f} ms", flush=True)
        for name, attend in {
            "torch's dropout": partial(plainly, p=P),
            "AttentionDropout": partial(dropped, causal=True, renormalize=False),
            "DropKey": partial(dropped, causal=True, renormalize=True),
        }.items():
            forward = milliseconds(partial(attend, q.detach(), k.detach(), v.detach()))
            both = milliseconds(partial(step, attend, q, k, v, g.detach()))
            print(f"  {name}: {both:.3f} ms, {both / plain:.2f} of plain, forward {forward:.3f} ms", flush=True)


def plainly(q, k, v, p: float = 0.0):
    """Return torch's causal attention, with its dropout."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)


def step(attend, q, k, v, g) -> None:
    """Run attention forward and backward."""
    torch.autograd.grad(attend(q, k, v), (q, k, v), g)


def tune(seconds: float) -> None:
    """Print the time of each kernel for other block sizes, until the seconds are over."""
    from headwise.attend.attention import triton_dropped

    chosen, ends = triton_dropped.settings, time.perf_counter() + seconds
    q, k, v, g = (torch.randn(16, 12, 1024, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(4))
    drawn = Drawn(q, k, torch.tensor(KEY), SALT, torch.tensor(P), 1, 16)
    out, lse, first = triton_dropped.forward(q, k, v, None, True, 0.125, drawn, False)
    level = -torch.linalg.vecdot(g.float(), out.float())
    grid = [(128, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3)]
    for kernel, sizes in itertools.product(("forward", "queries", "keys"), [None, *grid]):
        if time.perf_counter() > ends:
            print("the seconds are over")
            break

        def settings(dtype, size, size_v, of, kernel=kernel, sizes=sizes):
            own = chosen(dtype, size, size_v, of)
            if of != kernel or sizes is None:
                return own
            return {**own, **dict(zip(("BT", "BN", "num_warps", "num_stages"), sizes))}

        triton_dropped.settings = settings
        try:
            if kernel == "forward":
                took = milliseconds(lambda: triton_dropped.forward(q, k, v, None, True, 0.125, drawn, False))
            else:
                arguments = (g, level, q, k, v, lse, first, None, True, 0.125, drawn, False)
                took = milliseconds(lambda arguments=arguments: triton_dropped.backward(*arguments))
            print(f"{kernel} {sizes or 'as it is'}: {took:.3f} ms", flush=True)
        except Exception as error:
            print(f"{kernel} {sizes}: {type(error).__name__} {str(error)[:80]}", flush=True)
        finally:
            triton_dropped.settings = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="also time other block sizes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tuning, at most")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    check_draws()
    check_dropped()
    time_dropped()
    if options.tune:
        tune(options.seconds)


if __name__ == "__main__":
    main()
