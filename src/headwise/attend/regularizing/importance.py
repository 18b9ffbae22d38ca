"""The function `importance`: how much the loss depends on each head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headwise.attend import hosts
from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.hosts.layers.declared import Candidate
from headwise.attend.projections.capture import feed, untouched
from headwise.attend.regularizing.ablation import Slot, slots_at
from headwise.attend.regularizing.handle_place import kept_handle
from headwise.borders import COMPILED_INSIDE, own_modules
from headwise.files.arguments import is_a, is_function
from headwise.files.html import html_table

Loss = Callable[[nn.Module, Any], Tensor]
Weight = Callable[[Any], float]
# What transformers counts as no label.
IGNORED = -100


@dataclass(frozen=True)
class LayerImportance:
    """The importance of the heads of one attention layer.

    Attributes:
        layer: qualified name of the layer.
        heads: one number per query head.
    """

    layer: str
    heads: tuple[float, ...]


@dataclass(frozen=True)
class Importance:
    """How much a loss depends on each head; printing it gives a table by layer and head.

    Attributes:
        by: "gradient" or "loss".
        loss: the mean loss with all heads.
        layers: the layers in the order of the model.
    """

    by: str
    loss: float
    layers: tuple[LayerImportance, ...]

    def ranked(self) -> list[tuple[str, int, float]]:
        """Return (layer, head, importance) of every head, the least important first."""
        every = [(row.layer, head, x) for row in self.layers for head, x in enumerate(row.heads)]
        return sorted(every, key=lambda one: one[2])

    def idle(self, below: float) -> dict[str, list[int]]:
        """Return the heads whose importance is below a number, by layer, as `compress(idle=...)` takes them.

        Raises:
            TypeError: if `below` is not a number.
        """
        is_a("below", below, (int, float), "a number")
        found = {row.layer: [head for head, x in enumerate(row.heads) if x < below] for row in self.layers}
        return {layer: heads for layer, heads in found.items() if heads}

    def normalized(self) -> Importance:
        """Return the importances divided by the root of the sum of their squares in each layer, as Michel et al. do."""
        rows = []
        for row in self.layers:
            size = sum(x * x for x in row.heads) ** 0.5 or 1.0
            rows.append(LayerImportance(row.layer, tuple(x / size for x in row.heads)))
        return Importance(self.by, self.loss, tuple(rows))

    def __str__(self) -> str:
        head, *rows = self._cells()
        widths = [max(len(row[i]) for row in (head, *rows) if i < len(row)) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))
            )
            for row in (head, *rows)
        ]
        return "\n".join([f"importance of heads by {self.by}; the loss is {self.loss:.4g}", *map(str.rstrip, lines)])

    def _cells(self) -> list[list[str]]:
        most = max((len(row.heads) for row in self.layers), default=0)
        head = ["layer", *(f"head {index}" for index in range(most))]
        return [head, *([row.layer or "(the model)", *(f"{x:.3g}" for x in row.heads)] for row in self.layers)]

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        return html_table(f"Importance of heads by {self.by}; the loss is {self.loss:.4g}", head, rows)


def importance(
    model: nn.Module,
    data: Iterable[Any],
    *,
    loss: Loss | None = None,
    by: Literal["gradient", "loss"] = "gradient",
    weight: Weight | None = None,
) -> Importance:
    """Return how much a loss depends on each head that can be reached, in evaluation mode.

    "gradient" is Michel et al. 2019, arXiv 1905.10650: the sum over samples of `|∂L/∂ξ_h|` with ξ_h = 1 a factor of
    the head's output and L the mean loss, from one forward and backward pass per batch: what the loss changes through a
    sample, to first order, when the head goes. "loss" removes one head at a time: the mean loss without it minus the
    mean loss, from one pass over the data per head. It is negative where the loss falls without the head, and costs as
    many passes as there are heads.

    Args:
        model: a model that `regularize` reaches; its methods stay and act as in evaluation.
        data: batches (tensor, tuple of arguments or dict of keywords).
        loss: of the model and a batch, a 0-d tensor, a mean over the batch; by default the `loss` of the model's
            output, as of transformers' models on a batch with labels.
        by: "gradient" or "loss".
        weight: how much a batch counts: the number of what its loss is a mean of, as a function of the batch. By
            default its labels (without those that transformers ignores or shifts away), else the real tokens of its
            `attention_mask`, else the tokens that enter the first attention layer. With the right number it does not
            matter how the data are cut into batches.

    Returns:
        The importances by layer and head.

    Raises:
        ValueError: if no layer can be reached, the data are empty, no batch counts, a weight is not a number from 0 up,
            or the loss is not a 0-d tensor; with "gradient" also if it does not depend on any head.
        TypeError: if an argument is none of these.

    Example:
        >>> import torch, headwise
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes))
        >>> tokens = torch.randint(0, 64, (8, 10))
        >>> found = headwise.importance(model, [{"input_ids": tokens, "labels": tokens}])
        >>> [row.layer for row in found.layers]
        ['bert.encoder.layer.0.attention.self', 'bert.encoder.layer.1.attention.self']
        >>> layer, head, _ = found.ranked()[0]
        >>> handle = headwise.regularize(model, allow_none=True)
        >>> with handle.ablate(layer, head):
        ...     without = model(input_ids=tokens, labels=tokens).loss
    """
    is_a("model", model, nn.Module, "a torch module")
    is_function("loss", loss)
    is_function("weight", weight)
    if by not in ("gradient", "loss"):
        raise ValueError(f'by must be "gradient" or "loss", got {by!r}')
    if not isinstance(data, Iterable) or isinstance(data, (str, Tensor, Mapping)):
        raise TypeError(f"data must be batches, such as a list or a loader, got {type(data).__name__}")
    root, found, fitted = _parts(model)
    if not any(candidate.adapter is not None for candidate in found):
        raise ValueError(f"{type(root).__name__} has no attention layer that can be reached: see headwise.sites(model)")
    measure = _by_gradient if by == "gradient" else _by_loss
    with untouched(model), slots_at(root, fitted, found) as slots:
        measured = Measured(model, slots, loss or _own_loss, weight)
        mean, rows = measure(measured, data)
    names = [slot.layer.site.name for slot in slots]
    return Importance(by, mean, tuple(map(LayerImportance, names, rows)))


def _parts(model: nn.Module) -> tuple[nn.Module, Sequence[Candidate], Sequence[FittedLayer]]:
    """Return the model inside of wrappers, its attention-like layers, and those with methods."""
    try:
        given = kept_handle(model)
    except ValueError:
        while (inside := own_modules(model).get(COMPILED_INSIDE)) is not None:
            model = inside
        return model, hosts.find(model), ()
    return given.model, given.found, given.fitted


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    output = feed(model, batch)
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        raise ValueError(
            f"the output of {type(model).__name__} has no loss: put labels into the batches, or pass "
            "loss=lambda model, batch: ..."
        )
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Measured:
    """A model whose loss is measured, batch by batch."""

    model: nn.Module
    slots: list[Slot]
    loss: Loss
    weight: Weight | None

    def __call__(self, batch: Any) -> tuple[Tensor, float]:
        """Return the loss of a batch (0-d) and how much the batch counts."""
        for slot in self.slots:
            slot.tokens = 0
        value = self.loss(self.model, batch)
        if not isinstance(value, Tensor) or value.dim():
            shape = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(f"loss must return a 0-d tensor, got {shape}")
        return value, self._counts(batch)

    def _counts(self, batch: Any) -> float:
        if self.weight is not None:
            given = self.weight(batch)
            if isinstance(given, Tensor) and given.numel() == 1:
                given = given.item()
            if isinstance(given, bool) or not isinstance(given, Real) or not 0 <= given < math.inf:
                raise ValueError(f"weight must return a number from 0 up, got {given!r}")
            return float(given)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(labels, Tensor):
            return float(_labels(self.model, labels))
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return float((mask != 0).sum())
        # A loss that reads no head is told of below.
        return float(next((slot.tokens for slot in self.slots if slot.tokens), 1))


def _labels(model: nn.Module, labels: Tensor) -> int:
    """Return how many labels the loss of transformers' models is a mean of."""
    # Its losses of causal models drop the first label of each row, and are taken where a class names none.
    if labels.dim() > 1 and getattr(model, "loss_type", "none of transformers") in (None, "ForCausalLM"):
        labels = labels[..., 1:]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORED).sum())


