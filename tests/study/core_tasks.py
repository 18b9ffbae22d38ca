"""Tasks that try what a study may be: words of different lengths, pixels, two views, five tasks in a row, a probe."""

import torch
from torch import Tensor, nn

from headwise.study import Batch, Evaluation, Metric, Phase, Rows, Task, VisionTransformer

PAD, BEGIN, END, LETTERS = 0, 1, 2, 12


class Translator(nn.Module):
    """Encode, then decode, with torch's own transformer of one layer each."""

    def __init__(self, dim=32):
        super().__init__()
        self.words, self.places = nn.Embedding(LETTERS, dim), nn.Embedding(16, dim)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True),
            1,
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(dim, 4, 2 * dim, 0.0, batch_first=True, norm_first=True), 1
        )
        self.head = nn.Linear(dim, LETTERS)

    def forward(self, source, target, source_padding):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(self.embed(source), src_key_padding_mask=source_padding)
        hidden = self.decoder(self.embed(target), memory, tgt_mask=causal, memory_key_padding_mask=source_padding)
        return self.head(hidden)

    def embed(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Reverse(Task):
    """Translate a word into itself backwards: padding, perplexity by token, and exact matches of what is decoded."""

    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup: float = 20
    schedule: str = "cosine"
    clip: float | None = 1.0
    pad_to: int = 10
    metrics = (
        Metric("exact", "exact words", unit="%", failure=0.0),
        Metric("perplexity", higher_is_better=False),
        Metric("loss", "nats per token", higher_is_better=False),
    )

    def model(self):
        return Translator()

    def data(self, split):
        count, generator = (
            {"train": 1024, "validation": 64, "test": 64}[split],
            torch.Generator().manual_seed(len(split)),
        )
        lengths = torch.randint(2, 6, (count,), generator=generator)
        words = torch.randint(3, LETTERS, (count, self.pad_to), generator=generator)
        words[torch.arange(self.pad_to) >= lengths[:, None]] = PAD
        return {"words": words, "lengths": lengths}

    def lengths(self, examples):
        return examples["lengths"]

    def batch(self, examples, generator):
        lengths, longest = examples["lengths"], int(examples["lengths"].max())
        words = examples["words"][:, :longest]
        places = torch.arange(longest)
        turned = words.gather(1, (lengths[:, None] - 1 - places).clamp(min=0)).where(words != PAD, PAD)
        begin = torch.full((len(words), 1), BEGIN)
        targets = torch.cat([turned, torch.zeros_like(begin)], 1)
        targets[torch.arange(len(words)), lengths] = END
        inputs = {"source": words, "target": torch.cat([begin, turned], 1), "source_padding": words == PAD}
        return Batch(inputs, targets)

    def loss(self, output, targets):
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PAD)

    def weight(self, targets):
        return (targets != PAD).sum()

    def finish(self, sums):
        loss = sums["loss"] / sums["weight"]
        return {"loss": loss, "perplexity": loss.exp()}

    def evaluations(self):
        return [
            Evaluation("test"),
            Evaluation("test/greedy", "test", output=self.greedy, count=self.right, finish=self.share),
        ]

    decides_on = "test/greedy"

    def greedy(self, model, inputs):
        written = torch.full((len(inputs["source"]), 1), BEGIN)
        for _ in range(inputs["target"].shape[1]):
            logits = model(inputs["source"], written, inputs["source_padding"])
            written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
        return written[:, 1:]

    def right(self, output, targets):
        return {"right": ((output == targets) | (targets == PAD)).all(1).sum(), "words": torch.tensor(len(output))}

    def share(self, sums):
        return {"exact": sums["right"] / sums["words"]}


class Segment(Task):
    """Name the class of every pixel: mean IoU from a confusion matrix summed over batches."""

    epochs: int = 8
    batch_size: int = 16
    learning_rate: float = 5e-3
    evaluation_batch_size: int = 7
    classes: int = 3
    metrics = (Metric("miou", "mean IoU", unit="%", failure=1 / 9),)

    def model(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        return nn.Sequential(
            nn.Linear(1, 16), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 3)
        )

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        pixels = torch.rand({"train": 96, "validation": 16, "test": 40}[split], 16, 1, generator=generator)
        return {"pixels": pixels, "labels": (3 * pixels[..., 0]).long()}

    def batch(self, examples, generator):
        return Batch(examples["pixels"], examples["labels"])

    def loss(self, output, targets):
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

    def count(self, output, targets):
        pairs = self.classes * targets.flatten() + output.argmax(-1).flatten()
        return {"confusion": pairs.bincount(minlength=self.classes**2).view(self.classes, -1)}

    def finish(self, sums):
        right = sums["confusion"].diag()
        return {"miou": (right / (sums["confusion"].sum(0) + sums["confusion"].sum(1) - right)).mean()}


