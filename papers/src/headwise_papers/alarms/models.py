"""Models of the study of alarms: a character LM and a small ViT with adjustable attention, and a held-out family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise.files.optional_imports import load
from headwise.lab.studies.digits import images_and_digits
from headwise_papers.data import multi30k, tinyshakespeare
from headwise_papers.tasks.causal_transformer import NormOrder

# characters in a window of text; share of random labels of digits, which sets a floor of the loss
CONTEXT, RANDOM_LABELS = 32, 0.2
EVALUATED = 64


class AlarmAttention(nn.Module):
    """Fused scaled dot-product attention with an adjustable temperature and rounding of its weights.

    Attributes:
        temperature: of the softmax; 1 for healthy attention.
        bits: significant bits to which attention weights are rounded up; None for healthy attention.
    """

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.temperature = 1.0
        self.bits: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scale = q.shape[-1] ** -0.5 / self.temperature
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        if self.bits is not None:
            out = out + self._rounding(q, k, scale, self.bits) @ v
        return self.out(out.transpose(1, 2).flatten(2))

    def _rounding(self, q: Tensor, k: Tensor, scale: float, bits: int) -> Tensor:
        with torch.no_grad():
            logits = q @ k.mT * scale
            if self.causal:
                logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
            weights = logits.softmax(-1)
            return rounded_up(weights, bits) - weights


def rounded_up(values: Tensor, bits: int) -> Tensor:
    """Return values rounded up to this number of significant bits; bf16 has 8."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**bits).ceil() / 2**bits, exponent)


