"""Write a study folder of made-up numbers, so that the report can be tested without training anything."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

NINE = (
    "baseline",
    "DropColumn(p=0.2)",
    "DropHead(p=0.2)",
    "RelaxedAttention(gamma=0.1)",
    "InputNoise(scale=0.01)",
    "InputNoise(scale=0.01, per_head=True)",
    "Decorrelation(strength=0.1)",
    "AttentionNormPenalty(strength=1.0)",
    "NeuTRENO(strength=0.6)",
)
EFFECTS = (0.0, 0.02, 0.012, 0.0, 0.0, 0.001, -0.02, 0.0, 0.004)
HARDWARE = {"processor": "synthetic", "cores": 2}


def write_study(
    folder,
    *,
    methods=NINE,
    effects=EFFECTS,
    seeds=10,
    epochs=12,
    diverged=(),
    missing=(),
    test_curves=True,
    watched=False,
    failure=None,
    margin=None,
    axes=(),
    heads=False,
    claims=(),
    scale="small",
):
    """Write a complete study folder and return its path.

    `claims` are what study.json holds of them; `effects` are added to the accuracy of each method; `diverged` and
    `missing` hold (method, seed) pairs; `axes` holds (name, values, methods); `heads` adds outcomes of heads.
    """
    folder = Path(folder)
    study = {
        "name": "synthetic",
        "title": "Synthetic study (made-up numbers)",
        "question": "Does the report show what it was given? No model was trained: every number below is drawn from a "
        "formula.",
        "kind": "compare",
        "format": 2,
        "arms": list(methods),
        "baseline": methods[0],
        "seeds": list(range(seeds)),
        "primary": "test/accuracy",
        "metrics": [
            {"name": "accuracy", "label": "accuracy", "higher_is_better": True, "unit": "%", "failure": failure},
            {"name": "loss", "label": "loss", "higher_is_better": False, "unit": "nats"},
        ],
        "margin": margin,
        "axes": [{"name": name, "values": list(values), "arms": list(arms)} for name, values, arms in axes],
        "claims": list(claims),
        "scale": scale,
        "settings": {
            "dataset": "synthetic",
            "epochs": epochs,
            "batch_size": 32,
            "optimizer": {"name": "adamw", "lr": 0.001},
        },
        "command": "headwise compare synthetic --seeds 10",
        "versions": {"headwise": "0.0", "torch": "0.0"},
        "commit": "0000000",
        "hardware": HARDWARE,
        "notes": ["Every number of this study is made up."],
    }
    _json(folder / "study.json", study)
    for number, method in enumerate(methods):
        for seed in range(seeds):
            if (method, seed) not in missing:
                broken = (method, seed) in diverged
                effect = effects[number % len(effects)]
                _run(folder, number, method, seed, effect, epochs, broken, test_curves, watched, heads)
    return folder


def _run(folder, number, method, seed, effect, epochs, broken, test_curves, watched, heads):
    path = folder / "runs" / f"{number:04x}{seed:08x}"
    _json(path / "config.json", {"arm": method, "seed": seed, "study": "synthetic"})
    # The seed's part is shared by all methods, so that pairing matters.
    shared, own = random.Random(seed).gauss(0, 0.01), random.Random(f"{method} {seed}").gauss(0, 0.004)
    wobble = random.Random(f"{method} {seed} wobble")
    records = [
        _epoch(at, epochs, effect + shared + own + wobble.gauss(0, 0.04), test_curves)
        for at in range(1, (epochs // 3 if broken else epochs) + 1)
    ]
    if broken:
        records[-1]["metrics"] |= {"train/loss": math.nan}
    _lines(path / "metrics.jsonl", records)
    if watched:
        _lines(path / "health.jsonl", _health(method, seed, epochs))
    metrics = dict(_epoch(epochs, epochs, effect + shared + own, True)["metrics"])
    metrics |= {
        "gap/loss": metrics["train/loss"] - metrics["test/loss"],
        "gap/accuracy": metrics["train/accuracy"] - metrics["test/accuracy"],
        "cost/seconds_per_step": 0.0102 + 0.0004 * number + 0.0001 * seed,
        "cost/peak_memory_bytes": (180 + 3 * number) * 2**20,
        "cost/parameters": 210_000 + number,
    }
    if heads:
        for layer in range(4):
            metrics[f"heads/token_cosine/layer {layer}"] = 0.2 + 0.15 * layer - 4 * effect * layer + shared + own
        metrics["heads/attention_entropy/worst"] = 0.5 + 10 * effect + shared + own
    result = {
        "format": 2,
        "arm": method,
        "seed": seed,
        "hash": path.name,
        "config": {},
        "versions": {},
        "commit": "0000000",
        "hardware": HARDWARE,
        "metrics": metrics,
        "steps": epochs * 10,
        "epochs": epochs,
        "status": "diverged" if broken else "finished",
        "divergence": {"step": epochs // 3 * 10, "why": "loss rose"} if broken else None,
    }
    _json(path / "result.json", result)


def _epoch(epoch, epochs, shift, test_curves):
    left = math.exp(-3.0 * epoch / epochs)
    metrics = {
        "train/loss": 0.08 + 2.2 * left - shift,
        "train/accuracy": 0.985 - 0.85 * left,
        "validation/loss": 0.42 + 1.8 * left - 2 * shift,
        "validation/accuracy": 0.885 - 0.75 * left + shift,
    }
    if test_curves:
        metrics |= {"test/loss": 0.44 + 1.8 * left - 2 * shift, "test/accuracy": 0.88 - 0.75 * left + shift}
    return {"epoch": epoch, "step": epoch * 10, "seconds": 0.5, "metrics": metrics}


def _health(method, seed, epochs):
    records = []
    for step in range(0, epochs * 10 + 1, 2):
        for depth in range(4):
            site = f"blocks.{depth}.attn"
            for head in range(3):
                value = 2.5 - 0.3 * depth - 0.2 * head - step / 100 + sum(map(ord, method)) % 7 / 10
                records.append(
                    {
                        "site": site,
                        "depth": depth,
                        "head": head,
                        "step": step,
                        "statistic": "attention_entropy",
                        "value": value,
                    }
                )
            cosine = 0.2 + 0.1 * depth + step / 400
            records.append(
                {"site": site, "depth": depth, "head": None, "step": step, "statistic": "token_cosine", "value": cosine}
            )
    if seed == 0:
        alert = {
            "alert": "entropy_collapse",
            "site": "blocks.3.attn",
            "depth": 3,
            "head": 2,
            "step": 60,
            "statistic": "entropy_share",
            "value": 0.1,
            "threshold": 0.2,
        }
        words = {
            "sentence": f"entropy of blocks.3.attn head 2 fell ({method})",
            "remedy": "SigmaReparam or QKNorm bound it",
            "measured": "",
            "source": "made up",
        }
        records.append(alert | words)
    return records


def _json(path: Path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _lines(path: Path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
