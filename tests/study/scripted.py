"""A training script without torch, as quick as one can be: what it does wrong is named by its argument."""

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path

import headwise

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--wrong", default="")
parser.add_argument("--steps", type=int, default=4)
asked = parser.parse_args()

run = headwise.run()
wrong = asked.wrong
draw = random.Random(0 if wrong == "seed" else run.seed)
kept = run.folder / "step.txt"
if wrong == "early":
    sys.exit("no such thing as --wrong early")
begin = int(kept.read_text()) if run.resumed and kept.exists() else 0
batches = [[draw.random() for _ in range(3)] for _ in range(asked.steps)]
if wrong == "order" and run.arm != "baseline":
    batches.reverse()
for step in range(begin + 1, asked.steps + 1):
    run.saw(batches[step - 1])
    loss = sum(batches[step - 1]) / step
    run.log(step=step, loss=float("nan") if wrong == "diverges" and step == 3 else loss)
    kept.write_text(str(step))
    print(f"step {step} of {run.arm}", flush=True)
    if wrong == "killed" and step == 2 and not run.resumed:
        os.kill(os.getpid(), signal.SIGKILL)
    if wrong == "slow":
        time.sleep(0.2)
    while "HOLD" in os.environ and step == 2:
        time.sleep(0.2)
    if wrong == "spawns" and step == 2:
        Path("child").write_text(
            str(os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"]))
        )
if wrong in ("hangs", "spawns"):
    time.sleep(60)
if wrong == "exits":
    sys.exit("the disk of the script is on fire")
figure = 0.5 + asked.lr + 0.1 * draw.random()
if run.trial or wrong == "validation":
    run.record(split="validation", accuracy=1 - abs(asked.lr - 0.2))
if wrong == "nan":
    run.record(accuracy=float("nan"))
if wrong == "other":
    run.record(f1=figure)
elif wrong == "slash":
    run.record(**{"eval/loss": figure, "val acc@1": 1 - figure})
elif wrong != "nothing":
    run.record(accuracy=figure, loss=1 - figure)
if wrong == "twice":
    run.record(accuracy=figure)
