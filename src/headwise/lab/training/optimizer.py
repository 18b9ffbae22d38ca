"""The optimizer of a recipe, its parameter groups and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from headwise.attend.optimizers import Hyperball, Muon, ParameterGroups, Stiefel, parameter_groups, undecayed
from headwise.lab.experiments.recipe import Recipe
from headwise_verdict import StudyError

# the key of a group's learning rate, in learning rates of the recipe
MULTIPLE = "rate_multiple"


class LARS(torch.optim.Optimizer):
    """Stochastic gradient descent that scales the step of each matrix by trust·‖w‖/(‖g‖ + decay·‖w‖).

    You, Gitman and Ginsburg 2017, arXiv 1708.03888. Parameters of fewer than two dimensions (gains and biases) are not
    scaled, as is usual, because their norms say little. Neither is a matrix whose weights or gradients are all zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "trust": trust, "weight_decay": weight_decay}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step and return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        update = gradient.add(parameter, alpha=group["weight_decay"])
        if parameter.ndim > 1:
            update.mul_(_scale(parameter, gradient, group))
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        # the rate is inside the sum, as in the paper: a changed rate does not rescale earlier summands
        moved = state["momentum"].mul_(group["momentum"]).add_(update, alpha=float(group["lr"]))
        if group["nesterov"]:
            moved = moved * group["momentum"] + update * group["lr"]
        parameter.sub_(moved)


def _scale(parameter: Tensor, gradients: Tensor, group: dict[str, Any]) -> Tensor:
    weight, gradient = parameter.norm(), gradients.norm()
    scale = group["trust"] * weight / (gradient + group["weight_decay"] * weight)
    return torch.where((weight > 0) & (gradient > 0), scale, torch.ones_like(scale))


