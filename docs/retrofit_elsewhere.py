"""Switch methods on in two more trained models, an encoder and a vision transformer, for the page of `retrofit`.

python docs/retrofit_elsewhere.py --run FOLDER    run both, 6 minutes on one core; FOLDER contains STS-B
python docs/retrofit_elsewhere.py                 write the page's section from the results, elsewhere.csv
python docs/retrofit_elsewhere.py --check         check whether it is current
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

import torch
from headwise_papers.retrofit import CHANGING, IN_TRAINING, NEUTRAL
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from headwise.files.provenance import hardware, versions
from headwise.lab.experiments.configuration import BASELINE
from headwise.lab.studies.digits import Digits
from headwise_verdict.results.intervals import Interval, interval

FOLDER = Path(__file__).resolve().parent / "results" / "retrofit"
FILE, PAGE = FOLDER / "elsewhere.csv", FOLDER / "README.md"
# the outcome of the file's row that names the machine and version
MADE = "made"
BEGIN, END = "<!-- elsewhere: begin (python docs/retrofit_elsewhere.py) -->", "<!-- elsewhere: end -->"
# including methods that are undefined for the causal layers of the study's model, or were not run there
METHODS = (
    *IN_TRAINING,
    *NEUTRAL,
    *CHANGING,
    "FeatScale()",
    "GFSA(order=4)",
    "LSA(diagonal=True)",
    'SpectralNorm(layers="attention")',
    "Temperature(value=1.0)",
)
PAIRS, TOKENS = 200, 32
SEEDS, TRAIN, EPOCHS, MORE, BATCH = 6, 200, 30, 10, 25
# largest changes that count as none: in Spearman's correlation, in accuracy when switched on, and when fine-tuned
KEPT_ORDER, KEPT_RIGHT, MARGIN = 0.005, 0.005, 0.02


def encoder(folder: Path) -> dict[str, float]:
    """Return, by the method switched on, the rank correlation of MiniLM's similarities with human scores."""
    from headwise_papers.tasks.sentence_similarity import SentenceSimilarity
    from scipy.stats import spearmanr

    task = SentenceSimilarity().located(folder)
    test_data = task.data("test")
    assert test_data is not None
    first = {name: tensor[:PAIRS] for name, tensor in test_data.items()}
    inputs = task.batch(first, None).inputs
    correlations = {}
    model = task.model()
    for arm in (BASELINE, *METHODS):
        handle = _fitted(model, arm, inputs)
        with torch.no_grad():
            similarities = model.eval()(**inputs)
        correlations[arm] = float(spearmanr(similarities.numpy(), first["labels"].numpy()).statistic)
        if handle is not None:
            handle.remove(discard=True)
    return correlations


def vision(seed: int) -> dict[tuple[str, str], float]:
    """Return the test accuracy of a vision transformer trained on digits, by outcome and method.

    The outcomes are "switched on", and "fine-tuned": after further training on other images.
    """
    task = Digits()
    images, digits = task.data("train")
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    first_images, other_images = order[:TRAIN], order[TRAIN : 2 * TRAIN]
    torch.manual_seed(seed)
    model = task.model()
    _train(model, images[first_images], digits[first_images], EPOCHS, 3e-3, seed, None)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    accuracy = {}
    for arm in (BASELINE, *METHODS):
        model.load_state_dict(weights)
        handle = _fitted(model, arm, {"images": images[:2]}, seed)
        accuracy["switched on", arm] = _right(model, *task.data("test"))
        _train(model, images[other_images], digits[other_images], MORE, 1e-3, seed, handle)
        accuracy["fine-tuned", arm] = _right(model, *task.data("test"))
        if handle is not None:
            handle.remove(discard=True)
    return accuracy


def _fitted(model: nn.Module, arm: str, example: dict[str, Tensor], seed: int = 0) -> headwise.Regularized | None:
    if arm == BASELINE:
        return None
    batch = example.get("images", example)
    return headwise.regularize(model, *headwise.parse(arm), seed=seed, example=batch)


