"""Mean intersection over union from sums: a confusion matrix that adds up over batches."""

from __future__ import annotations

from torch import Tensor


def confusion(predicted: Tensor, labels: Tensor, classes: int, ignored: int) -> Tensor:
    """Count pixels by true and by predicted class, (classes, classes) of int64; those labelled `ignored` are left out.

    Raises:
        ValueError: for a class that is none of 0 to classes - 1, which would be counted as another pair.
    """
    real = labels != ignored
    meant, given = labels[real].long(), predicted[real].long()
    for found, what in ((meant, "labels"), (given, "predictions")):
        low, high = map(int, found.aminmax()) if len(found) else (0, 0)
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{what} from {low} to {high}, where there are classes 0 to {classes - 1} and {ignored} for none"
            )
    pairs = classes * meant + given
    return pairs.bincount(minlength=classes**2).view(classes, classes)


def mean_iou(confusion: Tensor) -> Tensor:
    """Return the mean over classes of their intersection over union; a class neither there nor predicted is left
    out."""
    right = confusion.diag()
    union = confusion.sum(0) + confusion.sum(1) - right
    present = union > 0
    return (right[present] / union[present]).mean()
