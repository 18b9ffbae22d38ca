"""Tell the parity of short binary words with a small transformer: `python train.py --epochs 4`."""

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import headwise  # headwise


class Config:
    """Hold what the command line says."""

    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int, default=4)
        parser.add_argument("--batch-size", type=int, default=16)
        parser.add_argument("--train-size", type=int, default=96)
        parser.add_argument("--test-size", type=int, default=64)
        parser.add_argument("--bits", type=int, default=6)
        parser.add_argument("--dim", type=int, default=16)
        parser.add_argument("--depth", type=int, default=2)
        parser.add_argument("--lr", type=float, default=3e-3)
        parser.add_argument("--weight-decay", type=float, default=0.01)
        parser.add_argument("--warmup", type=float, default=0.1)
        parser.add_argument("--pause", type=float, default=0.0)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--out", type=Path, default=Path("checkpoints"))
        self.__dict__.update(vars(parser.parse_args()))


def words(count, bits, seed):
    draws = random.Random(seed)
    rows = [[draws.randrange(2) for _ in range(bits)] for _ in range(count)]
    inputs = torch.tensor(rows)
    return inputs, inputs[:, : bits // 2].sum(1) % 2


class Layer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(2, config.dim)
        self.places = nn.Parameter(0.02 * torch.randn(config.bits, config.dim))
        self.layers = nn.ModuleList(Layer(config.dim) for _ in range(config.depth))
        self.head = nn.Linear(config.dim, 2)

    def forward(self, x):
        x = self.embed(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Schedule:
    """Warm up, then decay along a cosine."""

    def __init__(self, config, steps):
        self.peak, self.steps = config.lr, steps
        self.warmup = max(1, round(config.warmup * steps))

    def at(self, step):
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * 0.5 * (1 + math.cos(math.pi * share))


class Trainer:
    def __init__(self, config):
        self.config = config
        config.seed, config.out = run.seed, run.folder  # headwise
        torch.manual_seed(config.seed)
        self.model = Model(config)
        self.handle = run.regularize(self.model)  # headwise
        self.train = words(config.train_size, config.bits, 1)
        self.test = words(config.test_size, config.bits, 2)
        self.per_epoch = math.ceil(config.train_size / config.batch_size)
        self.schedule = Schedule(config, config.epochs * self.per_epoch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        self.epoch = self.step = 0
        config.out.mkdir(parents=True, exist_ok=True)
        self.path = config.out / "last.pt"

    def order(self):
        draws = torch.Generator().manual_seed(1000 * self.config.seed + self.epoch)
        return torch.randperm(self.config.train_size, generator=draws).split(self.config.batch_size)

    def train_step(self, rows):
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.at(self.step)
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.train[0][rows]), self.train[1][rows])
        (loss + self.handle.loss()).backward()  # headwise
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.handle.after_step()  # headwise
        run.log(step=self.step, loss=loss.item())  # headwise
        time.sleep(self.config.pause)
        return loss.item()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        logits = self.model(self.test[0])
        self.model.train()
        accuracy = (logits.argmax(-1) == self.test[1]).float().mean().item()
        return {"accuracy": accuracy, "loss": F.cross_entropy(logits, self.test[1]).item()}

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self):
        kept = self.state() | {"epoch": self.epoch, "step": self.step}
        torch.save(kept, self.path.with_suffix(".tmp"))
        os.replace(self.path.with_suffix(".tmp"), self.path)

    def load(self):
        if self.path.exists():
            kept = torch.load(self.path)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.epoch, self.step = kept["epoch"], kept["step"]
            print(f"going on from epoch {self.epoch}")

    def fit(self):
        self.load()
        while self.epoch < self.config.epochs:
            losses = [self.train_step(rows) for rows in self.order()]
            self.epoch += 1
            self.save()
            print(json.dumps({"epoch": self.epoch, "loss": sum(losses) / len(losses)}), flush=True)
        return self.evaluate()


if __name__ == "__main__":
    run = headwise.run()  # headwise
    found = Trainer(Config()).fit()
    print(json.dumps(found))
    run.record(**found)  # headwise
