"""The parameters that methods add to a model: their keys, whether training moved them, and loading weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method
from headwise.borders import version_of
from headwise.files.callers import callers
from headwise.files.user_warnings import warn

# (version, sum, sum of squares) of a parameter
Fingerprint = tuple[int, float, float]


def own_keys(model: nn.Module) -> list[str]:
    """Return the state-dict keys that the methods added."""
    return [k for k in model.state_dict() if is_own(k)]


def is_own(key: str) -> bool:
    """Return whether a key of a state dict was added by a method."""
    return ".headwise." in f".{key}" or "parametrizations." in key


@torch.no_grad()
def fingerprints(model: nn.Module, methods: Iterable[Method]) -> dict[str, Fingerprint]:
    """Return a fingerprint of each parameter of a method or under a reparametrization, to see later if it moved."""
    if not any(m.has_parameters() for m in methods):
        return {}
    # Parameters on the meta device have no values to compare.
    return {name: _fingerprint(p) for name, p in model.named_parameters() if is_own(name) and not p.is_meta}


def moved(model: nn.Module, initial: dict[str, Fingerprint]) -> bool:
    """Return whether one of these parameters was trained or loaded since its fingerprint was taken."""
    now = {name: p for name, p in model.named_parameters() if name in initial}
    return any(name in now and _has_moved(now[name], before) for name, before in initial.items())


def _has_moved(parameter: Tensor, before: Fingerprint) -> bool:
    # The version counts in-place changes; if it differs, for example after a move to another device, compare values.
    if version_of(parameter) == before[0]:
        return False
    _, total, squares = _fingerprint(parameter)
    return abs(total - before[1]) > 1e-9 * (1 + abs(before[1])) or abs(squares - before[2]) > 1e-9 * (1 + before[2])


def _fingerprint(parameter: Tensor) -> Fingerprint:
    values = parameter.detach().double().flatten()
    return version_of(parameter), float(values.sum()), float(torch.dot(values, values))


def check_removable(
    fitted: Iterable[FittedLayer], model: nn.Module, initial: dict[str, Fingerprint], step: int
) -> None:
    """Raise RuntimeError if removing the methods would lose what they learned."""
    learners = sorted({repr(m) for f in fitted for m in f.methods if m.has_parameters()})
    if learners and (step > 0 or moved(model, initial)):
        raise RuntimeError(
            f"{' and '.join(learners)} learned something{f' in {step} steps' if step else ''} that remove() would "
            "lose: fold() keeps what can be kept, remove(discard=True) drops it"
        )


def explain_loading(
    model: nn.Module, methods: Iterable[Method], state: dict[str, Any], prefix: str, errors: list[str]
) -> None:
    """Add an error, or warn, if the loaded weights are those of a plain model or of a model with other methods."""
    missing = [k for k in own_keys(model) if prefix + k not in state]
    if not missing:
        return
    other = any(is_own(k) for k in state)
    absent = missing[0] + (f" and {len(missing) - 1} more are" if len(missing) > 1 else " is")
    message = (
        f"these weights come from {'a model with other methods' if other else 'a plain model'}, and this one is "
        f"regularized with {' + '.join(map(repr, methods))}: {absent} missing. "
        f"Load the weights {'with the methods they were saved with' if other else 'before regularize()'}, or call "
        "remove() (remove(discard=True) after training) first. The other way round, call fold() before saving, so that "
        "plain models can load what can be folded"
    )
    if _strict():
        errors.append(message)
    else:
        warn(message)


def _strict() -> bool:
    """Return the `strict` argument of the running `load_state_dict`.

    torch passes strict=True to its hooks in every case: only the frame of load_state_dict has the real value.
    """
    loading = (frame for frame in callers() if frame.f_code is nn.Module.load_state_dict.__code__)
    return any(frame.f_locals["strict"] for frame in [*loading][:1])
