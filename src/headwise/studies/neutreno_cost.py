"""What NeuTRENO costs in inference: operations, memory and time of a DeiT-tiny with it, over those of the same model without; no training.

Nguyen et al. 2023, arXiv 2312.00751, section G.4. DeiT-tiny on images of 224 pixels: 12 layers, width 192, 3 heads, 197 tokens. All figures are
ratios of one model's two forms in one run. Times are those of the processor (on a GPU: of the clock), taken in turns, in every other round the
second form first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TITLE = "What NeuTRENO costs"
QUESTION = "Does NeuTRENO cost nothing in inference: are operations, memory and time those of the plain model?"
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
# the first is the published "per sample"
BATCHES, STRENGTH = (1, 8), 0.6
# a ratio within it counts as 1.00: of what is counted, and of what a clock measures beside other programs
COUNTED, TIMED = 0.005, 0.05
SOURCE = "Nguyen et al. 2023, arXiv 2312.00751, G.4"


class Cost(NamedTuple):
    """Hold what one forward takes: operations of matrix products and attention, elements that all others write, bytes."""

    flops: int
    others: int
    memory: int


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure both forms, their times in `seeds` rounds (20 by default), and return the findings; `jobs` changes nothing."""
    say, rounds = progress or (lambda text: None), seeds or 20
    measured = [measure(batch, rounds, device, say) for batch in BATCHES]
    return {
        "kind": "findings",
        "name": "neutreno-cost",
        "scale": "small",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": _paragraphs(measured),
        "tables": [_table(measured)],
        "charts": [],
        "claims": judged(measured[0], rounds),
        "settings": {
            **SHAPE,
            "batches": list(BATCHES),
            "strength": STRENGTH,
            "rounds": rounds,
            "device": device,
            "dtype": "float32",
        },
    }


def measure(batch: int, rounds: int, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Return both forms' costs on so many images, and the ratios with the interval of the time's."""
    import torch

    from headwise.comparing.results.intervals import interval

    plain, fitted, images = build(SHAPE, batch, torch.device(device))
    say(f"batch {batch}: operations and memory")
    before, after = cost(plain, images), cost(fitted, images)
    say(f"batch {batch}: times in {rounds} rounds")
    found = interval([math.log(ratio) for ratio in times(plain, fitted, images, rounds)])
    weights = sum(p.numel() * p.element_size() for p in plain.parameters())
    assert found.mean is not None
    return {
        "batch": batch,
        "before": before,
        "after": after,
        "weights": weights,
        "operations": after.flops / before.flops,
        "others": after.others / before.others,
        "memory": (after.memory + weights) / (before.memory + weights),
        "activations": after.memory / before.memory,
        "time": math.exp(found.mean),
        "interval": [None if end is None else math.exp(end) for end in (found.low, found.high)],
    }


def build(shape: dict[str, int], batch: int, device: torch.device) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a random model in evaluation, the same with NeuTRENO, and random images."""
    import copy

    import torch

    from headwise.methods import NeuTRENO
    from headwise.regularizing.regularize import regularize
    from headwise.studies.tasks.vision_transformer import VisionTransformer

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

    from headwise.comparing.run.memory import MemoryOfAStep
    from headwise.comparing.run.operations import counter

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

    from headwise.comparing.run.operations import OF_THE_CPU

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
    """Return the ratio of both forwards' times in each round, after one that warms up."""
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
            taken = {id(model): once(model) for model in order}
            found.append(taken[id(fitted)] / taken[id(plain)])
    return found[1:]


def judged(one: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
    """Return the published ratios with ours and a verdict each; that of the time by its interval."""
    low, high = one["interval"]
    if low is None or low < 1 - TIMED < high or low < 1 + TIMED < high:
        timed, why = "cannot be told", f"the interval crosses 1 ± {TIMED:g}"
    else:
        timed, why = (
            ("agrees", f"within 1 ± {TIMED:g}")
            if 1 - TIMED <= low <= 1 + TIMED
            else ("does not agree", f"outside 1 ± {TIMED:g}")
        )
    return [
        _claim("operations", f"{one['operations']:.4f}", _counted(one["operations"])),
        _claim(
            "memory",
            f"{one['memory']:.4f}, weights included; {one['activations']:.4f} without them",
            _counted(one["memory"]),
        ),
        _claim("time", f"{one['time']:.3f} {_interval(one)} over {rounds} rounds", (timed, why)),
    ]


def _counted(ratio: float) -> tuple[str, str]:
    return ("agrees", "") if abs(ratio - 1) < COUNTED else ("does not agree", f"not 1.00 within {COUNTED:g}")


def _claim(what: str, ours: str, told: tuple[str, str]) -> dict[str, Any]:
    text = f"In inference NeuTRENO takes the {what} of the plain model, per sample."
    return {
        "text": text,
        "source": SOURCE,
        "published": {"ratio": "≈ 1.00"},
        "ours": ours,
        "verdict": told[0],
        "why": told[1],
    }


def _interval(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return "" if low is None else f"[{low:.3f}, {high:.3f}]"


def _paragraphs(measured: list[dict[str, Any]]) -> list[str]:
    one = measured[0]
    return [
        f"For one image NeuTRENO takes {one['operations']:.4f} times the operations of the plain model, {one['memory']:.3f} times the memory and "
        f"{one['time']:.3f} times the time {_interval(one)}.",
        "Operations are those of matrix products and attention, by torch's counter; NeuTRENO adds none of these. What it adds is element-wise: "
        f"{one['others']:.2f} times the elements that all other operations write.",
        "Memory is the most that one forward holds beside its input, with the weights; the first layer's values are held until the last layer. "
        f"In batches of {measured[-1]['batch']} images the weights count less: {measured[-1]['memory']:.3f}.",
        "The publication gives the ratios and not what it counts as memory.",
    ]


def _table(measured: list[dict[str, Any]]) -> dict[str, Any]:
    columns = [
        "images",
        "operations (10⁹)",
        "ratio",
        "other elements (10⁶)",
        "ratio",
        "memory of a forward (MiB)",
        "ratio, with weights",
    ]
    rows = []
    for one in measured:
        before, after = one["before"], one["after"]
        rows.append(
            [
                one["batch"],
                *(f"{before.flops / 1e9:.3f} → {after.flops / 1e9:.3f}", f"{one['operations']:.4f}"),
                *(f"{before.others / 1e6:.2f} → {after.others / 1e6:.2f}", f"{one['others']:.3f}"),
                *(f"{before.memory / 2**20:.2f} → {after.memory / 2**20:.2f}", f"{one['memory']:.3f}"),
                f"{one['time']:.3f} {_interval(one)}",
            ]
        )
    return {"title": "Plain → NeuTRENO", "columns": [*columns, "time, ratio [95 %]"], "rows": rows}
