"""The result of a compression, and the loading of a compressed model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from headwise.attend.compressing.exchange import put
from headwise.attend.compressing.site_cut import Narrow, NarrowColumns, NarrowRows, narrow_like
from headwise.files.arguments import is_a


@dataclass(frozen=True)
class LayerCut:
    """One product of one layer: the rank of each head, or of each group of heads that share keys and values.

    Attributes:
        site: qualified name of the attention layer.
        part: "qk" or "vo".
        ranks: number of rows kept, head by head.
        size: the head size.
    """

    site: str
    part: str
    ranks: tuple[int, ...]
    size: int

    @property
    def kept(self) -> float:
        """Return the share of the rows that is kept."""
        return sum(self.ranks) / (self.size * len(self.ranks))


@dataclass(frozen=True)
class Pair:
    """One figure before and after."""

    before: float
    after: float

    @property
    def ratio(self) -> float:
        """Return `after / before`, or NaN if `before` is 0."""
        return self.after / self.before if self.before else float("nan")


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """The result of compressing a model; printing it gives a table.

    Attributes:
        energy: share of the singular values' sum that was kept.
        layers: every product that can be cut.
        refused: "<site> qk" or "<site> vo" to the reason why that product was left unchanged.
        parameters: of the whole model, before and after.
        attention: parameters of the projections, before and after.
        seconds: of one forward of the example, without gradient; None without an example.
        loss: result of the given function on the model; None without one.
    """

    energy: float
    layers: tuple[LayerCut, ...]
    refused: dict[str, str] = field(default_factory=dict)
    parameters: Pair
    attention: Pair
    seconds: Pair | None = None
    loss: Pair | None = None

    def __str__(self) -> str:
        table = [("layer", "product", "kept", "ranks")]
        table += [
            (cut.site or "(the model)", cut.part, f"{cut.kept:.0%}", f"{_ranks(cut.ranks)} of {cut.size}")
            for cut in self.layers
        ]
        widths = [max(len(row[i]) for row in table) for i in range(3)]
        rows = ["  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3])) for row in table]
        return "\n".join(
            [*rows, *self._costs(), *(f"left unchanged: {key}: {why}" for key, why in self.refused.items())]
        )

    def _costs(self) -> list[str]:
        lines = [
            f"parameters: {pair.before:,.0f} -> {pair.after:,.0f} ({pair.ratio:.1%}){scope}"
            for pair, scope in ((self.parameters, ""), (self.attention, " of the projections"))
        ]
        if self.seconds is not None:
            lines.append(
                f"time of a forward: {1000 * self.seconds.before:.2f} -> {1000 * self.seconds.after:.2f} ms "
                f"({self.seconds.ratio:.1%})"
            )
        if self.loss is not None:
            lines.append(f"loss: {self.loss.before:.5g} -> {self.loss.after:.5g}")
        return lines


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{min(ranks)} to {max(ranks)}"


KINDS: dict[str, type[NarrowRows] | type[NarrowColumns]] = {"rows": NarrowRows, "columns": NarrowColumns}
# the number of problems that a message lists
SHOWN = 5


def load_compressed(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the smaller layers and the weights of a compressed model into a plain one, in place.

    Args:
        model: built like the model before `compress`; its weights do not matter.
        state: the whole `state_dict()` of the compressed model.

    Raises:
        ValueError: if the state dict is not of a compressed model, or does not fit; the model is unchanged then.

    Example:
        >>> import torch, headwise
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(
        ...     hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64
        ... )
        >>> model, tokens = BertModel(config), torch.randint(0, 64, (2, 8))
        >>> _ = headwise.compress(model.eval(), energy=0.9, example=tokens)
        >>> again = BertModel(config).eval()
        >>> headwise.load_compressed(again, model.state_dict())
        >>> torch.equal(again(tokens).last_hidden_state, model(tokens).last_hidden_state)
        True
    """
    is_a("model", model, nn.Module, "a torch module")
    is_a("state", state, Mapping, "a state dict")
    narrow = _narrow_layers(model, state)
    if not narrow:
        raise ValueError("this state dict holds no compressed layer: load it with load_state_dict()")
    plain = {name: model.get_submodule(name) for name in narrow}
    put(model, narrow)
    problems = _misfits(model.state_dict(keep_vars=True), state)
    if problems:
        put(model, plain)
        raise ValueError("this state dict does not fit the model: " + "; ".join(problems[:SHOWN]))
    # not strict: a missing weight is tied to one that is present, as _misfits has checked
    model.load_state_dict(dict(state), strict=False)


def _narrow_layers(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Narrow]:
    layers: dict[str, Narrow] = {}
    for key, places in state.items():
        name, _, last = key.rpartition(".")
        if last not in KINDS or f"{name}.inner.weight" not in state:
            continue
        try:
            plain = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"the model has no layer {name}, which the state dict holds compressed") from None
        if type(plain) is not nn.Linear and not hasattr(plain, "nf"):
            raise ValueError(f"{name} is a {type(plain).__name__}, not a plain linear layer: build the model again")
        layers[name] = narrow_like(KINDS[last], plain, len(places))
    return layers


def _misfits(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    # safetensors stores tied weights under one of their names
    present = {id(tensor) for name, tensor in own.items() if name in state}
    problems = [f"{name} is missing" for name, tensor in own.items() if name not in state and id(tensor) not in present]
    problems += [f"{name} has no place" for name in state if name not in own]
    return problems + [
        f"{name} is {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in state and state[name].shape != tensor.shape
    ]
