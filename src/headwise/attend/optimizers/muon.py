"""Muon whose matrices are heads, groups of heads or projections, with AdamW for everything else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attend.optimizers.orthogonal import by_shape, chunks, newton_schulz
from headwise.attend.optimizers.parts import Part, Parts, Per, check_groups, parts_of, together_
from headwise.attend.projections.block import overwrite_, whole
from headwise.attend.regularizing.parameter_groups import ParameterGroups
from headwise.borders import not_compiled, on_all
from headwise.files.arguments import finite_number, is_a

# The groups of `headwise.parameter_groups` whose matrices Muon may move.
HIDDEN = ("attention", "mlp")
SCALES = ("match_rms_adamw", "original")


class Moved(NamedTuple):
    """A parameter with a gradient, its parts, and its group."""

    parameter: nn.Parameter
    parts: list[Part]
    group: dict[str, Any]


class Muon(torch.optim.Optimizer):
    """Moves each head's rows of W_q, W_k, W_v and columns of W_o by orthogonalized momentum, everything else by AdamW.

    Momentum b ← μb + (1 - μ)g, update u = NS(g + μ(b - g)), with NS five quintic Newton-Schulz steps, W ← (1 - ηλ)W -
    η·s·u, for every head's matrix alone (Jordan et al. 2024; by head: "Muon Split" of GLM-5, arXiv 2602.15763). The
    factor s is 0.2·√max(outputs, inputs), which gives the step the size of AdamW's (Liu et al. 2025, arXiv 2502.16982),
    or Jordan's √max(1, outputs / inputs). Heads are found in fused, interleaved, grouped and transposed weights alike.
    All matrices of one shape in the model are orthogonalized together.

    In latent attention (DeepSeek) the up-projections are divided by head, and the parts that heads share are whole
    matrices. Factors of adapters, embeddings, heads of the model, norms, biases, gains and convolutions of MLPs are
    moved by AdamW; `report()` tells what moves what. Iterations run in bfloat16 on a GPU, in fp32 on a CPU, and in fp64
    for weights in fp64. Under FSDP2 each process gathers the momentum of its weights.

    Args:
        groups: what `headwise.parameter_groups` returned, with learning rates and weight decays.
        per: "head"; "group" for `heads_per_group` query heads and the key and value heads they use; "matrix" for W_q,
            W_k, W_v and W_o each as a whole.
        heads_per_group: query heads of a group.
        layers: "all", or "attention" to leave the matrices of MLPs to AdamW.
        momentum: μ.
        nesterov: whether u is computed from g + μ(b - g), or from b.
        adjust_lr_fn: s, "match_rms_adamw" or "original", as in `torch.optim.Muon`.
        adamw_lr: learning rate of AdamW; None for that of the groups.
        betas, eps, fused: of AdamW.

    Raises:
        TypeError, ValueError: if the groups are not those of a model, the heads of a layer cannot be told or divided,
            or nothing is left for Muon.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> optimizer = headwise.Muon(headwise.parameter_groups(model, lr=1e-3, weight_decay=0.1), per="head")
        >>> print(optimizer.report().splitlines()[0])
        Muon(per="head"): 8 weights as 20 matrices of 2 shapes
    """

    def __init__(
        self,
        groups: ParameterGroups,
        per: Per = "head",
        *,
        heads_per_group: int | None = None,
        layers: str = "all",
        momentum: float = 0.95,
        nesterov: bool = True,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adamw_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        check_groups(groups, "Muon")
        if any(group.get("maximize") for group in groups):
            raise ValueError("Muon minimizes: give it the negative of the loss instead of maximize=True")
        _check(momentum, nesterov, adjust_lr_fn, adamw_lr, betas, eps, fused)
        self.per = per
        parts = parts_of(groups, per, heads_per_group, layers, "Muon")
        if adjust_lr_fn == "original":
            _leave_experts(parts)
        # The engine of the other groups: it has no parameters of its own.
        self._adamw = torch.optim.AdamW([{"params": []}], lr=1e-3, betas=betas, eps=eps, fused=fused)
        hidden, rest = _divided(groups, parts)
        if not hidden:
            raise ValueError(_nothing(groups, parts, layers))
        ours = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, "orthogonal": True}
        other = {**self._adamw.defaults, "orthogonal": False}
        rate = {} if adamw_lr is None else {"lr": adamw_lr}
        super().__init__([{**ours, **group} for group in hidden] + [{**other, **group, **rate} for group in rest], {})
        # By position, because wrappers such as FSDP2 in Accelerate replace the parameters in the groups.
        self._parts = [[parts.of.get(id(p), []) for p in group["params"]] for group in self.param_groups]
        self._report = "\n".join(_told(per, self.param_groups, parts))

    def report(self) -> str:
        """Return which weights Muon moves and as which matrices, and which AdamW moves and why, a line each."""
        return self._report

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which AdamW moves."""
        if hasattr(self, "_parts"):
            param_group = {**self._adamw.defaults, "orthogonal": False, "name": "added", **param_group}
            super().add_param_group(param_group)
            self._parts.append([[] for _ in self.param_groups[-1]["params"]])
        else:
            super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step and return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move([at for at, group in enumerate(self.param_groups) if group["orthogonal"]])
        self._move_others()
        return loss

    # a compiled graph would forget what is assigned here
    @not_compiled
    def _move_others(self) -> None:
        # Loading a state replaces these objects.
        self._adamw.param_groups = [group for group in self.param_groups if not group["orthogonal"]]
        self._adamw.state = self.state
        self._adamw.step()

    def _move(self, groups: list[int]) -> None:
        moved = [
            Moved(parameter, parts, self.param_groups[at])
            for at in groups
            for parameter, parts in zip(self.param_groups[at]["params"], self._parts[at], strict=True)
            if parameter.grad is not None
        ]
        for some in chunks([one.parameter.numel() for one in moved]):
            self._move_together([moved[at] for at in some])

    def _move_together(self, moved: list[Moved]) -> None:
        momenta = self._momenta(moved)
        stacks = [part.of(m) for m, one in zip(momenta, moved, strict=True) for part in one.parts]
        made = by_shape(_orthogonalized, stacks)
        factors = [factor(part, one.group["adjust_lr_fn"], stack.shape) for (one, part), stack in _each(moved, stacks)]
        on_all("mul_")(made, factors)
        updates = iter(made)
        plain: dict[int, tuple[list[Moved], list[list[Tensor]]]] = {}
        for one in moved:
            own = [next(updates) for _ in one.parts]
            if hasattr(one.parameter, "full_tensor"):
                _subtract_whole_(one, own)
            else:
                group, matrices = plain.setdefault(id(one.group), ([], []))
                group.append(one)
                matrices.append(own)
        for alike, matrices in plain.values():
            _subtract_(alike, matrices)

    def _momenta(self, moved: list[Moved]) -> list[Tensor]:
        """Return the whole momenta after this step's gradients, as Nesterov or as plain ones."""
        momenta, gradients = [], []
        for parameter, _, _ in moved:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.is_sparse:
                raise RuntimeError("Muon takes dense gradients: set sparse=False, or leave the layer to AdamW")
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            momenta.append(state["momentum_buffer"])
            gradients.append(gradient)
        made: list[Tensor] = []
        for _, alike in itertools.groupby(range(len(moved)), key=lambda at: id(moved[at].group)):
            places = list(alike)
            group = moved[places[0]].group
            means, new = [momenta[at] for at in places], [gradients[at] for at in places]
            on_all("lerp_")(means, new, 1 - group["momentum"])
            made += on_all("lerp")(new, means, group["momentum"]) if group["nesterov"] else means
        return [whole(one) for one in made]

    def __getstate__(self) -> dict[str, Any]:
        own = ("per", "_parts", "_report", "_adamw")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}


