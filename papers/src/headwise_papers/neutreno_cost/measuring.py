"""Measure what one forward of a model takes, without NeuTRENO and with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SHAPE = {
    "dim": 192,
    "depth": 12,
    "heads": 3,
    "head_dim": 64,
    "mlp_dim": 768,
    "patch": 16,
    "image_size": 224,
    "classes": 1000,
}
# "per sample" may be meant of one image at a time or of a batch
BATCHES, STRENGTH = (1, 8), 0.6
# forwards of a round, of which the quickest counts: what disturbs it never makes it quicker
TRIES = 5


class Cost(NamedTuple):
    """Hold what one forward takes: operations of matrix products and attention, elements that all others write,
    bytes."""

    flops: int
    others: int
    memory: int


def measure(batch: int, rounds: int, device: str, say: Callable[[str], None]) -> list[dict[str, float]]:
    """Return the ratios of both forms' costs on so many images, a round each; only times differ between rounds."""
    import torch

    plain, fitted, images = build(SHAPE, batch, torch.device(device))
    say(f"batch {batch}: operations and memory")
    before, after = cost(plain, images), cost(fitted, images)
    say(f"batch {batch}: times in {rounds} rounds")
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    counted = {
        "operations": after.flops / before.flops,
        "others": after.others / before.others,
        "memory": (after.memory + weights) / (before.memory + weights),
        "activations": after.memory / before.memory,
    }
    return [{**counted, "time": ratio} for ratio in times(plain, fitted, images, rounds)]


def build(shape: dict[str, int], batch: int, device: torch.device) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a random model in evaluation, the same with NeuTRENO, and random images."""
    import copy

    import torch

    from headwise.methods import NeuTRENO
    from headwise.regularizing.regularize import regularize
    from headwise.studies.vision_transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = VisionTransformer(**shape)  # type: ignore[arg-type]  # none of these is the norm
        plain = plain.eval().to(device)
        images = torch.randn(batch, 3, shape["image_size"], shape["image_size"]).to(device)
    fitted = copy.deepcopy(plain)
    regularize(fitted, NeuTRENO(strength=STRENGTH), example=images[:1])
    return plain, fitted, images


def cost(model: nn.Module, images: Tensor) -> Cost:
    """Count what one forward takes, by torch's counter of operations and by the allocator."""
    import torch

    from headwise.training.measuring import MemoryOfAStep, counter

    memory, others = MemoryOfAStep(), _others()
    with torch.no_grad():
        # what is made once, such as what a method learns from a first call, is no part of a forward
        model(images)
        with counter() as counted:
            model(images)
        with others:
            model(images)
        with memory.measured(2, images.device):
            model(images)
    assert memory.peak is not None
    return Cost(counted.get_total_flops(), others.elements, memory.peak)


def _others() -> Any:
    """Return a mode that counts the elements written by operations which are no matrix product or attention."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    from headwise.training.measuring import OF_THE_CPU

    known = {**flop_registry, **OF_THE_CPU}

    class Others(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func.overloadpacket not in known and not func.is_view:
                self.elements += sum(x.numel() for x in tree_leaves(found) if hasattr(x, "numel"))
            return found

    return Others()


def times(plain: nn.Module, fitted: nn.Module, images: Tensor, rounds: int) -> list[float]:
    """Return the ratio of both forwards' quickest times in each round, after one that warms up."""
    import torch

    def now() -> float:
        if images.device.type != "cuda":
            # what other programs take of the processor is not in it
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def once(model: nn.Module) -> float:
        start = now()
        model(images)
        return now() - start

    found = []
    with torch.no_grad():
        for at in range(rounds + 1):
            order = (plain, fitted) if at % 2 else (fitted, plain)
            taken = [[once(model) for model in order] for _ in range(TRIES)]
            first, second = (min(column) for column in zip(*taken))
            found.append(second / first if at % 2 else first / second)
    return found[1:]
