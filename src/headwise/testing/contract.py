"""The contract of a method class, check by check."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headwise.attend import Method
from headwise.files.errors import suggest
from headwise.testing import on_calls, on_models
from headwise.testing.calls import why_not
from headwise.testing.on_models import MODELS, Host

KINDS = ("plain", "causal", "padded", "left padded", "sliding", "cross", "grouped", "bias")

OF_SETTINGS = (on_calls.declarations, on_calls.text, on_calls.copies)
OF_CALLS: dict[Callable[[type[Method], str], None], tuple[str, ...]] = {
    on_calls.both_forms_agree: KINDS,
    on_calls.both_forms_agree_in_bf16: KINDS,
    on_calls.both_forms_agree_under_dropout: ("plain", "padded"),
    on_calls.neutral_is_neutral: KINDS,
    on_calls.gradients_flow: KINDS,
    on_calls.blocks_equal_the_whole: ("plain", "causal", "left padded", "bias"),
    on_calls.masks_are_respected: ("causal", "padded"),
    on_calls.draws_repeat: ("plain", "causal"),
}
OF_MODELS: dict[Callable[[type[Method], Host], None], tuple[str, ...]] = {
    on_models.neutral_changes_nothing: tuple(MODELS),
    on_models.strong_setting_acts: tuple(MODELS),
    on_models.training_steps_work: tuple(MODELS),
    on_models.tokens_out_of_sight_do_not_matter: tuple(n for n, host in MODELS.items() if host.unseen is not None),
    on_models.autocast_works: tuple(MODELS),
    on_models.losses_only_in_training: tuple(MODELS),
    # Without acting methods, torch's encoder runs padding on another kernel, whose bits differ.
    on_models.folding_keeps_the_bits: tuple(n for n in MODELS if n != "torch's encoder with padding"),
    on_models.removal_leaves_no_trace: tuple(MODELS),
    on_models.copied_models_stand_alone: tuple(MODELS),
    on_models.compiles: ("a model with plain attention", "torch's encoder"),
}
CHECKS = tuple(check.__name__ for check in (*OF_SETTINGS, *OF_CALLS, *OF_MODELS))
"""The names of all checks, in their order; `skip=` takes them."""


@dataclass(frozen=True)
class Checked:
    """A check that passed.

    Attributes:
        name: of the check, one of `CHECKS`.
        on: the kinds of calls or models on which it passed; empty for a check of the class itself.
        refused: the other kinds or models, each with the reason of the method or the core.
    """

    name: str
    on: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)


def check_method(cls: type[Method], *, skip: Collection[str] = (), compile: bool = False) -> list[Checked]:
    """Run the contract of a method.

    Among others it checks that both forms agree, neutral is neutral, masks are respected, gradients flow, and removal
    leaves no trace. It needs only torch and no test runner, and takes a few seconds. Each check uses the method's
    declared `strong` and `neutral` settings. A layer that the method refuses is left out, and the result has the
    reason.

    Args:
        cls: the class, not an instance.
        skip: names of checks to leave out, from `CHECKS`; write the reason in a comment.
        compile: also check `torch.compile(fullgraph=True)`, which takes longer.

    Returns:
        The checks that passed, in order.

    Raises:
        AssertionError: if a check fails; the message has its name, the kind of call or model, and the largest
            difference.
        TypeError: if `cls` is not a method class.
        ValueError: if `skip` has a name that is not a check; the message shows the nearest one.

    Example:
        >>> import headwise
        >>> from headwise.testing import check_method
        >>> class Halved(headwise.Method):
        ...     \"\"\"Halves the attention weights.\"\"\"
        ...     share: float = 0.5
        ...     neutral = {"share": 1.0}
        ...     rowwise = True
        ...     def weights(self, a, call):
        ...         return self.share * a
        >>> # a class defined at the prompt cannot be pickled
        >>> checked = check_method(Halved, skip=("copies",))
        >>> checked[0].name
        'declarations'
    """
    _check_arguments(cls, skip)
    skip = {*skip} if compile else {*skip, on_models.compiles.__name__}
    done = [_check_class(check, cls) for check in OF_SETTINGS if check.__name__ not in skip]
    done += [_check_calls(check, cls, kinds) for check, kinds in OF_CALLS.items() if check.__name__ not in skip]
    refused = _refusals(cls)
    return done + [
        _check_models(check, cls, names, refused) for check, names in OF_MODELS.items() if check.__name__ not in skip
    ]


def _check_arguments(cls: Any, skip: Collection[str]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"check_method() takes a class that derives from headwise.Method, got {cls!r}")
    if isinstance(skip, str):
        raise TypeError(f"skip takes names in a tuple, such as skip=({skip!r},), got {skip!r}")
    for name in skip:
        if name not in CHECKS:
            raise ValueError(f"There is no check {name!r}.{suggest(name, list(CHECKS))} Checks: {', '.join(CHECKS)}.")


def _check_class(check: Callable[[type[Method]], None], cls: type[Method]) -> Checked:
    _run_check(check.__name__, cls, "", partial(check, cls))
    return Checked(check.__name__)


def _check_calls(check: Callable[[type[Method], str], None], cls: type[Method], kinds: tuple[str, ...]) -> Checked:
    reasons = {kind: why_not(cls(**cls.strong), kind) for kind in kinds}
    on = tuple(kind for kind, reason in reasons.items() if reason is None)
    for kind in on:
        _run_check(check.__name__, cls, f" on a {kind} call", partial(check, cls, kind))
    return Checked(check.__name__, on, {kind: reason for kind, reason in reasons.items() if reason is not None})


def _check_models(
    check: Callable[[type[Method], Host], None], cls: type[Method], names: tuple[str, ...], refused: dict[str, str]
) -> Checked:
    on = tuple(name for name in names if name not in refused)
    for name in on:
        _run_check(check.__name__, cls, f" on {name}", partial(check, cls, MODELS[name]))
    return Checked(check.__name__, on, {name: refused[name] for name in names if name in refused})


def _refusals(cls: type[Method]) -> dict[str, str]:
    """Return the models that the method refuses, each with the reason; raise AssertionError if it refuses all."""
    refused = {}
    for name, host in MODELS.items():
        try:
            on_models.fit(cls, host, cls.strong)[1].remove(discard=True)
        except Exception as error:
            # A refusal names a reason; everything else is an error of the method.
            if not (isinstance(error, ValueError) and "not applicable" in str(error)):
                cause = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{cls.__name__} cannot be fitted onto {name}: {cause}") from error
            refused[name] = str(error)
    if len(refused) == len(MODELS):
        raise AssertionError(f"{cls.__name__} fits onto none of the models: {next(iter(refused.values()))}")
    return refused


def _run_check(name: str, cls: type[Method], on: str, check: Callable[[], None]) -> None:
    try:
        check()
    except AssertionError as error:
        raise AssertionError(f"{cls.__name__} fails {name}{on}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{cls.__name__} fails {name}{on}: {type(error).__name__}: {error}") from error