class Encoder(nn.Module):
    """Encode images of four patches, then project (to contrast two views) or classify (to probe)."""

    def __init__(self, outputs):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.Sequential(
            nn.Unfold(2, stride=2), Turned(), nn.Linear(4, 16), nn.TransformerEncoder(layer, 1), nn.Flatten()
        )
        self.head = nn.Linear(64, outputs)

    def forward(self, *views):
        found = tuple(self.head(self.encoder(view)) for view in views)
        return found if len(found) > 1 else found[0]


class Turned(nn.Module):
    """Put the patches before their pixels."""

    def forward(self, patches):
        return patches.transpose(1, 2)


class TwoViews(Task):
    """Contrast two views of each image (NT-Xent), then probe the frozen encoder."""

    epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 3e-3
    stage: str = "contrast"
    temperature: float = 0.5
    metric_name = "accuracy"

    def model(self):
        return Encoder(8 if self.stage == "contrast" else 4)

    def data(self, split):
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.randint(4, ({"train": 384, "validation": 32, "test": 64}[split],), generator=generator)
        images = 0.3 * torch.randn(len(labels), 1, 4, 4, generator=generator)
        for label in range(4):
            row, column = 2 * (label // 2), 2 * (label % 2)
            images[labels == label, :, row : row + 2, column : column + 2] += 1.5
        return images, labels

    def batch(self, examples, generator):
        images, labels = examples
        if self.stage == "probe":
            return Batch(images, labels)
        drawn = [0.3 * torch.randn(images.shape, generator=generator) for _ in range(2)]
        return Batch((images + drawn[0], images + drawn[1]), labels)

    def loss(self, output, targets):
        return (
            nn.functional.cross_entropy(output, targets)
            if self.stage == "probe"
            else nt_xent(*output, self.temperature)
        )

    def metric(self, output, targets):
        if self.stage == "probe":
            return (output.argmax(-1) == targets).float().mean()
        return torch.tensor(0.0)

    def phases(self):
        probe = {"stage": "probe", "epochs": 25, "learning_rate": 2e-2}
        return [
            Phase("contrast"),
            Phase("probe", changes=probe, methods=False, carry=("encoder.*",), learn=("head.*",)),
        ]


def nt_xent(one: Tensor, other: Tensor, temperature: float) -> Tensor:
    """Return the loss of SimCLR: each view must find the other among all views of the batch."""
    views = nn.functional.normalize(torch.cat([one, other]), dim=-1)
    likeness = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return nn.functional.cross_entropy(likeness, torch.arange(len(views)).roll(len(one)))


class FiveTasks(Task):
    """Learn five pairs of classes one after the other: an accuracy matrix and the forgetting."""

    epochs: int = 12
    batch_size: int = 16
    learning_rate: float = 3e-3
    metrics = (Metric("accuracy", unit="%", failure=0.1), Metric("forgetting", higher_is_better=False, unit="%"))

    def model(self):
        return VisionTransformer(
            classes=10, image_size=4, channels=1, patch=2, dim=16, depth=1, heads=2, head_dim=8, mlp_dim=32
        )

    def data(self, split):
        kind, _, number = split.partition(" ")
        if kind == "validation":
            return None
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.randint(10, (400 if kind in ("train", "learn") else 100,), generator=generator)
        prototypes = torch.randn(10, 1, 4, 4, generator=torch.Generator().manual_seed(7))
        images = prototypes[labels] + 0.3 * torch.randn(len(labels), 1, 4, 4, generator=generator)
        if number:
            chosen = labels // 2 == int(number)
            images, labels = images[chosen], labels[chosen]
        return images, labels

    def transform(self, inputs, generator):
        return inputs

    def count(self, output, targets):
        return {"right": (output.argmax(-1) == targets).sum(), "examples": torch.tensor(len(targets))}

    def finish(self, sums):
        return {"accuracy": sums["right"] / sums["examples"]}

    def phases(self):
        return [Phase(f"task {n}", data=f"learn {n}") for n in range(5)]

    def evaluations(self):
        return [Evaluation(f"task {n}", split=f"test {n}", when="phase") for n in range(5)]

    def summary(self, outcomes):
        best = [max(outcomes[f"task {then}/task {n}/accuracy"] for then in range(n, 5)) for n in range(4)]
        return {"test/forgetting": sum(b - outcomes[f"task {n}/accuracy"] for n, b in enumerate(best)) / 4}


class Ranks(Task):
    """Judge by a rank correlation, which is no sum: rows are kept."""

    epochs: int = 2
    batch_size: int = 16
    evaluation_batch_size: int = 7
    metrics = (Metric("spearman", "rank correlation", failure=0.0),)

    def model(self):
        return VisionTransformer(
            classes=1, image_size=4, channels=1, patch=2, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8
        )

    def data(self, split):
        images = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return images, images.mean((1, 2, 3))

    def loss(self, output, targets):
        return nn.functional.mse_loss(output[:, 0], targets)

    def count(self, output, targets):
        return {"pairs": Rows(torch.stack([output[:, 0], targets], 1))}

    def finish(self, sums):
        ranks = sums["pairs"].argsort(0).argsort(0).double()
        return {"spearman": torch.corrcoef(ranks.T)[0, 1]}


class Faults(Segment):
    """Be wrong in one way."""

    fault: str = ""
    epochs: int = 1

    def count(self, output, targets):
        found = Segment.count(self, output, targets)
        if self.fault == "shape":
            return {"pixels": targets}
        if self.fault == "undeclared":
            return found | {"other": torch.ones(())}
        return found

    def finish(self, sums):
        if self.fault == "raises":
            raise KeyError("confusion matrix")
        if self.fault == "undeclared":
            return {"iou": torch.ones(())}
        if self.fault == "undecided":
            return {}
        if self.fault == "nan":
            return {"miou": torch.tensor(float("nan"))}
        return Segment.finish(self, {"confusion": torch.eye(3)})

    def evaluations(self):
        return [Evaluation("fog"), Evaluation("fog")] if self.fault == "twice" else []

    def phases(self):
        if self.fault == "missing":
            return [Phase("adapt", start="/no/such/folder")]
        if self.fault == "setting":
            return [Phase("one"), Phase("two", changes={"learningrate": 0.1})]
        if self.fault == "optimizer":
            return [Phase("one"), Phase("two", changes={"momentum": 0.5})]
        return [Phase("one"), Phase("one")] if self.fault == "phases" else [Phase("train")]


class Adapt(Task):
    """Train plainly, then with the arm's methods; classes of 4×4 images by their brightest quarter."""

    epochs: int = 2
    batch_size: int = 12
    way: str = "on"
    start: str = "previous"
    optimizer: str = "adam"

    def model(self):
        return nn.Sequential(
            nn.Dropout(0.1),
            VisionTransformer(
                classes=4, image_size=4, channels=1, patch=2, dim=8, depth=2, heads=2, head_dim=4, mlp_dim=8
            ),
        )

    def data(self, split):
        images = torch.randn(36, 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return images, nn.functional.avg_pool2d(images, 2).flatten(1).argmax(1)

    def phases(self):
        change = {"learning_rate": 3e-4, "epochs": 3}
        if self.way == "alone":
            return [Phase("pretrain", methods=False)]
        if self.way == "off":
            return [Phase("pretrain"), Phase("adapt", changes=change, methods=False)]
        if self.way == "both":
            return [Phase("pretrain"), Phase("adapt", changes=change)]
        if self.way == "folder":
            return [Phase("adapt", start=self.start, changes=change)]
        if self.way == "head":
            return [Phase("adapt", start=self.start, carry=("1.head.*",), learn=("1.head.*",))]
        return [Phase("pretrain", methods=False), Phase("adapt", changes=change)]


class Shared(Reverse):
    """Count in all ways at once, in batches bounded by tokens, two to a step: for several processes."""

    epochs: int = 2
    batch_size: int = 32
    train_size: int | None = 160
    tokens_per_batch: int | None = 64
    accumulation: int = 2
    evaluation_batch_size: int = 11
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    metrics = (*Reverse.metrics, Metric("spearman"), Metric("letters"))
    decides_on = "test"

    def count(self, output, targets):
        real = targets != PAD
        lengths, sure = real.sum(1), (output.softmax(-1).amax(-1) * real).sum(1) / real.sum(1)
        found = output.argmax(-1)[targets != PAD].bincount(minlength=LETTERS)
        rows = Rows(torch.stack([lengths, sure], 1))
        return Task.count(self, output, targets) | {"rows": rows, "letters": found, "exact": torch.zeros(())}

    def finish(self, sums):
        order = torch.corrcoef(sums["rows"].double().T)[0, 1]
        letters = sums["letters"].double()
        return Reverse.finish(self, sums) | {
            "spearman": order,
            "letters": letters.square().sum().sqrt(),
            "exact": sums["exact"],
        }

    def evaluations(self):
        return []
