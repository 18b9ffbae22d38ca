"""Train a GPT in one file, like nanoGPT: own attention, micro steps, clipping. `nanogpt_loop.py --text FILE`."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import headwise  # headwise
from headwise import DropHead, QKClip  # headwise

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", type=Path, default=Path(__file__))
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


torch.manual_seed(0)
blocks = [Block(args.width, 4) for _ in range(args.layers)]
model = nn.Sequential(nn.Embedding(256, args.width), *blocks, nn.LayerNorm(args.width), nn.Linear(args.width, 256))
regularized = headwise.regularize(model, DropHead(p=0.1), QKClip(threshold=100.0))  # headwise
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

rows = torch.tensor(list(args.text.read_bytes())).unfold(0, 65, 32)
for step in range(args.steps):
    for _micro in range(2):
        batch = rows[torch.randint(len(rows), (8,))]
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2
        loss = loss + regularized.loss() / 2  # headwise
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    regularized.after_step()  # headwise
    if step % 10 == 0:
        print(f"step {step}: loss {2 * loss.item():.3f}")
