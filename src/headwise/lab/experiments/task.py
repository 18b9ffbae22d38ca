"""Task: a model factory, data, a loss and metrics. Its fields are its settings and part of every run's identity."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headwise.lab.experiments.evaluation import Batch, Evaluation, Sums
from headwise.lab.experiments.recipe import Recipe
from headwise.lab.experiments.subject import Subject


class Task(Recipe, Subject, ABC):
    """A learning task; subclass it in one file and pass `--task file.py:Class`.

    Fields are settings: whatever changes a number belongs in a field; those of `Recipe` define the training. `model`
    and `data` must be implemented, the rest has defaults for classification. The first dimension of every tensor in
    `data` counts the examples.

    Example:
        >>> import torch
        >>> from headwise.study import Study, Task, VisionTransformer
        >>> class Bright(Task):
        ...     epochs: int = 2
        ...     def model(self):
        ...         return VisionTransformer(
        ...             classes=2, image_size=8, channels=1, dim=16, depth=1, heads=2, head_dim=8, mlp_dim=16
        ...         )
        ...     def data(self, split):
        ...         images = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(len(split)))
        ...         return images, (images.mean((1, 2, 3)) > 0.5).long()
        >>> task = Bright(learning_rate=1e-3)
        >>> task.epochs, task.learning_rate
        (2, 0.001)
        >>> inputs, targets = task.data("test")
        >>> tuple(task.model()(inputs).shape)
        (64, 2)
    """

    # True also evaluates the test split after every epoch; nothing is ever chosen by it
    test_curve: ClassVar[bool] = False
    # True stores the attention maps of the first and last layer on one held-out example, for a picture in the report
    shows_maps: ClassVar[bool] = False

    train_size: int | None = Field(
        None, ge=1, description="training examples, drawn separately for each seed; None: all"
    )
    test_size: int | None = Field(None, ge=1, description="test examples, the same for all runs; None: all")
    held_out: int = Field(0, ge=0, description="training examples kept for tuning trials when `data` has no validation")
    evaluation_batch_size: int = Field(1000, ge=1)
    divergence_factor: float | None = Field(
        None,
        gt=1,
        description="a run whose smoothed loss exceeds this many times its minimum has diverged; None: NaN alone",
    )
    divergence_smoothing: float = Field(0.95, ge=0, lt=1, description="weight of the past in the smoothed loss")
    loss_goal: float | None = Field(
        None, description="training loss, smoothed as for divergence, to which the steps are counted; None: not counted"
    )
    watch_every: int | None = Field(
        None, ge=2, description="steps between readings of a watched run; None: about 50 readings a run"
    )
    watch_statistics: tuple[str, ...] = Field(
        (), description="statistics that a watched run reads and records as outcomes; none: all of heads, no outcomes"
    )
    watch_examples: int = Field(256, ge=1, description="training examples on which a watched run reads the sharpness")
    head_rates: tuple[str, ...] = Field(
        (), description="statistics of a watched run whose exponential growth rate is fitted"
    )
    head_statistics: tuple[str, ...] = Field((), description="statistics of `watch` read on held-out data at the end")

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a batch of the inputs alone, which 0.2 knew by the name of its argument."""
        super().__init_subclass__(**options)
        if list(inspect.signature(cls.batch).parameters)[1:2] == ["inputs"]:
            raise TypeError(
                f"{cls.__name__}.batch(inputs, generator) changes the inputs alone: call it "
                "transform(inputs, generator). batch(examples, generator) returns inputs and targets."
            )

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model; torch's generator is seeded before, so that all methods of a seed start equal."""

    @abstractmethod
    def data(self, split: str) -> Any:
        """Return the examples of "train", "validation", "test" or a split that an evaluation or a phase names.

        A tuple (inputs, targets) or a dict of tensors, whose "labels" are the targets; None if there is no validation
        split.
        """

    def draw(self, count: int, generator: torch.Generator) -> Any:
        """Return what `batch` and `transform` are given as their second argument for `count` training examples.

        By default the generator itself, from which they draw. A task that returns tensors instead, or a tuple or dict
        of tensors, has those of a whole epoch drawn on the CPU before its first step, and they are copied to the
        device together: batches that are made from them wait for no copy. The generator is one of the CPU.
        """
        return generator

    def batch(self, examples: Any, generator: Any) -> Batch:
        """Return a batch of `examples`, a part of `data`; `generator` provides random draws and is None in evaluation.

        It is what `draw` returned, by default a torch.Generator. To change the inputs alone, write `transform` instead.
        """
        if isinstance(examples, dict):
            inputs = {name: part for name, part in examples.items() if name != "labels"}
            return Batch(self.transform(inputs, generator), examples.get("labels"))
        if not isinstance(examples, (tuple, list)) or len(examples) != 2:
            raise TypeError(
                "data() must return (inputs, targets), with inputs a tuple if the model takes several, or a dict with "
                "labels; for anything else, write a batch()"
            )
        inputs, targets = examples
        return Batch(self.transform(inputs, generator), targets)

    def transform(self, inputs: Any, generator: Any) -> Any:
        """Return the inputs of a batch as the model takes them; augmentation draws from `generator`, as in `batch`."""
        return inputs

    def lengths(self, examples: Any) -> Tensor | None:
        """Return each example's length in tokens, so that a batch holds similar lengths; None if all are equal."""
        return None

    def loss(self, output: Any, targets: Any) -> Tensor:
        """Return the mean loss of a batch, in nats for cross entropy; a model's own `loss` output is preferred."""
        own = getattr(output, "loss", None)
        return nn.functional.cross_entropy(logits_of(output), targets) if own is None else own

    def weight(self, targets: Any) -> Tensor | float:
        """Return the weight of a batch's mean loss: its examples, or its real tokens for a mean over tokens."""
        first = targets
        if targets is None:
            raise TypeError(
                "weight() counts the targets, and batch() returned none: return Batch(inputs, targets), or write "
                "weight(targets)"
            )
        while not isinstance(first, Tensor):
            first = next(iter(first.values() if isinstance(first, dict) else first))
        return float(len(first))

    def metric(self, output: Any, targets: Any) -> Tensor:
        """Return the mean metric of a batch; accuracy is in [0, 1]."""
        return (logits_of(output).argmax(-1) == targets).float().mean()

    def count(self, output: Any, targets: Any) -> Sums:
        """Return sums over a batch, which are added over batches and processes; `Rows` are concatenated instead."""
        weight = torch.as_tensor(self.weight(targets))
        sums: Sums = {"weight": weight, "loss": self.loss(output, targets) * weight}
        if not self.metrics:
            sums[self.metric_name] = whole_total(self.metric(output, targets), weight)
        return sums

    def finish(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Return the metrics from the sums over a whole split, for example {"perplexity": …}."""
        return {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}

    def evaluations(self) -> list[Evaluation]:
        """Return evaluations besides "train", "validation" and "test"; one with such a name replaces it."""
        return []

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return further outcomes `<evaluation>/<metric>` computed from those of all evaluations and phases.

        For example, forgetting.
        """
        return {}

    def over_epochs(self, epochs: list[dict[str, float]]) -> dict[str, float]:
        """Return further outcomes `<evaluation>/<metric>` computed from those after each epoch, the first one first.

        For example, the figures at the epoch of the least validation loss.
        """
        return {}


def has_mean_metric(task: Task) -> bool:
    """Return whether `metric` judges single batches; a task that counts is judged only on whole splits."""
    return not task.metrics and type(task).count is Task.count


def whole_total(mean: Tensor, weight: Tensor) -> Tensor:
    """Return mean · weight in double precision, rounded to an integer count if it equals one up to rounding errors."""
    # a weight on the CPU stays there: a copy to the device would keep an evaluation from being captured
    total = torch.as_tensor(mean).double() * weight.double()
    near = (total - total.round()).abs() <= torch.finfo(torch.float32).eps * total.abs()
    return torch.where(near, total.round(), total)


def logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its field of that name."""
    return getattr(output, "logits", output)
