"""The predictors that a world's plain model must beat: a constant, and the simplest one that learns from its inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def constant_accuracy(train: Tensor, test: Tensor) -> float:
    """Return the accuracy on targets `test` of the most frequent target of `train`; any shapes, integers."""
    most = torch.bincount(train.flatten()).argmax()
    return float((test == most).double().mean())


def simple_accuracy(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Return the accuracy on `test` of the simplest predictor that learns from `train`, each (inputs, targets).

    Inputs of real numbers (N, …) with targets (N,): the class whose mean is nearest. Tokens (N, T) with targets (N,):
    naive Bayes over tokens, each counted once more than seen. Tokens (N, T) with targets (N, K): the most frequent
    target after each of the last K tokens.

    Raises:
        ValueError: for other shapes, of which it knows no simple predictor.
    """
    (inputs, targets), (test_inputs, test_targets) = train, test
    if inputs.is_floating_point() and targets.ndim == 1:
        predicted = _nearest_mean(inputs, targets, test_inputs)
    elif not inputs.is_floating_point() and targets.ndim == 1:
        predicted = _naive_bayes(inputs, targets, test_inputs)
    elif not inputs.is_floating_point() and targets.ndim == 2:
        predicted = _after_each_token(inputs, targets, test_inputs)
    else:
        raise ValueError(
            f"there is no simple predictor for inputs {tuple(inputs.shape)} of {inputs.dtype} and targets "
            f"{tuple(targets.shape)}. Give the task a method simple_accuracy(train, test)."
        )
    return float((predicted == test_targets).double().mean())


def _nearest_mean(inputs: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
    known = targets.unique()
    means = torch.stack([inputs[targets == one].flatten(1).double().mean(0) for one in known])
    return known[torch.cdist(asked.flatten(1).double(), means).argmin(1)]


def _naive_bayes(inputs: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
    known, symbols = targets.unique(), int(max(inputs.max(), asked.max())) + 1
    counts = torch.stack([torch.bincount(inputs[targets == one].flatten(), minlength=symbols) + 1 for one in known])
    shares = torch.stack([(targets == one).double().mean() for one in known])
    scores = (counts / counts.sum(1, keepdim=True)).double().log()
    return known[(scores[:, asked].sum(-1) + shares.log()[:, None]).argmax(0)]


def _after_each_token(inputs: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
    width = targets.shape[1]
    symbols, outputs = int(max(inputs.max(), asked.max())) + 1, int(targets.max()) + 1
    pairs = inputs[:, -width:].flatten() * outputs + targets.flatten()
    counts = torch.bincount(pairs, minlength=symbols * outputs).view(symbols, outputs)
    # a token that was never seen gets the most frequent target of all
    best = torch.where(counts.sum(1) > 0, counts.argmax(1), counts.sum(0).argmax())
    return best[asked[:, -width:]]