def _train(
    model: nn.Module,
    images: Tensor,
    digits: Tensor,
    epochs: int,
    rate: float,
    seed: int,
    handle: headwise.Regularized | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(digits) // BATCH)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(digits), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(images[rows]), digits[rows])
            optimizer.zero_grad()
            (loss if handle is None else loss + handle.loss()).backward()
            optimizer.step()
            schedule.step()
            if handle is not None:
                handle.after_step()


@torch.no_grad()
def _right(model: nn.Module, images: Tensor, digits: Tensor) -> float:
    return float((model.eval()(images).argmax(1) == digits).float().mean())


def verdict(start: Interval, end: Interval) -> str:
    """Return whether the method can be added to the vision transformer, from its paired differences."""
    if end.low is not None and end.low > -MARGIN:
        return "yes" if abs(start.mean) <= KEPT_RIGHT else "yes, once fine-tuned"
    return "no" if end.high is not None and end.high < -MARGIN else "undecided"


def section() -> str:
    """Return the section of the study's page."""
    figures: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    machine = ""
    with FILE.open(encoding="utf-8", newline="") as stream:
        for line in csv.DictReader(stream):
            if line["outcome"] == MADE:
                machine = line["arm"]
                continue
            figures[line["outcome"], line["arm"]][int(line["seed"])] = float(line["value"])
    rows = []
    for arm in METHODS:
        on, end = (_difference(figures, outcome, arm) for outcome in ("switched on", "fine-tuned"))
        order = figures["spearman", arm][0] - figures["spearman", BASELINE][0]
        keeps = "yes" if abs(order) <= KEPT_ORDER else "no"
        span = f"{_points(end.mean)} [{_points(end.low or 0)}, {_points(end.high or 0)}]"
        rows.append(f"| `{arm}` | {_signed(order, 3)} | {keeps} | {_points(on.mean)} | {span} | {verdict(on, end)} |")
    plain = {name: interval(list(figures[name, BASELINE].values())).mean for name in ("switched on", "fine-tuned")}
    before, after = (f"{100 * share:.1f} %" for share in plain.values())
    return f"""## In an encoder and in a vision transformer

The same question in two more models, with five more methods. Made by `python docs/retrofit_elsewhere.py --run FOLDER`
on {machine}.

- **all-MiniLM-L6-v2**, switched on and not fine-tuned. The rank correlation with human scores on {PAIRS} test pairs
  of STS-B is {figures["spearman", BASELINE][0]:.3f} in the model as loaded; the table shows its change. *Kept*: at most
  {KEPT_ORDER:g}.
- **Our own vision transformer**: three layers, trained on {TRAIN} handwritten digits for {EPOCHS} epochs, then on
  {TRAIN} others for {MORE} epochs with the method; {SEEDS} seeds. The table shows points of test accuracy relative to
  the plain model, which has {before} before and {after} after. *Yes*: it changes by at most {100 * KEPT_RIGHT:g} points
  when switched on, and ends less than {100 * MARGIN:g} points below; *no*: it ends more than that below. The
  intervals are not corrected for the number of methods.

| method | MiniLM: correlation | kept | ViT: switched on | ViT: fine-tuned [95 %] | may enter the ViT |
|---|---|---|---|---|---|
""" + "\n".join(rows)


def _points(share: float) -> str:
    return _signed(100 * share, 1)


def _signed(value: float, digits: int) -> str:
    """Return a number with its sign, 0 without one."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def _difference(figures: dict[tuple[str, str], dict[int, float]], outcome: str, arm: str) -> Interval:
    own, plain = figures[outcome, arm], figures[outcome, BASELINE]
    return interval([own[seed] - plain[seed] for seed in plain])


def run(folder: Path) -> None:
    """Run both and store their results."""
    rows = [("spearman", arm, 0, value) for arm, value in encoder(folder).items()]
    for seed in range(SEEDS):
        rows += [(outcome, arm, seed, value) for (outcome, arm), value in vision(seed).items()]
    rows.append((MADE, f"{hardware()['processor']}, torch {versions()['torch']}", 0, 0.0))
    keep(rows)


def keep(rows: list[tuple[str, str, int, float]]) -> None:
    """Write outcome, method, seed and value of each figure."""
    with FILE.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("outcome", "arm", "seed", "value"))
        writer.writerows((outcome, arm, seed, f"{value:.6f}") for outcome, arm, seed, value in rows)


def main() -> None:
    """Run, write the section, or check it."""
    if sys.argv[1:2] == ["--run"]:
        run(Path(sys.argv[2]))
    old = PAGE.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    new = f"{before.rstrip()}\n\n{BEGIN}\n{section()}\n{END}{rest.partition(END)[2] or chr(10)}"
    if "--check" in sys.argv and new != old:
        raise SystemExit(f"{PAGE} is not current: run python docs/retrofit_elsewhere.py")
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