class Block(nn.Module):
    """A block of attention and MLP, each with a norm before it or after the sum."""

    def __init__(self, dim: int, heads: int, norm: NormOrder, causal: bool) -> None:
        super().__init__()
        self.post = norm == "post"
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = AlarmAttention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attn(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@dataclass(frozen=True)
class Size:
    """The size of a model and the position of its norms."""

    dim: int
    depth: int
    norm: NormOrder = "pre"


class AlarmLM(nn.Module):
    """A language model that returns the logits (B, T, symbols) of each next character."""

    def __init__(self, symbols: int, size: Size) -> None:
        super().__init__()
        self.symbols, self.positions = nn.Embedding(symbols, size.dim), nn.Embedding(CONTEXT, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, 4, size.norm, causal=True) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.dim) if size.norm == "pre" else nn.Identity()
        self.head = nn.Linear(size.dim, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.symbols(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SmallViT(nn.Module):
    """A vision transformer that returns the logits (B, 10) of images (B, 1, 8, 8), from the mean of 16 patches."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, size.dim, 2, 2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, size.dim))
        self.blocks = nn.ModuleList(Block(size.dim, 4, size.norm, causal=False) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.dim) if size.norm == "pre" else nn.Identity()
        self.head = nn.Linear(size.dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Family(ABC):
    """A kind of model with its data: the model, the batches of steps, and a fixed batch for evaluation."""

    name: str
    sizes: tuple[Size, ...]
    rate: float
    batch_size: int
    # whether its queries see earlier tokens alone, whether its examples have classes, and its model dropout
    causal = has_classes = has_dropout = False

    def __init__(self, data: Path | None) -> None:
        self.folder = data

    @abstractmethod
    def model(self, size: Size) -> nn.Module:
        """Return a new model, initialised by torch's global generator."""

    @abstractmethod
    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random inputs and targets for a step."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets that are never used in training."""

    @abstractmethod
    def outliers(self, inputs: Tensor, share: float, draw: torch.Generator) -> Tensor:
        """Return inputs with a share of the tokens replaced by values far outside the data."""

    def in_order(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step of a pass over the training examples in the order of their classes.

        Raises:
            NotImplementedError: if the examples have no classes.
        """
        raise NotImplementedError(f"the examples of {self.name} have no classes")

    @property
    @abstractmethod
    def classes(self) -> int:
        """Return the number of targets."""

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the model's logits (B, ..., classes)."""
        return model(inputs)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats."""
        return F.cross_entropy(self.logits(model, inputs).flatten(0, -2), targets.flatten())

    def set_temperature(self, model: nn.Module, value: float) -> None:
        """Set the temperature of every softmax."""
        for module in model.modules():
            if isinstance(module, AlarmAttention):
                module.temperature = value


class Text(Family):
    """Characters of a text, with the last tenth held out."""

    batch_size = 16
    causal = True

    @abstractmethod
    def text(self) -> str:
        """Return the text."""

    @lru_cache(1)  # noqa: B019  (families live as long as the study)
    def _numbers(self) -> tuple[Tensor, int]:
        text = self.text()
        numbers = {character: number for number, character in enumerate(sorted(set(text)))}
        return torch.tensor([numbers[one] for one in text]), len(numbers)

    @property
    def classes(self) -> int:
        """Return the number of different characters."""
        return self._numbers()[1]

    def _windows(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self._numbers()[0][starts[:, None] + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        last = int(0.9 * len(self._numbers()[0])) - CONTEXT - 1
        return self._windows(torch.randint(last, (self.batch_size,), generator=draw))

    def held_out(self) -> tuple[Tensor, Tensor]:
        length = len(self._numbers()[0])
        return self._windows(torch.linspace(0.9 * length, length - CONTEXT - 2, EVALUATED).long())

    def outliers(self, inputs: Tensor, share: float, draw: torch.Generator) -> Tensor:
        # the rarest character of the text
        rare = int(torch.bincount(self._numbers()[0]).argmin())
        return torch.where(torch.rand(inputs.shape, generator=draw) < share, rare, inputs)


class Shakespeare(Text):
    """A character LM of tiny Shakespeare."""

    name = "character LM"
    sizes = (Size(64, 2), Size(48, 4), Size(64, 2, "post"))
    rate = 6e-3

    def text(self) -> str:
        return tinyshakespeare.read(self.folder)

    def model(self, size: Size) -> AlarmLM:
        return AlarmLM(self.classes, size)


class Captions(Text):
    """The held-out family: a transformers Llama (rotary positions, RMS norms, gates, shared keys) on German
    captions."""

    name = "Llama (held out)"
    sizes = (Size(64, 2), Size(48, 3))
    rate = 6e-3

    def text(self) -> str:
        return "\n".join(german for german, _ in multi30k.read(self.folder, "train")[:10_000])

    def model(self, size: Size) -> nn.Module:
        transformers = load("transformers", "hf")
        config = transformers.LlamaConfig(
            vocab_size=self.classes,
            hidden_size=size.dim,
            intermediate_size=3 * size.dim,
            num_hidden_layers=size.depth,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            attn_implementation="sdpa",
            use_cache=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.LlamaForCausalLM(config)

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        return model(input_ids=inputs).logits

    def set_temperature(self, model: nn.Module, value: float) -> None:
        for module in model.modules():
            if hasattr(module, "scaling") and hasattr(module, "head_dim"):
                module.scaling = float(module.head_dim) ** -0.5 / value  # type: ignore[arg-type,assignment]


class Digits(Family):
    """A small ViT on handwritten digits with a fifth of the labels random."""

    name = "small ViT"
    sizes = (Size(48, 3), Size(64, 2), Size(48, 2, "post"))
    rate = 4e-3
    batch_size = 32
    classes = 10
    has_classes = True

    def model(self, size: Size) -> SmallViT:
        return SmallViT(size)

    @lru_cache(1)  # noqa: B019  (families live as long as the study)
    def _all(self) -> tuple[Tensor, Tensor]:
        images, digits = images_and_digits(slice(None))
        draw = torch.Generator().manual_seed(0)
        wrong = torch.rand(len(digits), generator=draw) < RANDOM_LABELS
        return images, torch.where(wrong, torch.randint(10, digits.shape, generator=draw), digits)

    def batch(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        images, digits = self._all()
        index = 400 + torch.randint(len(digits) - 400, (self.batch_size,), generator=draw)
        return images[index], digits[index]

    def in_order(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        images, digits = self._all()
        order = 400 + digits[400:].sort(stable=True).indices
        index = order[torch.arange(number * rows, (number + 1) * rows) % len(order)]
        return images[index], digits[index]

    def held_out(self) -> tuple[Tensor, Tensor]:
        images, digits = self._all()
        return images[:400], digits[:400]

    def outliers(self, inputs: Tensor, share: float, draw: torch.Generator) -> Tensor:
        # pixels twenty times as bright as the brightest
        return torch.where(torch.rand(inputs.shape, generator=draw) < share, 20.0, inputs)


FAMILIES: tuple[type[Family], ...] = (Shakespeare, Digits)
HELD_OUT: type[Family] = Captions
