"""Single figures: QKClip's max logit, exact Decorrelation, a whole training step."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from timing import interleave, ratio
from torch import nn

import headwise
from headwise.attend.attention.largest_logits import largest_logits
from headwise.attend.methods import Decorrelation
from headwise.lab.studies.vision_transformer import VisionTransformer
from headwise.testing.calls import attend_with


def qk_clip(rounds: int) -> None:
    """Print the time of the exact max logit over that of a fused forward (bar 1.3)."""
    print("\n### QKClip: exact max logit / fused forward (bar 1.3)\n\n| shape | ratio |\n|---|---|")
    for shape in ((64, 5, 65, 64), (8, 12, 256, 64), (2, 12, 1024, 64)):
        q, k, v = (torch.randn(shape) for _ in range(3))
        fused, largest = (
            partial(F.scaled_dot_product_attention, q, k, v),
            partial(largest_logits, q, k, None, False, 64**-0.5),
        )
        times = interleave({"fused": fused, "max": largest}, rounds * 2)
        print(f"| {shape} | {ratio(times, 'max', 'fused'):.2f} |", flush=True)


def decorrelation(rounds: int) -> None:
    """Print how much faster the exact Gram form is than the sum over pairs of heads (bar 3)."""
    q, k, v = (torch.randn(8, 12, 197, 64, requires_grad=True) for _ in range(3))
    method = Decorrelation()

    def pairwise() -> None:
        a = (q @ k.transpose(-1, -2) * 64**-0.5).softmax(-1)
        total = torch.zeros(())
        for i in range(12):
            for j in range(i + 1, 12):
                total = total + (a[:, i].transpose(-1, -2) @ a[:, j]).square().mean()
        ((a @ v).sum() + total).backward()

    def exact() -> None:
        out, penalty = attend_with([method], q, k, v)
        (out.sum() + penalty).backward()

    times = interleave({"pairwise": pairwise, "exact": exact}, max(3, rounds // 3), warmup=1)
    print(
        f"\n### Decorrelation, H=12, T=197, batch 8: pairwise / exact = {ratio(times, 'pairwise', 'exact'):.1f} (bar "
        "3)",
        flush=True,
    )


def packed_step(methods, rounds: int, clock: str) -> None:
    """Print a training step of a Llama of 4 layers on 8 sequences of 32 to 256 tokens in one row, with each method over
    one without.

    Also print the same ratio on the padded batch of these sequences, and the padded step over the packed one: the cost
    of padding.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    print("\n### Training step on packed rows, 8 sequences of 32 to 256 tokens, sdpa, with / without\n")
    print("| method | packed row | padded batch | padded / packed, with the method |\n|---|---|---|---|")
    lengths = [32, 256, 64, 96, 128, 48, 192, 80]
    rows = [torch.randint(1, 1000, (n,)) for n in lengths]
    places = torch.arange(max(lengths))
    packed = {"input_ids": torch.cat(rows)[None], "position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    padded = {
        "input_ids": torch.stack([F.pad(row, (0, max(lengths) - len(row))) for row in rows]),
        "attention_mask": torch.stack([places < n for n in lengths]).long(),
    }
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=1000))

    def step(model, batch, handle) -> None:
        loss = model(**batch, use_cache=False).logits.square().mean()
        (loss if handle is None else loss + handle.loss()).backward()
        model.zero_grad()

    for method in methods:
        fitted = copy.deepcopy(plain)
        handle = headwise.regularize(fitted, method)
        runs = {
            f"{name} {kind}": partial(step, model, batch, handle_or_none)
            for name, model, handle_or_none in (("plain", plain, None), ("method", fitted, handle))
            for kind, batch in (("packed", packed), ("padded", padded))
        }
        times = interleave(runs, max(5, rounds // 2), clock=clock)
        over = [ratio(times, f"method {kind}", f"plain {kind}") for kind in ("packed", "padded")]
        print(
            f"| {method!r} | {over[0]:.2f} | {over[1]:.2f} | {ratio(times, 'method padded', 'method packed'):.2f} |",
            flush=True,
        )


def model_step(methods, rounds: int) -> None:
    """Print a training step of a DeiT-tiny-sized model (224 px, batch 8) with each method over one without (bar
    1.05)."""
    print(
        "\n### Training step of a DeiT-tiny-sized model, batch 8, 224 px, with / without (bar 1.05)\n\n| method | "
        "ratio |\n|---|---|"
    )
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    for method in methods:
        plain, fitted = _deit_tiny(), _deit_tiny()
        handle = headwise.regularize(fitted, method, example=images)
        runs = {"without": _step(plain, images, labels, None), "with": _step(fitted, images, labels, handle)}
        times = interleave(runs, max(5, rounds // 2))
        handle.remove(discard=True)
        print(f"| {method!r} | {ratio(times, 'with', 'without'):.3f} |", flush=True)


def _deit_tiny() -> nn.Module:
    return VisionTransformer(
        image_size=224, channels=3, patch=16, dim=192, depth=12, heads=3, head_dim=64, mlp_dim=768, classes=1000
    )


def _step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, handle):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        loss = F.cross_entropy(model(images), labels)
        if handle is not None:
            loss = loss + handle.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if handle is not None:
            handle.after_step()

    return run