class MuonBesideAdamW(torch.optim.Optimizer):
    """Muon for the matrices of attention and MLPs, AdamW for all other parameters, with one learning rate.

    Muon: Jordan et al. 2024. Its steps are scaled to the root mean square of AdamW's (Liu et al. 2025, arXiv
    2502.16982), so that one rate and one decay mean the same to both. AdamW takes embeddings, heads, norms, biases,
    gains and convolutions, as Muon's authors advise.

    Args:
        params: groups with a key "name", as `headwise.parameter_groups` returns them.
        lr: learning rate of all groups.
        momentum: of Muon.
        nesterov: of Muon.
        betas: of AdamW.
        eps: of AdamW.

    Raises:
        StudyError: if no group holds a matrix for Muon, so that all would be plain AdamW.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        hidden: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        for group in params:
            ours = [p for p in group["params"] if group["name"] in HIDDEN and p.ndim == 2]
            known = set(map(id, ours))
            others = [p for p in group["params"] if id(p) not in known]
            hidden += [{**group, "params": ours}] if ours else []
            rest += [{**group, "params": others}] if others else []
        if not hidden:
            raise StudyError(
                "optimizer=muon moves the matrices of attention layers and of the MLPs in their blocks, and none was "
                "found in this model. Use optimizer=adamw."
            )
        self._muon = torch.optim.Muon(
            hidden, lr=lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps) if rest else None
        self._hidden = len(self._muon.param_groups)
        super().__init__([*self._muon.param_groups, *(self._adamw.param_groups if self._adamw else [])], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of both optimizers and return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = self.param_groups[: self._hidden], self.param_groups[self._hidden :]
        for inner, groups in zip((self._muon, self._adamw), parts, strict=True):
            if inner is not None:
                # loading a state replaces these objects
                inner.param_groups, inner.state = groups, self.state
                inner.step()
        return loss


# groups of headwise.parameter_groups whose matrices Muon moves
HIDDEN = ("attention", "mlp")


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """Return the warm-up steps in a run of `steps` optimizer steps; a warm-up below 1 is a share of them."""
    return round(recipe.warmup * steps if recipe.warmup < 1 else recipe.warmup)


def share_at(recipe: Recipe, step: int, steps: int) -> float:
    """Return the share of the full learning rate in `step`, counted from 0, of a run of `steps` optimizer steps.

    The warm-up ends at the full rate in its last step. Cosine and linear then go to `final_learning_rate`, which the
    step after the last would reach. The inverse square root follows Vaswani et al. 2017: √(warm-up / steps so far).
    """
    warm = warmup_steps(recipe, steps)
    if step < warm:
        return (step + 1) / warm
    if recipe.schedule == "inverse_sqrt":
        return math.sqrt(max(warm, 1) / max(step + 1, 1))
    if recipe.schedule in ("cosine", "linear"):
        end = recipe.schedule_settings()["final_learning_rate"] / recipe.learning_rate
        passed = min(1.0, (step - warm) / max(1, steps - warm))
        left = (1 + math.cos(math.pi * passed)) / 2 if recipe.schedule == "cosine" else 1 - passed
        return end + (1 - end) * left
    return 1.0


class LearningRate:
    """The learning rate of an optimizer, set before each step; `plateau` uses torch's own scheduler."""

    def __init__(self, recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.recipe, self.steps = recipe, steps
        self._optimizer = optimizer
        self._plateau: ReduceLROnPlateau | None = None
        if recipe.schedule == "plateau":
            self._plateau = ReduceLROnPlateau(optimizer, **recipe.schedule_settings())

    @property
    def value(self) -> float:
        """Return the current learning rate."""
        first = self._optimizer.param_groups[0]
        return float(first["lr"]) / float(first.get(MULTIPLE, 1.0))

    def before_step(self, step: int) -> None:
        """Set the rate of optimizer step `step`, counted from 0 over the whole run."""
        warm = warmup_steps(self.recipe, self.steps)
        if self._plateau is None or step < warm:
            self._write(self.recipe.learning_rate * share_at(self.recipe, step, self.steps))

    def after_epoch(self, step: int, loss: float) -> None:
        """Report an epoch's loss (of validation, or of training) to `plateau`; the epoch ended after `step` steps."""
        if self._plateau is not None and step >= warmup_steps(self.recipe, self.steps) and math.isfinite(loss):
            self._plateau.step(loss)
            # torch skips a reduction that is tiny for a group: all groups keep their ratio
            self._write(self.value)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain values."""
        if self._plateau is None:
            return {}
        state = {name: getattr(self._plateau, name) for name in ("best", "num_bad_epochs", "last_epoch")}
        return {**state, "value": self.value}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the `state()` of the run that is resumed."""
        if self._plateau is not None:
            value = state["value"]
            self._plateau.load_state_dict({name: entry for name, entry in state.items() if name != "value"})
            self._write(value)

    def _write(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            rate = value * group.get(MULTIPLE, 1.0)
            if isinstance(group["lr"], Tensor):
                # captured steps read it there
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "lars": LARS,
    "adagrad": torch.optim.Adagrad,
    "muon": MuonBesideAdamW,
}


# Optimizers of which `headwise.attend.optimizers` tells the heads, and what is attached to their Muon.
BY_HEAD = ("muon-head", "muon-hyperball", "muon-stiefel")
_ATTACHED: dict[str, Callable[..., object]] = {"muon-hyperball": Hyperball, "muon-stiefel": Stiefel}


def build_optimizer(
    recipe: Recipe, model: nn.Module, example: Any, device: torch.device, added: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer of `recipe` for `model`, with its methods fitted.

    Args:
        recipe: the settings.
        model: the model, on `device`.
        example: a batch of inputs.
        device: of the training.
        added: the parameters that the methods added.

    Raises:
        StudyError: if the recipe has a separate weight decay and the weights it applies to cannot be identified.
    """
    settings: dict[str, Any] = recipe.optimizer_settings()
    if recipe.optimizer in ("adamw", "adam", "sgd"):
        settings["fused"] = device.type == "cuda"
    known = decay_groups(recipe, model, example)
    groups = rate_groups(recipe, known, added)
    if recipe.optimizer in BY_HEAD:
        return _by_head(recipe.optimizer, known, groups, settings)
    return KINDS[recipe.optimizer](groups, lr=recipe.learning_rate, **settings)


def _by_head(
    kind: str, known: list[dict[str, Any]], groups: list[dict[str, Any]], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer that treats the heads of the weights one by one.

    Raises:
        StudyError: if the heads cannot be told, or it leaves a decay nothing to do.
    """
    if not isinstance(known, ParameterGroups):
        raise StudyError(
            f"optimizer={kind} needs the heads of the attention weights, which cannot be found in this model. Use "
            "optimizer=adamw or optimizer=muon."
        )
    groups = ParameterGroups(groups, known.model, known.sites)
    try:
        optimizer = Muon(groups, per="matrix" if kind == "muon-hyperball" else "head", **settings)
        if kind != "muon-head":
            _ATTACHED[kind](optimizer, groups)
    except ValueError as error:
        raise StudyError(f"optimizer={kind}: {error}") from error
    return optimizer


def rate_groups(recipe: Recipe, groups: list[dict[str, Any]], added: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the groups with their learning rates, each split in two if `added` parameters have another rate."""
    apart = set() if recipe.method_rate == 1 else set(map(id, added))
    parts = [
        {**group, "params": [p for p in group["params"] if (id(p) in apart) == chosen], MULTIPLE: multiple}
        for group in groups
        for chosen, multiple in ((False, 1.0), (True, recipe.method_rate))
    ]
    return [{**part, "lr": part[MULTIPLE] * recipe.learning_rate} for part in parts if part["params"]]


def decay_groups(recipe: Recipe, model: nn.Module, example: Any) -> list[dict[str, Any]]:
    """Return the groups "attention", "mlp", "other" and "undecayed" with the decays of the recipe."""
    separate = {"attention": recipe.attention_weight_decay, "mlp": recipe.mlp_weight_decay}
    try:
        return parameter_groups(
            model,
            recipe.learning_rate,
            recipe.weight_decay,
            recipe.attention_weight_decay,
            mlp_weight_decay=recipe.mlp_weight_decay,
            example=example,
        )
    except ValueError as error:
        requested = [f"{name}_weight_decay={value:g}" for name, value in separate.items() if value is not None]
        if requested:
            raise StudyError(f"the weight decays {', '.join(requested)} cannot be given: {error}") from error
    # all groups decay alike here, so it does not matter which weights are attention's
    exempt = {id(parameter) for parameter in undecayed(model)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"name": "other", "params": [p for p in trainable if id(p) not in exempt], "weight_decay": recipe.weight_decay},
        {"name": "undecayed", "params": [p for p in trainable if id(p) in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
