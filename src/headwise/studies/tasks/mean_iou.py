"""Mean intersection over union from sums: a confusion matrix that adds up over batches."""

from __future__ import annotations

from torch import Tensor


def confusion(predicted: Tensor, labels: Tensor, classes: int, ignored: int) -> Tensor:
    """Count pixels by true and by predicted class, (classes, classes) of int64; those labelled `ignored` are left out."""
    real = labels != ignored
    pairs = classes * labels[real].long() + predicted[real].long()
    return pairs.bincount(minlength=classes**2).view(classes, classes)


def mean_iou(confusion: Tensor) -> Tensor:
    """Give the mean over classes of their intersection over union; a class neither there nor predicted is left out."""
    right = confusion.diag()
    union = confusion.sum(0) + confusion.sum(1) - right
    present = union > 0
    return (right[present] / union[present]).mean()
