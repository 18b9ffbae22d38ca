"""Checks of a method class: on one attention call of each kind, and of its declarations, its text and its copies."""

from __future__ import annotations

import copy
import pickle
import typing

import torch
from torch import Tensor

from headwise.attend import Method, parse
from headwise.testing.calls import B, H, T, assert_close, assert_same_run, run, tensors, why_not

FORMS = ("fast", "textbook")


def both_forms_agree(cls: type[Method], kind: str, dtype: torch.dtype = torch.float32) -> None:
    """Check that the matrix-free form gives the values and gradients of the textbook form."""
    method = cls(**cls.strong)
    assert_same_run(run([method], kind, "fast", dtype), run([method], kind, "textbook", dtype), dtype)


def both_forms_agree_in_bf16(cls: type[Method], kind: str) -> None:
    """Check that both forms agree in bf16, up to its rounding."""
    both_forms_agree(cls, kind, torch.bfloat16)


def both_forms_agree_under_dropout(cls: type[Method], kind: str) -> None:
    """Check that both forms agree if the host drops weights."""
    method = cls(**cls.strong)
    fast, textbook = (run([method], kind, form, dropout=0.3) for form in FORMS)
    assert_same_run(fast, textbook)


def neutral_is_neutral(cls: type[Method], kind: str) -> None:
    """Check that the neutral setting changes no output, in either form."""
    if cls.neutral is None:
        return
    method = cls(**cls.neutral)
    for training in (True, False):
        plain = run([], kind, "fast", training=training)
        for form in FORMS:
            acting = [method] if method.acts_in(training) else []
            out = run(acting, kind, form, trained=False, training=training).out
            largest = float((out - plain.out).abs().max())
            assert largest <= 2e-6 * max(1.0, float(plain.out.abs().max())), (
                f"at {method!r} the {form} form changes the output: the largest difference is {largest:.3g}"
            )


def gradients_flow(cls: type[Method], kind: str) -> None:
    """Check that the values get a gradient, and that every gradient is finite."""
    for form in FORMS:
        grads = run([cls(**cls.strong)], kind, form).grads
        for name, grad in grads.items():
            assert grad is None or grad.isfinite().all(), f"the gradient of {name} is not finite in the {form} form"
        v = grads["v"]
        assert v is not None and v.any(), f"v gets no gradient in the {form} form: is something detached?"


def blocks_equal_the_whole(cls: type[Method], kind: str) -> None:
    """Check that blocks of queries give the same results as the whole matrix."""
    method = cls(**cls.strong)
    try:
        blocks = run([method], kind, "textbook", whole=4 * B * H * T)
        assert_same_run(blocks, run([method], kind, "textbook"))
    except Exception as error:
        remedy = ": is rowwise = True wrong, or random left out?"
        raise AssertionError(f"blocks of 4 queries differ from the whole: {error}{remedy}") from error


def masks_are_respected(cls: type[Method], kind: str) -> None:
    """Check that a change of hidden tokens, padding or the last of a causal call, changes nothing for the others."""
    method = cls(**cls.strong)
    # Statistics of a training batch include all tokens, so methods that act in evaluation are checked there.
    training = not method.acts_in(False)
    before, _ = tensors(kind)
    unseen = torch.zeros(B, T, dtype=torch.bool)
    if kind == "causal":
        unseen[:, -1] = True
    else:
        unseen[1, T - 3 :] = True
    g = torch.Generator().manual_seed(4)
    after = {name: _changed(x, unseen, g) for name, x in before.items()}
    seen = ~unseen[:, None, :, None]
    for form in FORMS:
        a, b = (run([method], kind, form, inputs=x, training=training) for x in (before, after))
        assert_close(
            b.out * seen, a.out * seen, f"output of the {form} form at tokens that cannot see what was changed"
        )
        if kind == "padded":
            assert_close(b.penalty, a.penalty, f"penalty of the {form} form when padding changed")