def _orthogonalized(matrices: Tensor) -> Tensor:
    if matrices.dtype == torch.float64:
        return newton_schulz(matrices)
    # Products in bfloat16 are slow on many CPUs.
    narrow = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    return newton_schulz(narrow).to(matrices.dtype)


def _each(moved: list[Moved], stacks: list[Tensor]) -> Iterator[tuple[tuple[Moved, Part], Tensor]]:
    return zip(((one, part) for one in moved for part in one.parts), stacks, strict=True)


def factor(part: Part, adjust_lr_fn: str, shape: torch.Size) -> float:
    """Return the factor of the learning rate for matrices (count, size, C) of a part."""
    outputs, inputs = part.sides(shape)
    return 0.2 * math.sqrt(max(outputs, inputs)) if adjust_lr_fn == SCALES[0] else math.sqrt(max(1, outputs / inputs))


def _subtract_(moved: list[Moved], matrices: list[list[Tensor]]) -> None:
    """Decay parameters of one group, and subtract the learning rate times the updates of their parts."""
    rate, decay = moved[0].group["lr"], moved[0].group["weight_decay"]
    if not isinstance(decay, float | int) or decay:
        on_all("mul_")([one.parameter for one in moved], 1 - rate * decay)
    if isinstance(rate, Tensor):
        on_all("mul_")([matrix for own in matrices for matrix in own], rate)
        rate = 1.0
    rows, updates = [], []
    for one, own in zip(moved, matrices, strict=True):
        for part, update in zip(one.parts, own, strict=True):
            view = part.rows_of(one.parameter)
            if view is None:
                part.add_(one.parameter, update, -rate)
            else:
                rows.append(view)
                updates.append(update.reshape(view.shape))
    together_(on_all("add_"), torch.Tensor.add_, rows, updates, alpha=-rate)


