"""Train a GPT-2 on the bytes of a text: `accelerate launch bytes_with_accelerate.py --text input.txt`."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import headwise  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

run = headwise.run()  # headwise
torch.manual_seed(run.seed)  # headwise
accelerator = Accelerator()
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=args.width, n_layer=args.layers, n_head=4)
model = GPT2LMHeadModel(config)
handle = run.regularize(model)  # headwise
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
rows = torch.tensor(list(args.text.read_bytes())).unfold(0, 64, 32)
training, test = rows[: -len(rows) // 5], rows[-len(rows) // 5 :]
order = torch.Generator().manual_seed(run.seed)  # headwise
loader = DataLoader(training, batch_size=8, shuffle=True, generator=order)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = 0
for _epoch in range(args.epochs):
    model.train()
    for tokens in loader:
        run.saw(tokens)  # headwise
        loss = model(input_ids=tokens, labels=tokens).loss
        loss = loss + handle.loss()  # headwise
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        handle.after_step()  # headwise
        step += 1
        run.log(step=step, loss=loss.item())  # headwise
model.eval()
with torch.no_grad():
    loss = accelerator.unwrap_model(model)(
        input_ids=test.to(accelerator.device), labels=test.to(accelerator.device)
    ).loss
accelerator.print(f"held-out loss {loss.item():.3f}")
run.record(loss=loss.item())  # headwise
accelerator.end_training()
