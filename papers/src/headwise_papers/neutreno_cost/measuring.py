"""Measurement of a forward pass with and without NeuTRENO: operations, memory and time."""

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
# the paper's "per sample" may mean one image at a time or a batch
BATCHES, STRENGTH = (1, 8), 0.6
# forward passes per round, of which the fastest counts, because disturbances only slow them down
TRIES = 5


class Cost(NamedTuple):
    """The cost of a forward pass: FLOPs of matrix products and attention, elements written by other operations, bytes
    of memory."""

    flops: int
    others: int
    memory: int


def measure(batch: int, rounds: int, device: str, say: Callable[[str], None]) -> list[dict[str, float]]:
    """Return the ratios of both forms' costs on `batch` images for each round; only times differ between rounds."""
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
    """Return a random model in evaluation mode, the same model with NeuTRENO, and random images."""
    import copy

    import torch

    from headwise.attend.methods import NeuTRENO
    from headwise.attend.regularizing.regularize import regularize
    from headwise.lab.studies.vision_transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = VisionTransformer(**shape)  # type: ignore[arg-type]  # none of these is the norm
        plain = plain.eval().to(device)
        images = torch.randn(batch, 3, shape["image_size"], shape["image_size"]).to(device)
    fitted = copy.deepcopy(plain)
    regularize(fitted, NeuTRENO(strength=STRENGTH), example=images[:1])
    return plain, fitted, images


def cost(model: nn.Module, images: Tensor) -> Cost:
    """Return the cost of a forward pass, by torch's operation counter and the allocator."""
    import torch

    from headwise.lab.training.measuring import MemoryOfAStep, counter

    memory, others = MemoryOfAStep(), _others()
    with torch.no_grad():
        # a first pass excludes what happens only once, such as a method's initialisation
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
    """Return a mode that counts the elements written by operations other than matrix products and attention."""
    from torch.utils.flop_counter import flop_registry

    from headwise.borders import DispatchMode, tree_leaves
    from headwise.lab.training.measuring import OF_THE_CPU

    counted = {**flop_registry, **OF_THE_CPU}

    class Others(DispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket not in counted and not func.is_view:
                self.elements += sum(x.numel() for x in tree_leaves(result) if hasattr(x, "numel"))
            return result

    return Others()


def times(plain: nn.Module, fitted: nn.Module, images: Tensor, rounds: int) -> list[float]:
    """Return the ratio of both forms' fastest times in each round, after a warm-up round."""
    import torch

    def now() -> float:
        if images.device.type != "cuda":
            # processor time excludes the time of other programs
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def once(model: nn.Module) -> float:
        start = now()
        model(images)
        return now() - start

    ratios = []
    with torch.no_grad():
        for at in range(rounds + 1):
            order = (plain, fitted) if at % 2 else (fitted, plain)
            durations = [[once(model) for model in order] for _ in range(TRIES)]
            first, second = (min(column) for column in zip(*durations))
            ratios.append(second / first if at % 2 else first / second)
    return ratios[1:]
