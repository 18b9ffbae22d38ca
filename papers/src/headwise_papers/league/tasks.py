"""The tasks of the league's worlds: tasks of the studies with control settings and further outcomes.

The further outcomes are calibration, robustness to 8-bit weights and the health of heads. A control is a setting of the
same task, so that it can be an arm like the methods.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.lab.experiments.evaluation import Sums
from headwise.lab.training.batches import run_model
from headwise.study import Evaluation, Metric, Phase, Task
from headwise_papers.tasks import blog_text
from headwise_papers.tasks.character_lm import CharacterLM
from headwise_papers.tasks.cifar import Cifar
from headwise_papers.tasks.eight_bits import in_8_bits
from headwise_papers.tasks.language_model import LanguageModel
from headwise_papers.tasks.recall import AssociativeRecall
from headwise_papers.tasks.speech import Speech

# number of bins of confidence, of equal width: Guo et al. 2017, arXiv 1706.04599
BINS = 15
# names of the models' branches; in a model of attention alone they are `layers.N`
BRANCHES = ("attn", "self_attn", "mlp")


class Controls(Task):
    """A mixin that adds residual dropout, label smoothing and early stopping to a task, all off by default.

    Every run also records the health of its heads, and its test outcomes with 8-bit weights.
    """

    head_statistics: tuple[str, ...] = ("attention_entropy", "head_redundancy", "stream_cosine")

    residual_dropout: float = Field(0.0, ge=0, lt=1, description="of what every branch adds to the stream")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the training target spread over all classes")
    stop_at: float = Field(
        1.0, gt=0, le=1, description="share of the epochs or steps after which training ends, its schedule with it"
    )

    def model(self) -> Any:
        """Return the model, with dropout at the end of every branch if set."""
        model: nn.Module = super().model()  # type: ignore[safe-super]  # of the task that follows
        if self.residual_dropout:
            for branch in branches(model):
                branch.register_forward_hook(Dropped(self.residual_dropout))
        return model

    def phases(self) -> list[Phase]:
        """Return the single phase, shortened if set."""
        (phase,) = super().phases()
        if self.stop_at == 1 or phase.changes:
            return [phase]
        length = (
            {"steps": _part(self.steps, self.stop_at)} if self.steps else {"epochs": _part(self.epochs, self.stop_at)}
        )
        # stop_at is reset for the phase, so that its length is not reduced twice
        return [Phase(phase.name, phase.data, changes={**length, "stop_at": 1.0})]

    def evaluations(self) -> list[Evaluation]:
        """Return the task's own evaluations, and one of the test data with 8-bit weights."""
        return [*super().evaluations(), Evaluation("int8", "test", _rounded)]

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the loss, in training with label smoothing if set (Szegedy et al. 2016, arXiv 1512.00567)."""
        loss: Tensor = super().loss(output, targets)
        if not self.label_smoothing or not torch.is_grad_enabled():
            return loss
        return (1 - self.label_smoothing) * loss + self.label_smoothing * self.uniform_loss(output, targets)

    def uniform_loss(self, output: Tensor, targets: Any) -> Tensor:
        """Return the cross entropy of uniform targets, in nats."""
        return -F.log_softmax(output.float(), -1).mean()


class Calibrated(Controls):
    """A mixin that adds the expected calibration error to a task of classification, also of words."""

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the task's metrics and the expected calibration error."""
        return (*super().all_metrics(), Metric("calibration", "expected calibration error", higher_is_better=False))

    def count(self, output: Tensor, targets: Tensor) -> Sums:
        """Return the task's own sums, and confidence and hits in bins of confidence."""
        return super().count(output, targets) | {"bins": in_bins(output, targets)}

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the task's metrics, and the mean over predictions of their bin's |confidence − accuracy|."""
        rest = {name: total for name, total in sums.items() if name != "bins"}
        confident, right, size = sums["bins"]
        return super().finish(rest) | {"calibration": (confident - right).abs().sum() / size.sum()}


class Dropped:
    """A forward hook that applies dropout to the output of a branch in training."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, given: Any, output: Any) -> Any:
        """Return the output with dropout; of a tuple, the first item is the branch's output."""
        if isinstance(output, tuple):
            return (F.dropout(output[0], self.p, module.training), *output[1:])
        return F.dropout(output, self.p, module.training)


