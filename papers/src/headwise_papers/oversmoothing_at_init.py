"""A study of over-smoothing at initialisation: the similarity of tokens by depth in random models, without training.

Twelve pre-LN blocks of width 192 with 3 heads process 65 random tokens; weights have a standard deviation of 1/√width.
Within a seed all arms have the same weights and tokens. Token cosine is a diagnostic, not a measure of quality.

The study does not use `compare`, whose runs take at least one optimizer step and evaluate a task's loss on data: here
there is no step, loss or data, and one arm sets learned parameters of its method by hand, which no text of an arm can
express.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise_papers.findings import findings
from headwise_verdict.results.records import Claim, ClaimTest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.attend.core.method import Method

TITLE = "Over-smoothing at initialisation"
QUESTION = (
    "Before any training, how alike do the tokens of a DeiT-tiny-sized transformer grow with depth, and what do "
    "NeuTRENO, FeatScale and ValueResidual change about it?"
)
WIDTH, DEPTH, HEADS, TOKENS, BATCH = 192, 12, 3, 65, 8
BASELINE = "baseline"
GAIN = 1.0  # FeatScale's gain of the deviations from the mean over tokens, in the arm where it is not 0
LABELS = {"cosine": "final token cosine", "high_frequency": "final high-frequency ratio"}
CLAIMS = (
    Claim(
        text="A random transformer with NeuTRENO has less similar tokens than one without.",
        source="Nguyen et al. 2023, arXiv 2312.00751, section G.3, figure 6, of which no figures are given",
        published={"cosine": "significantly reduced (a figure)"},
        tests=(ClaimTest(arm="NeuTRENO(strength=0.6)", outcome="cosine", says="lower"),),
    ),
)

# the methods of an arm, and the values to which its learned parameters are set
Fitted = tuple[tuple["Method", ...], dict[str, float]]


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the findings on every arm from `seeds` random models (default 10); `jobs` has no effect."""
    import torch

    say, seeds = progress or (lambda text: None), seeds or 10
    measured = []
    with torch.no_grad():
        for seed in range(seeds):
            say(f"random model {seed + 1} of {seeds}")
            measured += [{"arm": label, "seed": seed, **measure(seed, arm, device)} for label, arm in arms().items()]
    outputs = {(record["arm"], record["seed"]): record["output"] for record in measured}
    unchanged = sum(bool((outputs["FeatScale()", seed] == outputs[BASELINE, seed]).all()) for seed in range(seeds))
    figures = {
        label: [
            {"cosine": record["cosine"][-1], "high_frequency": record["high_frequency"][-1]}
            for record in measured
            if record["arm"] == label
        ]
        for label in arms()
    }
    return findings(
        "oversmoothing-at-init",
        TITLE,
        QUESTION,
        figures,
        CLAIMS,
        labels=LABELS,
        notes=(
            "FeatScale's gains start at 0, where it does nothing: its output equals the plain model's to the bit in "
            f"{unchanged} of {seeds} models. The arm with a gain of {GAIN:g} on the deviations from the mean over "
            "tokens shows how it acts once it has learned such a gain.",
            "Token cosine is a diagnosis, not a score: it does not show which model would train better.",
        ),
        charts=[_chart(measured, key) for key in LABELS],
        settings={
            "models": seeds,
            "width": WIDTH,
            "depth": DEPTH,
            "heads": HEADS,
            "tokens": TOKENS,
            "batch": BATCH,
            "mlp": 4 * WIDTH,
            "weights": f"normal, standard deviation 1/√{WIDTH}; biases 0",
            "tokens_drawn_from": "standard normal",
            "device": device,
        },
    )


def arms() -> dict[str, Fitted]:
    """Return the arms by label: the methods to fit, and the gains to set on them."""
    from headwise.attend.methods import FeatScale, NeuTRENO, ValueResidual

    plain_arms: dict[str, Fitted] = {
        repr(method): ((method,), {}) for method in (NeuTRENO(strength=0.6), FeatScale(), ValueResidual(mix=0.5))
    }
    scaled_arms: dict[str, Fitted] = {f"FeatScale(), rest_gain = {GAIN:g}": ((FeatScale(),), {"rest_gain": GAIN})}
    return {BASELINE: ((), {})} | plain_arms | scaled_arms


def build(seed: int, device: str = "cpu") -> tuple[nn.Sequential, Tensor]:
    """Return the random model in evaluation mode and its tokens (8, 65, 192), the same for every arm of a seed."""
    import torch
    from torch import nn

    from headwise.lab.studies.vision_transformer import ImageBlock

    generator = torch.Generator().manual_seed(seed)
    # Building layers would advance torch's global generator, which belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(*(ImageBlock(WIDTH, HEADS, WIDTH // HEADS, 4 * WIDTH) for _ in range(DEPTH))).eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
    return model.to(device), torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(device)


def measure(seed: int, arm: Fitted, device: str = "cpu") -> dict[str, Any]:
    """Return token cosine and high-frequency ratio at the input and after each block, and the output."""
    from headwise.attend.regularizing.regularize import regularize

    (model, tokens), (methods, gains) = build(seed, device), arm
    if methods:
        regularize(model, *methods, example=tokens)
    for name, value in gains.items():
        parameters = [parameter for path, parameter in model.named_parameters() if path.endswith(name)]
        if len(parameters) != DEPTH:
            raise RuntimeError(f"{methods[0]!r} should hold {DEPTH} parameters {name}, found {len(parameters)}")
        for parameter in parameters:
            parameter.fill_(value)
    activations = [tokens]
    for block in model:
        block.register_forward_hook(lambda module, args, output: activations.append(output))
    model(tokens)
    return {
        "cosine": [token_cosine(x) for x in activations],
        "high_frequency": [high_frequency(x) for x in activations],
        "output": activations[-1],
    }


def token_cosine(x: Tensor) -> float:
    """Return the mean cosine between different tokens of a sample, over samples: (‖Σ x̂ᵢ‖² − T)/(T(T − 1))."""
    from torch.nn.functional import normalize

    tokens = x.shape[1]
    together = normalize(x.double(), dim=-1).sum(1).square().sum(-1)
    return float(((together - tokens) / (tokens * (tokens - 1))).mean())


def high_frequency(x: Tensor) -> float:
    """Return ‖x − mean over tokens‖/‖x‖, mean over samples."""
    x = x.double()
    return float(((x - x.mean(1, keepdim=True)).norm(dim=(1, 2)) / x.norm(dim=(1, 2))).mean())


def _chart(measured: list[dict[str, Any]], key: str) -> dict[str, Any]:
    title = LABELS[key].removeprefix("final ")
    labels = list(dict.fromkeys(record["arm"] for record in measured))
    data = []
    for label in labels:
        curves = [record[key] for record in measured if record["arm"] == label]
        for depth in range(DEPTH + 1):
            data.append(
                {"blocks passed": depth, title: sum(curve[depth] for curve in curves) / len(curves), "arm": label}
            )
    return {
        "title": f"{title.capitalize()} by depth, mean over models",
        "x": "blocks passed",
        "y": title,
        "series": "arm",
        "data": data,
    }
