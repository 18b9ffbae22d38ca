"""Train a small GPT-2 on the bytes of a text with Lightning: `python lightning_loop.py --text input.txt`."""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from headwise import DropHead, EntropyPenalty  # headwise
from headwise.lightning import HeadwiseCallback  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", type=Path, default=Path("logs"))
parser.add_argument("--resume", type=Path, help="a checkpoint of an earlier run")
args = parser.parse_args()


class Bytes(pl.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(vocab_size=256, n_positions=64, n_embd=args.width, n_layer=args.layers, n_head=4)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, tokens):
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
rows = torch.tensor(list(args.text.read_bytes())).unfold(0, 64, 64)
methods = HeadwiseCallback(DropHead(p=0.1), EntropyPenalty(strength=0.01), watch={"every": 10})  # headwise
trainer = pl.Trainer(
    max_steps=args.steps,
    accumulate_grad_batches=2,
    default_root_dir=args.out,
    logger=TensorBoardLogger(args.out),
    callbacks=[methods],  # headwise
)
trainer.fit(Bytes(), DataLoader(rows, batch_size=4, shuffle=True), ckpt_path=args.resume)
