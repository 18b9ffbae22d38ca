"""A layer whose output is its own attention map, which shows the effect of a method on A through any host.

The values of each head are the identity, and so is the output projection. The layer's output is then, head by head,
the map that acts on the values, whichever stage of the layer a method edits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from headwise.attend.core.method import Method

TOKENS, HEADS = 10, 2
CHANNELS = TOKENS * HEADS
# number of steps that lower a penalty before it is shown
PENALTY_STEPS, PENALTY_RATE = 100, 0.002
# smallest change of a weight that a reader can see in a picture
VISIBLE = 0.05


class Attention(nn.Module):
    """Self attention with separate projections, by torch's fused call."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(channels, channels, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention as a branch of the residual stream."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.attn = Attention(channels, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x)


class Stack(nn.Module):
    """Two blocks that both read the input; the output is the second one's branch."""

    def __init__(self, channels: int = CHANNELS, heads: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(channels, heads), Block(channels, heads)])

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0](x)
        return self.layers[1](x) - x


def fixed() -> tuple[Stack, Tensor]:
    """Return the layer of all pictures and its input (1, T, C): a local head and a long-range one, values the
    identity."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, CHANNELS, generator=generator)
    model, back = Stack(), torch.linalg.pinv(x[0])
    tokens = torch.arange(TOKENS)
    near = -(tokens[:, None] - tokens).abs().float()
    far = 2.5 * (tokens[None] % 4 == 0).float() - 0.25 * (TOKENS - 1 + near)
    noise = torch.randn(HEADS, TOKENS, TOKENS, generator=generator)
    # Queries that are the wanted logits and keys that are the identity: q·k equals the logits.
    wanted = (torch.stack([near, far]) + 0.8 * noise) * TOKENS**0.25
    identity = torch.eye(TOKENS).expand(HEADS, -1, -1)
    attention = model.layers[1].attn
    with torch.no_grad():
        for layer in model.layers:
            layer.attn.q_proj.weight.copy_(_weight(back, wanted))
            layer.attn.k_proj.weight.copy_(_weight(back, identity * TOKENS**0.25))
            layer.attn.o_proj.weight.copy_(torch.eye(CHANNELS))
            # close to 0, but not 0: some reparametrizations divide by the norm
            layer.attn.v_proj.weight.copy_(1e-6 * _weight(back, identity))
        attention.v_proj.weight.copy_(_weight(back, identity))
    return model, x


def _weight(back: Tensor, rows: Tensor) -> Tensor:
    """Return the weight of a projection that maps the input, whose inverse is passed, to these rows by head (H, T,
    T)."""
    return (back @ rows.transpose(0, 1).flatten(1)).T


def maps(model: Stack, x: Tensor) -> Tensor:
    """Return the map that acts on the values, (H, T, N)."""
    with torch.no_grad():
        return model(x)[0].unflatten(-1, (HEADS, -1)).transpose(0, 1)


def pictured(method: Method) -> tuple[Tensor, Tensor, str]:
    """Return the maps (H, T, N) without and with a method, and a sentence on what was done if that is more than one
    forward."""
    model, x = fixed()
    plain = maps(model, x)
    handle = headwise.regularize(model.train(), method, example=x)
    note = ""
    if method.penalizes:
        note = _lower_penalty(model, x, handle)
    elif method.overrides("after_step") and method.acts == "train":
        model(x)
        handle.after_step()
        note = "After one step of the optimizer."
    edited = maps(model, x)
    if handle.parameters() and (edited - plain).abs().max() < VISIBLE:
        with torch.no_grad():
            for parameter in handle.parameters():
                parameter += 1
        note, edited = "At its start it changes nothing; the picture has 1 added to its parameters.", maps(model, x)
    elif method.overrides("after_step") and (edited - plain).abs().max() < VISIBLE:
        plain, edited = _stepped([]), _stepped([method])
        note = "Both after one step of Adam, with and without it, that lowers the squares of the output."
    return plain, edited, note


def _stepped(methods: list[Method]) -> Tensor:
    """Return the maps after a step of an optimizer, for a method that changes the step."""
    model, x = fixed()
    handle = headwise.regularize(model.train(), *methods, example=x) if methods else None
    optimizer = torch.optim.Adam(
        [model.layers[1].attn.q_proj.weight, model.layers[1].attn.k_proj.weight], lr=PENALTY_RATE
    )
    model(x).square().mean().backward()
    optimizer.step()
    if handle is not None:
        handle.after_step()
    return maps(model, x)


def _lower_penalty(model: Stack, x: Tensor, handle: headwise.Regularized) -> str:
    moved = [model.layers[1].attn.q_proj.weight, model.layers[1].attn.k_proj.weight]
    optimizer = torch.optim.Adam(moved, lr=PENALTY_RATE)
    for _ in range(PENALTY_STEPS):
        model(x)
        optimizer.zero_grad()
        handle.loss().backward()
        optimizer.step()
        handle.after_step()
    return f"After {PENALTY_STEPS} steps of Adam that lower only this penalty, through the weights of queries and keys."


def learned_numbers(method: Method, channels: int = 768, heads: int = 12) -> int:
    """Return the number of parameters that a method adds to a layer of this width: the second of two, because the first
    may be plain."""
    model = Stack(channels, heads)
    before = sum(p.numel() for p in model.layers[1].parameters())
    headwise.regularize(model, method, example=torch.zeros(1, TOKENS, channels))
    return sum(p.numel() for p in model.layers[1].parameters()) - before
