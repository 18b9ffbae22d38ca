"""Entropy collapse: does the entropy alert of `headwise.watch` come before the loss shows a divergence, and do the remedies prevent it?

A small ViT without the normalisation before attention (where the paper uses SigmaReparam, Zhai et al. 2023, arXiv 2303.06296) learns
handwritten digits at a learning rate that is too high for it. A fifth of the labels is random: the loss then has a floor, so that 1.2 × its
running minimum means something. Within a seed all arms have the same data, initial weights and order of batches.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median

TITLE = "Entropy collapse: the alert before the divergence"
QUESTION = (
    "When a transformer diverges at a learning rate that is too high, does the entropy alert come before the loss shows it, and does the "
    "same run with SigmaReparam or with QKNorm stay healthy, without an alert?"
)
BASELINE = "plain"
WIDTH, DEPTH, HEADS, PATCH, BATCH = 64, 3, 4, 2, 128
STEPS, WARM_UP, LEARNING_RATE, RANDOM_LABELS = 250, 100, 0.01, 0.2
# The divergence: the weight of the past in the smoothed loss, and its limit over the running minimum.
SMOOTHING, RISE = 0.95, 1.2
# Smoothing delays the loss, which must not make the lead: it is told with this smoothing too.
QUICK_SMOOTHING = 0.8
READ_EVERY, THREADS = 5, 1
# What the alerts judge, and nothing else.
STATISTICS = ("entropy_share", "max_logit", "token_cosine", "high_frequency", "output_norm", "head_redundancy")
STATISTICS += ("effective_rank_qk", "effective_rank_vo")
COLLAPSE = "entropy_collapse"


def run(out: Path, *, seeds: int | None = None, jobs: int = 1, device: str = "cpu", progress=None) -> dict:
    """Train every arm on `seeds` seeds (5 by default), print each lead and return the findings; `jobs` changes nothing."""
    import torch

    say, seeds, trained = progress or (lambda text: None), seeds or 5, []
    threads = torch.get_num_threads()
    # Sums of two threads round otherwise than those of one, and a run about to diverge makes that grow.
    torch.set_num_threads(THREADS)
    try:
        for seed in range(seeds):
            for label, methods in arms().items():
                trained.append({"seed": seed, "arm": label, **judge(train(seed, methods, device))})
                say(f"seed {seed}, {label}: {_told(trained[-1])}")
    finally:
        torch.set_num_threads(threads)
    return {
        "kind": "findings",
        "name": "entropy-collapse",
        "title": TITLE,
        "question": QUESTION,
        "paragraphs": paragraphs(trained, seeds),
        "tables": [_arm_table(trained), _run_table(trained)],
        "charts": _charts(trained),
        "settings": _settings(seeds, device),
    }


def arms() -> dict[str, tuple]:
    """Return the methods of each arm by its label."""
    from headwise.methods import QKNorm, SigmaReparam

    return {BASELINE: ()} | {repr(method): (method,) for method in (SigmaReparam(init="one"), QKNorm())}


def build(seed: int, device: str = "cpu"):
    """Return model, images (1797, 1, 8, 8) in [-1, 1] and labels of a seed: the same for every arm."""
    import torch
    from sklearn.datasets import load_digits

    from headwise.studies.tasks.vision_transformer import VisionTransformer

    digits, generator = load_digits(), torch.Generator().manual_seed(seed)
    labels = torch.from_numpy(digits.target).long()
    wrong = torch.rand(len(labels), generator=generator) < RANDOM_LABELS
    labels[wrong] = torch.randint(10, (int(wrong.sum()),), generator=generator)
    # Building layers draws from torch's own generator, which belongs to the caller.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"dim": WIDTH, "depth": DEPTH, "heads": HEADS, "head_dim": WIDTH // HEADS, "mlp_dim": 2 * WIDTH}
        model = VisionTransformer(classes=10, image_size=8, channels=1, patch=PATCH, **shape)
    for block in model.blocks:
        block.norm1 = torch.nn.Identity()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    return model.to(device), images.to(device), labels.to(device)


def train(seed: int, methods: tuple, device: str = "cpu") -> dict:
    """Train one arm and return its losses by step, and the records and alerts of its watch, whose steps count likewise from 0."""
    import torch
    from torch.nn.functional import cross_entropy

    import headwise

    model, images, labels = build(seed, device)
    handle = headwise.regularize(model, *methods, example=images[:2]) if methods else None
    watch = headwise.watch(model, every=READ_EVERY, on_alert=None, statistics=list(STATISTICS))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    generator, losses = torch.Generator().manual_seed(seed), []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / WARM_UP)
        batch = torch.randint(len(labels), (BATCH,), generator=generator).to(device)
        loss = cross_entropy(model(images[batch]), labels[batch])
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if handle is not None:
            handle.after_step()
        watch.step()
    watch.remove()
    return {"losses": losses, "records": watch.records(), "alerts": watch.alerts()}


def smoothed(losses: list[float], weight: float = SMOOTHING) -> list[float]:
    """Return the exponential moving average of losses, which starts at the first."""
    means = losses[:1]
    for loss in losses[1:]:
        means.append(weight * means[-1] + (1 - weight) * loss)
    return means


def divergence(losses: list[float], weight: float = SMOOTHING) -> int | None:
    """Return the first step whose smoothed loss exceeds 1.2 × its running minimum or is no number; None where none does."""
    least = math.inf
    for step, mean in enumerate(smoothed(losses, weight)):
        if not math.isfinite(mean) or mean > RISE * least:
            return step
        least = min(least, mean)
    return None


def judge(found: dict) -> dict:
    """Return what a run shows: when it diverged, its first alerts, the lead in steps (negative: too late), its curves."""
    first: dict[str, int] = {}
    for alert in found["alerts"]:
        first.setdefault(alert["alert"], alert["step"])
    entropy: dict[int, float] = {}
    for record in found["records"]:
        if record["statistic"] == "entropy_share" and math.isfinite(record["value"]):
            entropy[record["step"]] = min(record["value"], entropy.get(record["step"], math.inf))
    curve = [loss for loss in smoothed(found["losses"]) if math.isfinite(loss)]
    diverged, alert = divergence(found["losses"]), first.pop(COLLAPSE, None)
    return {
        "diverged": diverged,
        "alert": alert,
        "lead": _lead(diverged, alert),
        "quick_lead": _lead(divergence(found["losses"], QUICK_SMOOTHING), alert),
        "rise_at_alert": None if alert is None else curve[alert] / min(curve[: alert + 1]),
        "others": first,
        "alerts": len(found["alerts"]),
        "loss": dict(list(enumerate(curve))[::READ_EVERY]),
        "best": min(curve),
        "end": curve[-1],
        "entropy": entropy,
        "largest_logit": max(r["value"] for r in found["records"] if r["statistic"] == "max_logit"),
    }


def _lead(diverged: int | None, alert: int | None) -> int | None:
    return None if diverged is None or alert is None else diverged - alert


def paragraphs(trained: list[dict], seeds: int) -> list[str]:
    """Return the answer in one sentence, then how it was measured and what it does not say."""
    from headwise.watching.alerts import Thresholds

    plain, others = _runs(trained, BASELINE), [label for label in _labels(trained) if label != BASELINE]
    healthy = "".join(f"; with {label} {_ends(_runs(trained, label))}" for label in others)
    leads, quick, rises = (
        [one[k] for one in plain if one[k] is not None] for k in ("lead", "quick_lead", "rise_at_alert")
    )
    before, sooner = (sum(lead > 0 for lead in found) for found in (leads, quick))
    grown = [_lead(one["diverged"], one["others"].get("logit_growth")) for one in plain]
    grown = [lead for lead in grown if lead is not None]
    logits = grown and f" Logit growth was told of {_spread(grown)} the divergence, in {len(grown)} of {seeds} seeds."
    delay = quick and (
        f" Smoothing delays the loss: at the alert it stood at {min(rises):.2f} to {max(rises):.2f} × its running minimum, and with a weight "
        f"of {QUICK_SMOOTHING:g} the alert came before the divergence in {sooner} of {seeds} seeds, {_spread(quick)} it."
    )
    return [
        f"At a learning rate of {LEARNING_RATE:g} the plain model diverged in {_count(plain, 'diverged')} of {seeds} seeds, and the entropy "
        f"alert came before the loss showed it in {before}{': ' + _spread(leads) + ' it' if leads else ''}{healthy}.",
        f"Diverged: the first step whose loss, smoothed with a weight of {SMOOTHING:g} of the past, exceeds {RISE:g} × its running minimum. "
        f"Entropy alert: the mean entropy of a head falls below {Thresholds().entropy_share:.0%} of its range. All thresholds are the defaults of "
        f"headwise.watch, and every kind of alert counts in every arm. Heads are read every {READ_EVERY} steps: a lead may be up to "
        f"{READ_EVERY - 1} steps longer than told.{delay or ''}{logits or ''}",
        "The setting was searched for beforehand, with other draws: the norm before attention was taken out and the learning rate raised until the "
        "plain model diverged. It shows that the alert can come first and that the remedies can help, not how often they do elsewhere.",
    ]


def _labels(trained: list[dict]) -> list[str]:
    return list(dict.fromkeys(one["arm"] for one in trained))


def _runs(trained: list[dict], label: str) -> list[dict]:
    return [one for one in trained if one["arm"] == label]


def _count(runs: list[dict], name: str) -> int:
    return sum(one[name] is not None for one in runs)


def _ends(runs: list[dict]) -> str:
    alarmed = sum(one["alerts"] > 0 for one in runs)
    return f"{_count(runs, 'diverged')} of {len(runs)} runs diverged and {alarmed} raised an alert of any kind"


def _spread(leads: list[int]) -> str:
    least, most = min(leads), max(leads)
    return f"{least} to {most} steps (median {median(leads):g}) before" if least < most else f"{least} steps before"


def _told(one: dict) -> str:
    ended = "did not diverge" if one["diverged"] is None else f"diverged at step {one['diverged']}"
    alert = "no entropy alert" if one["alert"] is None else f"entropy alert at step {one['alert']}"
    return f"{ended}, {alert}" + ("" if one["lead"] is None else f": a lead of {one['lead']} steps")


def _arm_table(trained: list[dict]) -> dict:
    rows = []
    for label in _labels(trained):
        runs = _runs(trained, label)
        leads = [one["lead"] for one in runs if one["lead"] is not None]
        counts = [_count(runs, "diverged"), sum(lead > 0 for lead in leads), sum(one["alerts"] > 0 for one in runs)]
        loss = [round(sum(one[name] for one in runs) / len(runs), 3) for name in ("best", "end")]
        rows.append([label, len(runs), *counts, median(leads) if leads else "–", *loss])
    columns = [
        "arm",
        "seeds",
        "diverged",
        "entropy alert before",
        "any alert",
        "median lead",
        "lowest loss",
        "last loss",
    ]
    return {"title": "By arm; losses are smoothed, means over seeds", "columns": columns, "rows": rows}


def _run_table(trained: list[dict]) -> dict:
    columns = ["seed", "arm", "diverged at", "entropy alert at", "lead (steps)", "other alerts, first at"]
    columns += ["lowest entropy share", "largest logit", "last loss"]
    rows = []
    for one in trained:
        others = ", ".join(f"{kind.replace('_', ' ')} {step}" for kind, step in one["others"].items()) or "none"
        when = ["never" if one[name] is None else one[name] for name in ("diverged", "alert")]
        rows.append([one["seed"], one["arm"], *when, "–" if one["lead"] is None else one["lead"], others])
        rows[-1] += [round(min(one["entropy"].values()), 3), float(f"{one['largest_logit']:.4g}"), round(one["end"], 3)]
    return {"title": "Every run", "columns": columns, "rows": rows}


def _charts(trained: list[dict]) -> list[dict]:
    first = [(one["arm"], one) for one in trained if one["seed"] == 0]
    plain = [(f"seed {one['seed']}", one) for one in _runs(trained, BASELINE)]
    return [
        {
            "title": f"{title.capitalize()}, {where}",
            "x": "step",
            "y": title,
            "series": series,
            "data": [
                {"step": step, title: round(value, 4), series: label}
                for label, one in runs
                for step, value in one[curve].items()
            ],
        }
        for where, series, runs in (("seed 0", "arm", first), (f"{BASELINE} model, every seed", "seed", plain))
        for curve, title in (("loss", "smoothed loss"), ("entropy", "lowest entropy share of all heads"))
    ]


def _settings(seeds: int, device: str) -> dict:
    tokens = (8 // PATCH) ** 2 + 1
    return {
        "seeds": seeds,
        "model": f"ViT, {DEPTH} blocks of width {WIDTH}, {HEADS} heads, {tokens} tokens; no norm before attention, one before the MLP",
        "data": f"digits of scikit-learn, {RANDOM_LABELS:.0%} of the labels drawn at random",
        "optimizer": f"Adam, learning rate {LEARNING_RATE:g} after {WARM_UP} steps of linear warm-up, no weight decay",
        "steps": STEPS,
        "batch": BATCH,
        "read_every": READ_EVERY,
        "statistics": ", ".join(STATISTICS),
        "threads": THREADS,
        "device": device,
    }
