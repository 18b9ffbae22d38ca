"""Measure the first compiled training step of a causal model with EntropyPenalty, over the same without it.

    make bench-compiled                              # T = 1024, five rounds (bar 1.5)
    make bench-compiled ARGS="--tokens 256 --rounds 3"

Each step runs in a separate process with an empty compiler cache, which is the time that a user waits for. The ratio is
that of processor time, including the C++ compiler's, so that other load on the machine has no effect; the ratio of
wall-clock time is printed too. The two alternate, and swap their order from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

BAR = 1.5


def spent() -> float:
    """Return the processor time in seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def step(tokens: int, penalty: bool) -> dict[str, float]:
    """Compile and run one step, forward and backward, of two causal layers; return its processor and wall time."""
    import torch
    from headwise_papers.tasks.causal_transformer import CausalTransformer

    import headwise

    torch.manual_seed(0)
    model = CausalTransformer(64, context=tokens, dim=64, depth=2, heads=4, mlp_dim=128)
    ids = torch.randint(64, (1, tokens))
    handle = headwise.regularize(model, headwise.EntropyPenalty(), example=(ids,)) if penalty else None
    compiled = torch.compile(model, fullgraph=True)
    processor, wall = spent(), time.perf_counter()
    loss = compiled(ids).square().mean()
    (loss if handle is None else loss + handle.loss()).backward()
    return {"cpu": spent() - processor, "wall": time.perf_counter() - wall}


def apart(tokens: int, penalty: bool) -> dict[str, float]:
    """Run the step in a separate process that compiles itself: workers that outlive the step would not be
    counted."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, __file__, "--tokens", str(tokens), "--one", "penalty" if penalty else "plain"]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    # The last line: libraries may print before it.
    return json.loads(found.splitlines()[-1])


def main() -> int:
    """Alternate the two, print each round and the medians, and return 1 if the bar does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--one", choices=["plain", "penalty"], help="run one step in this process and print its seconds"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(step(options.tokens, options.one == "penalty")))
        return 0
    from timing import machine

    print(machine(int(os.environ.get("OMP_NUM_THREADS", "2"))))
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    for turn in range(options.rounds):
        order = [True, False] if turn % 2 else [False, True]
        taken = {penalty: apart(options.tokens, penalty) for penalty in order}
        for clock, found in ratios.items():
            found.append(taken[True][clock] / taken[False][clock])
        print(
            f"round {turn + 1}: with {taken[True]['cpu']:.1f} s, without {taken[False]['cpu']:.1f} s of processor "
            "time: "
            f"{ratios['cpu'][-1]:.2f} (wall {ratios['wall'][-1]:.2f})",
            flush=True,
        )
    median = statistics.median(ratios["cpu"])
    print(
        f"first compiled step, T={options.tokens}, with EntropyPenalty / without, median of {options.rounds}: "
        f"{median:.2f} of processor time ({min(ratios['cpu']):.2f} to {max(ratios['cpu']):.2f}; bar {BAR}), "
        f"{statistics.median(ratios['wall']):.2f} of the wall"
    )
    return int(median > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
