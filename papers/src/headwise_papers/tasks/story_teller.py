"""A small trained Llama, stories260K, fine-tuned on plays with methods that it was trained without."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headwise
from headwise.attend.regularizing.handle_place import HANDLE
from headwise.lab.experiments.evaluation import Sums
from headwise.study import DataSet, Evaluation, Metric, Phase, Task
from headwise_papers.data import stories260k, tinyshakespeare
from headwise_papers.data.stories260k_llama import llama, tokenizer
from headwise_papers.tasks.eight_bits import in_8_bits

# the parts of the text in each split, in order
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
# the phase in which methods are switched on and no weight changes
SWITCHED_ON = "switched on"
# number of stories sampled from the loaded model, to measure what it forgets
STORIES = 64


class StoryTeller(Task):
    """Fine-tuning of stories260K on tiny Shakespeare, in the model's own 512 tokens.

    The first phase changes no weight: after it, the trained model is evaluated with the methods switched on. The second
    phase fine-tunes the model. The evaluation `int8` rounds the weights of linear layers and of the embedding to 8
    bits, with a scale per row, and `reset` resets the parameters that a method added to their initial values.
    """

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", higher_is_better=False, unit="nats per token"),
        Metric("rise", "rise of the loss by 8-bit weights", higher_is_better=False, unit="nats per token"),
        Metric(
            "worth", "rise of the loss when the method's own parameters are reset to their start", unit="nats per token"
        ),
        Metric("moved", "root mean square move of the method's own parameters"),
    )

    context: int = 64

    def phases(self) -> list[Phase]:
        """Return two phases: switching methods on, and fine-tuning."""
        frozen = {"steps": 1, "learning_rate": 1e-30, "weight_decay": 0.0, "warmup": 0.0}
        return [Phase(SWITCHED_ON, changes=frozen), Phase("fine-tuned")]

    def model(self) -> nn.Module:
        """Return the model with its trained weights."""
        return llama(self.folder)

    def data(self, split: str) -> dict[str, Tensor]:
        """Return tokens (N, context) and the tokens that follow them, of the plays or of the model's own stories."""
        if split == "stories":
            tokens = stories(self.folder, self.context + 1)
            return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        windows = plays(self.folder, split, self.context)
        return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}

    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations: losses on plays and stories after each phase, all others at the end."""
        return [
            Evaluation("test", when="phase"),
            Evaluation("stories", when="phase"),
            Evaluation("int8", "test", _in_8_bits),
            Evaluation("reset", "test", self._put_back),
            Evaluation("own", "test", self._moved, None, _once, _mean, limit=1),
            *(Evaluation(name, when="never") for name in ("train", "validation")),
        ]

    def summary(self, outcomes: dict[str, float]) -> dict[str, float]:
        """Return the increases of the loss by 8-bit weights, and by resetting the methods' parameters."""
        loss = outcomes["test/loss"]
        return {"int8/rise": outcomes["int8/loss"] - loss, "reset/worth": outcomes["reset/loss"] - loss}

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """Return the mean cross entropy per token, in nats."""
        return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    def count(self, output: Any, targets: Tensor) -> Sums:
        """Return the summed loss and the number of tokens."""
        return {"loss": self.loss(output, targets) * targets.numel(), "weight": torch.tensor(targets.numel())}

    def files(self) -> list[Path]:
        """Return the files of the model, its tokenizer and the text."""
        return [*stories260k.files(self.folder), *tokenizer_files(self.folder), *tinyshakespeare.files(self.folder)]

    def data_sets(self) -> list[DataSet]:
        """Return the data sets of the task."""
        return [stories260k.described(), tinyshakespeare.SOURCE.described()]

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Download missing files, and check them."""
        for source in (stories260k.SOURCE, stories260k.TOKENIZER, tinyshakespeare.SOURCE):
            source.prepare(self.folder, tell)

    def _start(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the initial values of the methods' parameters, from the same methods on the loaded model."""
        handle = model.__dict__.get(HANDLE)
        if handle is None or not handle.brought:
            return {}
        fresh = llama(self.folder)
        new_handle = headwise.regularize(fresh, *handle.methods, seed=handle.shared.seed)
        values = dict(fresh.named_parameters())
        return {name: values[name].detach() for name in new_handle.brought}

    def _put_back(self, model: nn.Module, inputs: Any) -> Any:
        own, start = dict(model.named_parameters()), self._start(model)
        learned = {name: own[name].detach().clone() for name in start}
        _write(own, start)
        try:
            return model(**inputs)
        finally:
            _write(own, learned)

    def _moved(self, model: nn.Module, inputs: Any) -> Tensor:
        own = dict(model.named_parameters())
        moves = [(own[name].detach() - value).flatten() for name, value in self._start(model).items()]
        return torch.cat(moves).square().mean().sqrt() if moves else torch.tensor(0.0)


def tokenizer_files(folder: Path | None) -> list[Path]:
    """Return the tokenizer's file."""
    return stories260k.TOKENIZER.paths(folder)


@lru_cache(maxsize=2)
def encoded(folder: Path | None) -> Tensor:
    """Return tiny Shakespeare as tokens (N,), encoded line by line."""
    lines = tinyshakespeare.read(folder).splitlines(keepends=True)
    lines_encoded = tokenizer(folder).encode_batch(lines, add_special_tokens=False)
    return torch.tensor([token for line in lines_encoded for token in line.ids])


@lru_cache(maxsize=4)
def plays(folder: Path | None, split: str, context: int) -> Tensor:
    """Return a split of the plays as windows (N, context + 1) that share their first and last tokens."""
    tokens = encoded(folder)
    first, last = (int(share * len(tokens)) for share in SHARES[split])
    return tokens[first:last].unfold(0, context + 1, context)


@lru_cache(maxsize=2)
@torch.no_grad()
def stories(folder: Path | None, length: int) -> Tensor:
    """Return stories (N, length) sampled from the loaded model."""
    model, generator = llama(folder), torch.Generator().manual_seed(0)
    # token 1 begins a story
    tokens, cache = torch.ones(STORIES, 1, dtype=torch.long), None
    for _ in range(length - 1):
        output = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        sampled = torch.multinomial(output.logits[:, -1].softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, sampled], 1)
    return tokens


def _in_8_bits(model: nn.Module, inputs: Any) -> Any:
    with in_8_bits(model):
        return model(**inputs)


@torch.no_grad()
def _write(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def _once(output: Tensor, targets: Tensor) -> Sums:
    return {"moved": output, "weight": torch.tensor(1)}


def _mean(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}
