"""The first compiled training step of a causal model with EntropyPenalty, over the same without it.

    python benchmarks/compiled.py                    # T = 1024, three rounds (bar 1.5)

Each step is taken in a process of its own with an empty cache of the compiler: what is timed is what a user waits for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

BAR = 1.5


def step(tokens: int, penalty: bool) -> float:
    """Compile and run one step, forward and backward, of two causal layers; give the seconds."""
    import torch

    import headwise
    from headwise.studies.tasks.causal_transformer import CausalTransformer

    torch.manual_seed(0)
    model = CausalTransformer(64, context=tokens, dim=64, depth=2, heads=4, mlp_dim=128)
    ids = torch.randint(64, (1, tokens))
    handle = headwise.regularize(model, headwise.EntropyPenalty(), example=(ids,)) if penalty else None
    compiled = torch.compile(model, fullgraph=True)
    start = time.perf_counter()
    loss = compiled(ids).square().mean()
    (loss if handle is None else loss + handle.loss()).backward()
    return time.perf_counter() - start


def apart(tokens: int, penalty: bool) -> float:
    """Take the step in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, "--tokens", str(tokens), "--one", "penalty" if penalty else "plain"]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Take turns and print the ratio of each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["plain", "penalty"])
    options = parser.parse_args()
    if options.one:
        print(step(options.tokens, options.one == "penalty"))
        return
    from timing import machine

    print(machine(int(os.environ.get("OMP_NUM_THREADS", "2"))))
    ratios = [apart(options.tokens, True) / apart(options.tokens, False) for _ in range(options.rounds)]
    print(
        f"first compiled step, T={options.tokens}: with EntropyPenalty / without, median of {options.rounds}: "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; bar {BAR})"
    )


if __name__ == "__main__":
    main()
