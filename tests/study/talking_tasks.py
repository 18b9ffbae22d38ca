"""Tasks whose runs print: with Python, past Python, as a progress bar, with last words, and what transformers says
while it loads."""

import multiprocessing
import os
import sys
from pathlib import Path

import torch
from tiny_task import Slow, Tiny
from torch import nn

# as a library may hold one: who is killed leaves its semaphore behind
kept = multiprocessing.RLock()

talked: list[bool] = []


class Talking(Tiny):
    """Print in every way, once in each process that carries out runs."""

    epochs: int = 2

    def model(self):
        if talked:
            return Tiny.model(self)
        talked.append(True)
        print("said with Python")
        sys.stderr.write("\r 10%|#   \r100%|####\n")
        os.write(1, b"\x1b[31msaid past Python\x1b[0m\n")
        print("twice\ntwice")
        return Tiny.model(self)


class Aborting(Tiny):
    """Say why, then die."""

    def model(self):
        os.write(2, b"no such device: the process ends\n")
        os.abort()


class FailingBeside(Slow):
    """Fail in the run of one arm as a full disk does, while another trains."""

    source: str = ""

    def model(self):
        if self.learning_rate > 0.4:
            while not list(Path(self.source).glob("runs/*/metrics.jsonl")):
                pass
            raise OSError(28, "No space left on device")
        return Slow.model(self)


class Loading(Tiny.__base__):
    """Load a model of transformers whose classifier the folder lacks, which transformers reports."""

    epochs: int = 1
    batch_size: int = 8
    source: str = ""

    def model(self):
        import transformers

        return Logits(transformers.AutoModelForSequenceClassification.from_pretrained(self.source, num_labels=2))

    def data(self, split):
        return torch.arange(64).view(16, 4) % 8, torch.arange(16) % 2


class Logits(nn.Module):
    """Return what the loss takes."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, tokens):
        return self.whole(tokens).logits
