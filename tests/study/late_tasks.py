"""A task that is wrong in what comes last: evaluations, the summary, later phases."""

import torch
from torch import nn

from headwise.study import Evaluation, Metric, Phase, Task, VisionTransformer

WRONG = {
    "learn": {"learn": ("hed.*",)},
    "carry": {"carry": ("hed.*",)},
    "missing weight": {"changes": {"classes": 3}},
    "data": {"data": "adapt"},
    "empty data": {"data": "nothing"},
    "batch": {"data": "flat"},
}


class Late(Task):
    """Classify 4×4 images by their brightest quarter; `fault` says what is wrong, `start` where a second phase
    begins."""

    epochs: int = 1
    batch_size: int = 12
    classes: int = 4
    fault: str = ""
    start: str = "previous"
    metrics = (Metric("accuracy", unit="%"),)

    def model(self):
        return VisionTransformer(
            classes=self.classes, image_size=4, channels=1, patch=2, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8
        )

    def data(self, split):
        if split == "nothing":
            return None
        count = {"train": 36, "validation": 12, "test": 16, "other": 16, "flat": 16}[split]
        images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(count))
        labels = nn.functional.avg_pool2d(images, 2).flatten(1).argmax(1)
        return (images.flatten(), labels.repeat_interleave(16)) if split == "flat" else (images, labels)

    def count(self, output, targets):
        return {"right": (output.argmax(-1) == targets).sum(), "examples": torch.tensor(len(targets))}

    def finish(self, sums):
        return {"accuracy": sums["right"] / sums["examples"]}

    def evaluations(self):
        if self.fault == "split":
            return [Evaluation("fog", split="foggy")]
        if self.fault == "count":
            return [Evaluation("fog", split="other", count=self.count_of_fog)]
        if self.fault == "few":
            return [Evaluation("fog", split="other", finish=self.finish_of_many)]
        return [Evaluation("fog", split="other", when="phase")]

    def count_of_fog(self, output, targets):
        return {"right": output["logits"].sum()}

    def finish_of_many(self, sums):
        if sums["examples"] < 16 or sums["right"] > 15:
            raise ValueError("undefined")
        return {"accuracy": 1 / (int(sums["examples"]) - 16)}

    def summary(self, outcomes):
        if self.fault == "summary":
            return {"test/accuracy": outcomes["fogg/accuracy"]}
        if self.fault == "summary of phases":
            return {"fog/accuracy": outcomes["one/fog/accuracy"] + outcomes["three/fog/accuracy"]}
        return {}

    def over_epochs(self, epochs):
        # test images are evaluated at the end alone
        return {"best/accuracy": max(epoch["test/accuracy"] for epoch in epochs)} if self.fault == "epochs" else {}

    def phases(self):
        if self.fault in WRONG:
            return [Phase("one"), Phase("two", **WRONG[self.fault])]
        if self.fault == "summary of phases":
            return [Phase("one"), Phase("two")]
        return [Phase("one"), Phase("two", start=self.start)] if self.start != "previous" else [Phase("one")]
