"""Train a small GPT on the bytes of a text: `python gpt.py --text input.txt`.

A typical script: its own model, schedule, evaluation and checkpoints. The lines that end in `# headwise` make it a
study.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import headwise  # headwise


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(256, args.width)
        self.places = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, 256, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def split(args):
    data = torch.tensor(list(args.text.read_bytes()))
    rows = data.unfold(0, args.length + 1, args.length // 2)
    held_out = max(1, len(rows) // 10)
    return rows[:-held_out], rows[-held_out:]


def rate(args, step):
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    share = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 * args.lr + 0.45 * args.lr * (1 + math.cos(math.pi * share))


@torch.no_grad()
def evaluate(model, rows):
    model.eval()
    losses = [loss_of(model, part) * len(part) for part in rows.split(64)]
    model.train()
    return (sum(losses) / len(rows)).item()


def save(path, model, optimizer, handle, step):
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    kept["headwise"] = handle.state()  # headwise
    torch.save(kept, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(path, model, optimizer, handle):
    if not path.exists():
        return 0
    kept = torch.load(path)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    handle.load_state(kept["headwise"])  # headwise
    print(f"resuming at step {kept['step']}")
    return kept["step"]


def main():
    args = arguments()
    run = headwise.run()  # headwise
    args.seed, args.out = run.seed, run.folder  # headwise
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training, test = (rows.to(device) for rows in split(args))
    model = GPT(args).to(device)
    handle = run.regularize(model)  # headwise
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    begin = load(args.out / "checkpoint.pt", model, optimizer, handle)

    for step in range(begin, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(args, step)
        # batches are a function of seed and step: a resumed run sees the same ones
        draws = torch.Generator().manual_seed(1_000_003 * args.seed + step)
        batch = training[torch.randint(len(training), (args.batch,), generator=draws).to(device)]
        loss = loss_of(model, batch)
        (loss + handle.loss()).backward()  # headwise
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        handle.after_step()  # headwise
        run.log(step=step + 1, loss=loss.item())  # headwise
        if (step + 1) % args.save_every == 0:
            save(args.out / "checkpoint.pt", model, optimizer, handle, step + 1)
            print(f"step {step + 1}: loss {loss.item():.3f}")
    held_out = evaluate(model, test)
    print(f"held-out loss {held_out:.4f} nats per byte")
    run.record(loss=held_out)  # headwise


if __name__ == "__main__":
    main()
