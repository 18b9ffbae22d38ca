"""Mean intersection over union from a confusion matrix that is summed over batches."""

from __future__ import annotations

from torch import Tensor


def confusion(predicted: Tensor, labels: Tensor, classes: int, ignored: int) -> Tensor:
    """Return the numbers of pixels by true and predicted class, (classes, classes) of int64, without label `ignored`.

    Raises:
        ValueError: for a class outside 0 to classes - 1, which would be counted as another pair.
    """
    real = labels != ignored
    true, predicted_classes = labels[real].long(), predicted[real].long()
    for values, name in ((true, "labels"), (predicted_classes, "predictions")):
        low, high = map(int, values.aminmax()) if len(values) else (0, 0)
        if not 0 <= low <= high < classes:
            raise ValueError(
                f"{name} from {low} to {high}, but classes are 0 to {classes - 1}, and {ignored} means none"
            )
    pairs = classes * true + predicted_classes
    return pairs.bincount(minlength=classes**2).view(classes, classes)


def mean_iou(confusion: Tensor) -> Tensor:
    """Return the mean over classes of the intersection over union, without classes that do not occur."""
    right = confusion.diag()
    union = confusion.sum(0) + confusion.sum(1) - right
    present = union > 0
    return (right[present] / union[present]).mean()