class Images(Calibrated, Cifar):
    """Classification of 2,000 images of CIFAR-10, which the plain model memorises; augmentation is a control."""

    shift: int = Field(
        0, ge=0, le=16, description="augmentation: most pixels of a random shift, beside a random flip; 0: none"
    )

    def batch(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:  # type: ignore[override]  # see Task.batch
        """Return images scaled to [-1, 1], in training randomly shifted and flipped if set."""
        images = super().batch(inputs, generator)
        return images if generator is None or not self.shift else shifted(images, self.shift, generator)


class Words(Calibrated, blog_text.NextWord):
    """Prediction of the next word in a piece of WikiText-2 so small that the plain model memorises it."""

    def all_metrics(self) -> tuple[Metric, ...]:
        """Return the metrics, accuracy first; a diverged run counts as a uniform guess among all words.

        Perplexity is not the first, because a model that has memorised its words is so overconfident that its
        perplexity is far above that of a guess.
        """
        guess = 1 / (self.vocabulary + 3)
        accuracy, *others = sorted(super().all_metrics(), key=lambda metric: metric.name != "accuracy")
        return (_failing(accuracy, guess), *others)


class Sentences(Calibrated, blog_text.Sentiment):
    """Classification of the sentiment of SST-2's sentences."""


class Utterances(Controls, Speech):
    """Recognition of AN4's utterances; SpecAugment is part of the plain recipe."""

    def uniform_loss(self, output: Tensor, targets: Any) -> Tensor:
        """Return the cross entropy of uniform targets over the real frames, in nats per frame, as CTC has no target per
        frame."""
        frames = targets["frames"].to(output.device)
        real = torch.arange(output.shape[1], device=output.device) < frames[:, None]
        return -output.float().mean(-1)[real].mean()


class DeepPostNorm(Calibrated, LanguageModel):
    """Prediction of the next word with many post-LN layers and no warm-up, trainable only at low learning rates."""

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: the test text by segments only, and training and validation data at the end."""
        own = [one for one in super().evaluations() if one.name == "int8"]
        return [Evaluation("train", limit=200), Evaluation("validation", limit=500), *own]


class Characters(Calibrated, CharacterLM):
    """Prediction of the next character after one pass over part of the text; the plain model is undertrained."""


class Recall(Calibrated, AssociativeRecall):
    """Recall of the values of queried keys; part of the training labels is random."""


def branches(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose output is added to the residual stream, in order."""
    named = [module for name, module in model.named_modules() if name.rpartition(".")[2] in BRANCHES]
    layers = getattr(model, "layers", None)
    modules = named or ([*layers] if isinstance(layers, nn.ModuleList) else [])
    if not modules:
        raise ValueError(
            f"residual dropout finds no branch in {type(model).__name__}; known are {', '.join(BRANCHES)} and layers"
        )
    return modules


def in_bins(output: Tensor, targets: Tensor) -> Tensor:
    """Return the sums (3, BINS) of confidence, hits and predictions in each bin of confidence, in double precision."""
    confidence, predicted = F.softmax(output.detach().float(), -1).max(-1)
    place = (confidence * BINS).long().clamp(max=BINS - 1).flatten()
    rows = torch.stack(
        [confidence.flatten(), (predicted == targets).flatten().float(), torch.ones_like(confidence).flatten()]
    )
    return torch.zeros(3, BINS, dtype=torch.float64, device=rows.device).index_add_(1, place, rows.double())


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Return images (B, C, S, S) shifted by up to `most` pixels, with new pixels 0, and half of them flipped."""
    count, _, size, _ = images.shape
    padded = F.pad(images, (most, most, most, most))
    # drawn on the generator's device, so that the images' device does not change the result
    moves = torch.randint(2 * most + 1, (2, count), generator=generator, device=generator.device).to(images.device)
    flips = torch.rand(count, generator=generator, device=generator.device).to(images.device) < 0.5
    steps = torch.arange(size, device=images.device)
    down, across = moves[0][:, None] + steps, moves[1][:, None] + steps
    across = torch.where(flips[:, None], across.flip(1), across)
    rows = torch.arange(count, device=images.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[rows, down[:, :, None], across[:, None, :]].permute(0, 3, 1, 2)


def _rounded(model: nn.Module, inputs: Any) -> Any:
    with in_8_bits(model):
        return run_model(model, inputs)


def _part(whole: int, share: float) -> int:
    return max(1, math.floor(share * whole + 0.5))


def _failing(metric: Metric, value: float) -> Metric:
    return Metric(metric.name, metric.label, metric.higher_is_better, metric.unit, value)