def _subtract_whole_(one: Moved, matrices: list[Tensor]) -> None:
    """Do the same to a parameter that FSDP2 shards."""
    update = torch.empty_like(full := whole(one.parameter.detach()))
    for part, matrix in zip(one.parts, matrices, strict=True):
        part.write_(update, matrix)
    overwrite_(one.parameter, full * (1 - one.group["lr"] * one.group["weight_decay"]) - update * one.group["lr"])


def _leave_experts(parts: Parts) -> None:
    """Leave stacks of experts to AdamW: which of their sides are outputs is not known."""
    for key in [key for key, own in parts.of.items() if own[0].axis is None]:
        del parts.of[key]
        parts.reasons[key] = 'is a stack of experts, in which "original" cannot tell outputs from inputs'


def _divided(groups: Iterable[dict[str, Any]], parts: Parts) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the groups of the weights that have parts, and those of all others."""
    hidden, rest = [], []
    for group in groups:
        ours = [p for p in group["params"] if group["name"] in HIDDEN and id(p) in parts.of]
        known = set(map(id, ours))
        others = [p for p in group["params"] if id(p) not in known]
        hidden += [{**group, "params": ours}] if ours else []
        rest += [{**group, "params": others}] if others else []
    return hidden, rest


def _nothing(groups: ParameterGroups, parts: Parts, layers: str) -> str:
    """Return the message that no weight is left for Muon."""
    held = [p for group in groups for p in group["params"] if group["name"] in HIDDEN]
    kinds = "attention layers and of their blocks' MLPs" if layers == "all" else "attention layers"
    reason = next((f": {parts.name(p)} {parts.reasons[id(p)]}" for p in held if id(p) in parts.reasons), "")
    model = type(groups.model).__name__
    return f"Muon moves the matrices of {kinds}, and {model} has none that is trained{reason}. Use AdamW"


def _told(per: str, groups: list[dict[str, Any]], parts: Parts) -> Iterator[str]:
    moved = [(p, parts.of[id(p)]) for group in groups if group["orthogonal"] for p in group["params"]]
    shapes = {tuple(sorted(part.of(p).shape[1:])) for p, own in moved for part in own}
    matrices = sum(part.count for _, own in moved for part in own)
    counted = f"{_count(len(moved), 'weight')} as {_count(matrices, 'matrix')} of {_count(len(shapes), 'shape')}"
    yield f'Muon(per="{per}"): {counted}'
    for parameter, own in moved:
        pieces = ", ".join(_piece(part, parameter) for part in own)
        yield f"  {parts.name(parameter)}: {pieces}"
    rest = [(group, p) for group in groups if not group["orthogonal"] for p in group["params"]]
    yield f"AdamW: {_count(len(rest), 'parameter')}"
    for group, parameter in rest:
        reason = parts.reasons.get(id(parameter), "")
        if not reason and group["name"] in HIDDEN:
            reason = f"has shape {tuple(parameter.shape)}" if parameter.ndim != 2 else "is not moved by heads"
        yield f"  {parts.name(parameter)}: {group['name']}{f', {reason}' if reason else ''}"


def _count(number: int, noun: str) -> str:
    plural = "matrices" if noun == "matrix" else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _piece(part: Part, parameter: Tensor) -> str:
    count, size, others = part.of(parameter).shape
    outputs, inputs = part.sides(torch.Size((count, size, others)))
    return f"{part.kind} {count} × ({outputs}, {inputs})"


def _check(
    momentum: object,
    nesterov: object,
    adjust_lr_fn: object,
    adamw_lr: object,
    betas: object,
    eps: object,
    fused: object,
) -> None:
    if adjust_lr_fn not in SCALES:
        raise ValueError(f"adjust_lr_fn must be one of {', '.join(map(repr, SCALES))}, got {adjust_lr_fn!r}")
    finite_number("momentum", momentum)
    if momentum >= 1:  # type: ignore[operator]  # checked above
        raise ValueError(f"momentum must be below 1, got {momentum}")
    is_a("nesterov", nesterov, bool, "True or False")
    if adamw_lr is not None:
        finite_number("adamw_lr", adamw_lr)
    is_a("betas", betas, (tuple, list), "two numbers")
    for beta in betas:  # type: ignore[attr-defined]  # checked above
        finite_number("betas", beta)
    finite_number("eps", eps)
    if fused is not None:
        is_a("fused", fused, bool, "True, False or None")