class Factors:
    """Ones by which the heads' output is multiplied, one for each sample and head of each call.

    Attributes:
        made: the ones of the calls since the last reading, (B, H, 1, 1) each.
    """

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def __call__(self, out: Tensor) -> Tensor:
        """Return the heads' output (B, H, T, Dv)."""
        ones = torch.ones(*out.shape[:2], 1, 1, dtype=out.dtype, device=out.device, requires_grad=True)
        self.made.append(ones)
        return out * ones

    def read(self, gradients: dict[int, Tensor]) -> Tensor:
        """Return the sum over samples of |gradient| (H,), and forget the calls.

        A layer that runs several times in a forward loses a head in all of them.
        """
        found = [gradients.get(id(one), torch.zeros_like(one)).float() for one in self.made]
        self.made = []
        if len({x.shape for x in found}) == 1:
            found = [torch.stack(found).sum(0)]
        return torch.stack([x.abs().sum((0, 2, 3)) for x in found]).sum(0).cpu()


def _by_gradient(measured: Measured, data: Iterable[Any]) -> tuple[float, list[tuple[float, ...]]]:
    slots = measured.slots
    factors = [Factors() for _ in slots]
    for slot, factor in zip(slots, factors, strict=True):
        slot.inner = factor
    losses: list[tuple[float, float]] = []
    sums: dict[int, Tensor] = {}
    for batch in data:
        with torch.enable_grad():
            value, count = measured(batch)
            ones = [one for factor in factors for one in factor.made]
            if not value.requires_grad or not ones:
                raise ValueError("loss does not depend on any head: compute it with the model that it is given")
            found = torch.autograd.grad(value, ones, allow_unused=True)
        gradients = {id(one): gradient for one, gradient in zip(ones, found, strict=True) if gradient is not None}
        for index, factor in enumerate(factors):
            of_heads = factor.read(gradients) if factor.made else None
            # The loss of a batch that does not count may be the mean of nothing.
            if of_heads is not None and count:
                sums[index] = sums.get(index, torch.zeros((), dtype=torch.float32)) + of_heads * count
        losses.append((float(value.detach()), count))
    mean, whole = _mean_of(losses)
    return mean, [tuple((sums[i] / whole).tolist()) if i in sums else () for i in range(len(slots))]


def _by_loss(measured: Measured, data: Iterable[Any]) -> tuple[float, list[tuple[float, ...]]]:
    batches = list(data)

    def mean() -> float:
        each = (measured(batch) for batch in batches)
        return _mean_of([(float(value.detach()), count) for value, count in each])[0]

    whole, rows = mean(), []
    for slot in measured.slots:
        row = []
        for head in range(slot.layer.site.heads or slot.layer.seen.get("heads", 0)):
            slot.inner = partial(without, head)
            row.append(mean() - whole)
        slot.inner = None
        rows.append(tuple(row))
    return whole, rows


def without(head: int, out: Tensor) -> Tensor:
    """Return the heads' output (B, H, T, Dv), zero for one head."""
    off = torch.arange(out.shape[1], device=out.device) == head
    return out.masked_fill(off[:, None, None], 0.0)


def _mean_of(losses: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of losses with their counts, and the sum of the counts."""
    if not losses:
        raise ValueError("data has no batch")
    whole = sum(count for _, count in losses)
    if not whole:
        raise ValueError("no batch of the data counts: all its labels are ignored, or its weights are 0")
    return sum(value * count for value, count in losses if count) / whole, whole
