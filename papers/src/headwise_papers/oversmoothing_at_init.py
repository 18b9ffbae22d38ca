"""Over-smoothing at initialisation: how alike tokens grow with depth in random DeiT-tiny-sized models; no data, no
training.

Twelve pre-LN blocks of width 192 with 3 heads on 65 random tokens; weights drawn with a standard deviation of 1/√width.
Within a seed all arms have the same weights and tokens. Token cosine is a diagnosis, not a score of quality.

It keeps a flow of its own beside `compare`, whose runs take at least one optimizer step and judge a model by a task's
loss on data: here there is neither a step, nor a loss, nor data, and one arm sets the learned parameters of its method
by hand, which no text of an arm can say.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from headwise.core.method import Method

TITLE = "Over-smoothing at initialisation"
QUESTION = (
    "Before any training, how alike do the tokens of a DeiT-tiny-sized transformer grow with depth, and what do "
    "NeuTRENO, FeatScale and ValueResidual change about it?"
)
WIDTH, DEPTH, HEADS, TOKENS, BATCH = 192, 12, 3, 65, 8
BASELINE = "baseline"
GAIN = 1.0  # FeatScale's gain of what differs from the mean over tokens, in the arm where it is not 0
FINAL = "final token cosine"

# the methods of an arm, and the values its learned parameters are set to
Fitted = tuple[tuple["Method", ...], dict[str, float]]


def run(
    out: Path,
    *,
    seeds: int | None = None,
    jobs: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure every arm on `seeds` random models (10 by default) and return the findings; `jobs` changes nothing."""
    import torch

    say, seeds = progress or (lambda text: None), seeds or 10
    measured = []
    with torch.no_grad():
        for seed in range(seeds):
            say(f"random model {seed + 1} of {seeds}")
            measured += [{"arm": label, "seed": seed, **measure(seed, arm, device)} for label, arm in arms().items()]
    compared = compare(measured, seeds)
    return {
        "kind": "findings",
        "name": "oversmoothing-at-init",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": _paragraphs(compared, measured, seeds),
        "tables": [_table(compared)],
        "charts": [
            _chart(measured, "cosine", "token cosine"),
            _chart(measured, "high_frequency", "high-frequency ratio"),
        ],
        "claims": [_claim(compared)],
        "settings": {
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
    }


def arms() -> dict[str, Fitted]:
    """Return the arms by label: the methods to fit, and the gains to set on them."""
    from headwise.methods import FeatScale, NeuTRENO, ValueResidual

    known: dict[str, Fitted] = {
        repr(method): ((method,), {}) for method in (NeuTRENO(strength=0.6), FeatScale(), ValueResidual(mix=0.5))
    }
    scaled: dict[str, Fitted] = {f"FeatScale(), rest_gain = {GAIN:g}": ((FeatScale(),), {"rest_gain": GAIN})}
    return {BASELINE: ((), {})} | known | scaled


def build(seed: int, device: str = "cpu") -> tuple[nn.Sequential, Tensor]:
    """Return the random model, in evaluation, and its tokens (8, 65, 192): the same for every arm of a seed."""
    import torch
    from torch import nn

    from headwise.studies.vision_transformer import Block

    generator = torch.Generator().manual_seed(seed)
    # Building layers draws from torch's own generator, which belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        model = nn.Sequential(*(Block(WIDTH, HEADS, WIDTH // HEADS, 4 * WIDTH) for _ in range(DEPTH))).eval()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=WIDTH**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
    return model.to(device), torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(device)


def measure(seed: int, arm: Fitted, device: str = "cpu") -> dict[str, Any]:
    """Return token cosine and high-frequency ratio at the input and after each block, and the output itself."""
    from headwise.regularizing.regularize import regularize

    (model, tokens), (methods, gains) = build(seed, device), arm
    if methods:
        regularize(model, *methods, example=tokens)
    for name, value in gains.items():
        chosen = [parameter for path, parameter in model.named_parameters() if path.endswith(name)]
        if len(chosen) != DEPTH:
            raise RuntimeError(f"{methods[0]!r} should hold {DEPTH} parameters {name}, found {len(chosen)}")
        for parameter in chosen:
            parameter.fill_(value)
    seen = [tokens]
    for block in model:
        block.register_forward_hook(lambda module, args, output: seen.append(output))
    model(tokens)
    return {
        "cosine": [token_cosine(x) for x in seen],
        "high_frequency": [high_frequency(x) for x in seen],
        "output": seen[-1],
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


def compare(measured: list[dict[str, Any]], seeds: int) -> list[dict[str, Any]]:
    """Return per arm the final token cosine and, against the baseline within a seed, the difference, its interval and
    corrected p."""
    from headwise.results.divergences import holm
    from headwise.results.intervals import interval
    from headwise.results.joint_flips import sign_flip

    final = {(found["arm"], found["seed"]): found["cosine"][-1] for found in measured}
    labels = list(dict.fromkeys(found["arm"] for found in measured))
    rows = []
    for label in labels:
        values = [final[label, seed] for seed in range(seeds)]
        differences = [final[label, seed] - final[BASELINE, seed] for seed in range(seeds)]
        row = {"arm": label, "final": interval(values).model_dump(), "difference": interval(differences).model_dump()}
        rows.append(row | {"lower": sum(x < 0 for x in differences), "seeds": seeds, "p": sign_flip(differences)})
    for row, corrected in zip(rows[1:], holm([row["p"] for row in rows[1:]])):
        row["p_corrected"] = corrected
    return rows


def _claim(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the claim of section G.3 with the verdict of its paired difference, corrected for all arms."""
    row = next(one for one in compared if one["arm"].startswith("NeuTRENO"))
    mean, decided = row["difference"]["mean"], row["p_corrected"] < 0.05
    return {
        "text": "A random transformer with NeuTRENO has less similar tokens than one without.",
        "source": "Nguyen et al. 2023, arXiv 2312.00751, section G.3, figure 6, of which no figures are given",
        "published": {"cosine": "significantly reduced (a figure)"},
        "ours": f"final token cosine {mean:+.3f} {_span(row['difference'])}, lower in {row['lower']} of "
        f"{row['seeds']} models",
        "verdict": "undecided" if not decided else "as published" if mean < 0 else "contrary",
    }


def _paragraphs(compared: list[dict[str, Any]], measured: list[dict[str, Any]], seeds: int) -> list[str]:
    by_arm = {row["arm"]: row for row in compared}
    base = by_arm.pop(BASELINE)["final"]["mean"]
    best = min(by_arm.values(), key=lambda row: row["final"]["mean"])
    others = [
        f"{label} {row['final']['mean']:.3f} (lower in {row['lower']} of {seeds})"
        for label, row in by_arm.items()
        if row is not best
    ]
    first = next(found for found in measured if found["arm"] == BASELINE)["cosine"][0]
    outputs = {(found["arm"], found["seed"]): found["output"] for found in measured}
    unchanged = sum(bool((outputs["FeatScale()", seed] == outputs[BASELINE, seed]).all()) for seed in range(seeds))
    return [
        f"Of all arms {best['arm']} leaves the tokens of a random {DEPTH}-block model least alike: a final token "
        f"cosine of {best['final']['mean']:.3f} against {base:.3f} in the plain model, lower in {best['lower']} of "
        f"{seeds} models.",
        f"The others end at: {'; '.join(others)}. The tokens start with a cosine of {abs(first):.3f} in size: they "
        "are drawn independently.",
        "FeatScale's gains start at 0, where it does nothing: its output equals the plain model's to the bit in "
        f"{unchanged} of {seeds} models. The arm with a gain of {GAIN:g} on what differs from the mean over tokens "
        "shows how it acts once it has learned such a gain.",
        "Token cosine is a diagnosis, not a score: nothing here says which model would train better.",
    ]


def _table(compared: list[dict[str, Any]]) -> dict[str, Any]:
    columns = ["arm", FINAL, "95 % interval", "paired difference", "95 % interval of it", "corrected p", "lower in"]
    rows = []
    for row in compared:
        plain = row["arm"] == BASELINE
        difference: list[str | None] = ["–", "–", "–", "–"]
        if not plain:
            p = f"{row['p_corrected']:.2g}"
            difference = [
                f"{row['difference']['mean']:+.3f}",
                _span(row["difference"]),
                p,
                f"{row['lower']} of {row['seeds']}",
            ]
        rows.append([row["arm"], round(row["final"]["mean"], 4), _span(row["final"]), *difference])
    return {"title": "After the last block", "columns": columns, "rows": rows}


def _span(found: dict[str, Any]) -> str | None:
    return None if found["low"] is None else f"[{found['low']:.3f}, {found['high']:.3f}]"


def _chart(measured: list[dict[str, Any]], key: str, title: str) -> dict[str, Any]:
    labels = list(dict.fromkeys(found["arm"] for found in measured))
    data = []
    for label in labels:
        curves = [found[key] for found in measured if found["arm"] == label]
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