def _changed(x: Tensor, unseen: Tensor, g: torch.Generator) -> Tensor:
    """Return x (B, T, C) or (B, H, T, D) with new random numbers at the unseen tokens."""
    mask = unseen[:, :, None] if x.dim() == 3 else unseen[:, None, :, None]
    return torch.where(mask, 3 * torch.randn(x.shape, generator=g), x)


def draws_repeat(cls: type[Method], kind: str) -> None:
    """Check that a repeated pass draws the same numbers, and that torch's own generators are not used."""
    method = cls(**cls.strong)
    for form in FORMS:
        first = run([method], kind, form, seed=2)
        torch.manual_seed(2)
        state = torch.get_rng_state()
        again = run([method], kind, form, seed=3)
        largest = float((first.out - again.out).abs().max())
        remedy = "draw with call.uniform_draw or call.normal_draw, and not with torch.rand"
        assert torch.equal(first.out, again.out), (
            f"the same pass gives another output in the {form} form: the largest difference is {largest:.3g}; {remedy}"
        )
        run([method], kind, form, seed=2)
        assert torch.equal(torch.get_rng_state(), state), f"torch's generator moves on in the {form} form: {remedy}"


def made(cls: type[Method]) -> list[Method]:
    """Return the method at its default, strong and neutral settings."""
    return [cls(), cls(**cls.strong), *([] if cls.neutral is None else [cls(**cls.neutral)])]


def declarations(cls: type[Method]) -> None:
    """Check that the declarations of the class are valid and agree with a call."""
    _check_texts(cls)
    assert not (problems := cls.misplaced()), problems[0]
    fields = [*cls().settings()]
    unknown = [name for name in cls.live if name not in fields]
    assert not unknown, f"live names {unknown}, which are not fields; its fields: {fields}"
    # The host's own kernel runs while this strength, read as a live one, is 0.
    silent = cls.penalizes and cls.neutral == {"strength": 0.0}
    assert not silent or "strength" in cls.live, (
        'it penalizes and is neutral at {"strength": 0.0}, but "strength" is not in live: add it, and read it with '
        'call.value(self, "strength")'
    )
    method = cls(**cls.strong)
    if why_not(method, "plain") is not None:
        return
    ran = run([method], "plain", "textbook")
    stateful = method.draws() or method.penalizes or method.carries or method.counts_batches()
    assert not ran.passes or stateful, "it draws random numbers: set random = True"
    assert method.penalizes or not float(ran.penalty), "it adds to the loss: set penalizes = True"


def _check_texts(cls: type[Method]) -> None:
    summary = cls.summary()
    # A dataclass without a docstring gets its signature as docstring.
    assert summary and not summary.startswith(f"{cls.__name__}("), (
        "it has no docstring: begin with one sentence that states the operation"
    )
    assert cls.neutral is not None or cls.no_neutral, (
        "it has neither `neutral` nor `no_neutral`, which says why there is none"
    )
    for name in ("acts", "over_layers", "cost"):
        (hint,) = typing.get_args(typing.get_type_hints(Method)[name])
        allowed = typing.get_args(hint)
        assert getattr(cls, name) in allowed, f"{name} is {getattr(cls, name)!r}, which is not one of {allowed}"


def text(cls: type[Method]) -> None:
    """Check that `parse` reads what `repr` writes."""
    for method in made(cls):
        read = parse(repr(method))
        assert read == [method], f"parse({method!r}) gives {read!r}"


def copies(cls: type[Method]) -> None:
    """Check that settings survive deepcopy and pickle, and that an instance holds only settings."""
    for method in made(cls):
        assert copy.deepcopy(method) == method, f"deepcopy of {method!r} is {copy.deepcopy(method)!r}"
        extra = vars(method).keys() - method.settings().keys()
        assert not extra, (
            f"an instance holds {sorted(extra)} in addition to its settings: keep it with call.state(self)"
        )
        try:
            again = pickle.loads(pickle.dumps(method))
        except (pickle.PicklingError, AttributeError) as error:
            raise AssertionError(f"it cannot be pickled ({error}): define the class at the top of a module") from error
        assert again == method, f"pickle gives {again!r} for {method!r}"
