"""Measure the cost of watching: a full reading, readings every 50 steps, an idle watch, the loss and the largest logit
of every step, and readings around the optimizer step, each against the same training step; and the memory of a reading.

make bench-watch
make bench-watch ARGS="--rounds 9 --threads 2"
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from memory import peak
from timing import interleave, machine, ratio
from torch import Tensor, nn

import headwise
from headwise.health.statistics import STATISTICS
from headwise.health.watching.updates import OF_STEP
from headwise.lab.studies.vision_transformer import VisionTransformer

EVERY = 50
# A full reading over a step; readings every 50 steps over the same steps; hook time of all sites over a step.
BARS = (1.0, 0.02, 0.005)
# The largest logit, read in every step, over a step.
LOGIT_BAR = 0.03
# The memory that a reading adds at twice the sequence length, over that at the length: 2 if it grows with T.
MEMORY_BAR = 2.2


def vit() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return the blog's vision transformer on CIFAR-10's shapes, batch 256."""
    images, labels = torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,))
    model = VisionTransformer(image_size=32, channels=3, patch=4, classes=10)
    return model, lambda m: nn.functional.cross_entropy(m(images), labels)


def gpt2() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model of the size of GPT-2 small, batch 2, 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = torch.randint(0, 50257, (2, 512))
    model = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa"))
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def stepper(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], watch=None) -> Callable[[], None]:
    """Return one training step as a function."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def run() -> None:
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step(loss)

    return run


def cost(name: str, make, rounds: int) -> bool:
    """Print the cost of a reading of one model and return whether it is below the bars."""
    model, loss_of = make()
    other, _ = make()
    other.load_state_dict(model.state_dict())
    watch = headwise.watch(other, every=1, on_alert=None)
    plain, read = stepper(model.train(), loss_of), stepper(other.train(), loss_of, watch)
    times = interleave({"plain": plain, "read": read}, rounds, warmup=1)
    step = statistics.median(times["plain"])
    extra = ratio(times, "read", "plain") - 1
    sites = len({record["site"] for record in watch.records()})
    watch.remove()
    hooks, losses = idle_time(model, sites) / step, loss_time(model) / step
    overall = extra / EVERY + losses
    print(f"\n### {name}: {sites} sites, a step takes {step:.2f} s\n\n| what | over a step | bar |\n|---|---|---|")
    print(f"| full reading ({len(watch.names)} statistics) | {extra:.2f} | {BARS[0]} |")
    print(f"| every = {EVERY}, and the loss of every step, overall | {overall:.2%} | {BARS[1]:.0%} |")
    print(f"| loss of every step | {losses:.3%} | |")
    print(f"| idle: hook time x sites | {hooks:.3%} | {BARS[2]:.1%} |")
    for rows in (64, 256):
        print(f"| reading of {rows} sampled queries | {sampled(make, rounds, rows=rows):.2f} | |", flush=True)
    logit = sampled(make, rounds, statistics=["max_logit"])
    print(f"| largest logit, every step | {logit:.1%} | {LOGIT_BAR:.0%} |", flush=True)
    few = sampled(make, rounds, statistics=["max_logit"], rows=64)
    print(f"| largest logit of 64 sampled queries, every step | {few:.1%} | |", flush=True)
    around = sampled(make, rounds, statistics=list(OF_STEP))
    print(f"| gradients and updates ({len(OF_STEP)} figures), every = {EVERY} | {around / EVERY:.2%} | |", flush=True)
    spikes = sampled(make, rounds, statistics=["gradient_spike"])
    print(f"| gradient norm of every step | {spikes:.1%} | |", flush=True)
    return extra <= BARS[0] and overall <= BARS[1] and hooks <= BARS[2] and logit <= LOGIT_BAR


def sampled(make, rounds: int, **settings) -> float:
    """Measure a reading in every step, with settings of the watch."""
    model, loss_of = make()
    other, _ = make()
    watch = headwise.watch(other, every=1, on_alert=None, **settings)
    runs = {"plain": stepper(model.train(), loss_of), "read": stepper(other.train(), loss_of, watch)}
    times = interleave(runs, max(2, rounds // 2), warmup=1)
    watch.remove()
    return ratio(times, "read", "plain") - 1


def idle_time(model: nn.Module, sites: int, calls: int = 300) -> float:
    """Measure the seconds that idle hooks add to a step: one attention layer on one token, with and without a watch."""
    watch = headwise.watch(model, every=10**9, on_alert=None)
    site = next(s for s in headwise.sites(model))
    watch.remove()
    x = torch.randn(1, 1, getattr(site, "hidden", None) or next(site.module.parameters()).shape[-1])
    if site.host == "transformers":
        x = torch.randn(1, 1, model.config.hidden_size)

    def many() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(calls):
                site.module(x)
        return (time.perf_counter() - start) / calls

    without, within = [], []
    for _ in range(7):
        without.append(many())
        watch = headwise.watch(model, every=10**9, on_alert=None, statistics=["max_logit"])
        watch.step_to(1)
        within.append(many())
        watch.remove()
    return max(0.0, statistics.median(within) - statistics.median(without)) * sites


def loss_time(model: nn.Module, calls: int = 300) -> float:
    """Measure the seconds of a step() between two readings that judges a loss."""
    watch = headwise.watch(model, every=10**9, on_alert=None)
    watch.step_to(1)
    losses = (3 + 0.1 * torch.randn(60 + calls)).unbind()
    for loss in losses[:60]:
        watch.step(loss)
    start = time.perf_counter()
    for loss in losses[60:]:
        watch.step(loss)
    seconds = (time.perf_counter() - start) / calls
    watch.remove()
    return seconds


def reading_memory(size: int) -> float:
    """Return the factor by which the memory that a full reading adds to a forward grows from `size` tokens to twice as
    many."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 1, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()

    def added(tokens: int) -> int:
        x = torch.randn(1, tokens, 64)
        plain = peak(lambda: model(x))
        watch = headwise.watch(model, every=1, on_alert=None)
        model(x)
        watch.step(1.0)
        read = peak(lambda: (model(x), watch.step(1.0)))
        watch.remove()
        print(f"| reading of {tokens} tokens, {(read - plain) / 2**20:.0f} MiB more than {plain / 2**20:.0f} | | |")
        return read - plain

    return added(2 * size) / added(size)


def main() -> None:
    """Measure both models and print whether all bars hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("vit", "gpt2", "memory"))
    parser.add_argument("--tokens", type=int, default=8192, help="of the shorter sequences whose memory is compared")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine(options.threads), f"\n{len(STATISTICS)} statistics of activations")
    models = {"vit": ("the blog's ViT, batch 256", vit), "gpt2": ("GPT-2-small-sized, batch 2, T=512", gpt2)}
    results = [cost(*model, options.rounds) for name, model in models.items() if options.only in (None, name)]
    if options.only in (None, "memory"):
        print("\n### Memory of a reading, 2 layers, one head\n\n| what | | bar |\n|---|---|---|")
        growth = reading_memory(options.tokens)
        print(f"| factor of memory for twice as many tokens | {growth:.2f} | {MEMORY_BAR} |")
        results.append(growth <= MEMORY_BAR)
    print("\nall bars hold" if all(results) else "\na bar does not hold")


if __name__ == "__main__":
    main()
