"""Training state: what a resumed run needs to go on, as plain numbers and text."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.method import Method
from headwise.regularizing.strengths import Strengths


def progress(step: int, fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method]) -> dict[str, Any]:
    """Return the optimizer's steps, the passes through each site, and the strengths that were set."""
    counters = {f.site.name: int(f.passes.counter) for f in fitted}
    kinds = [type(method).__name__ for method in methods]
    return {"step": step, "counters": counters, "methods": kinds, "strengths": strengths.state(methods)}


def check_progress(
    state: dict[str, Any], fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method]
) -> None:
    """Raise ValueError where a state is that of another model or of other methods."""
    if not isinstance(state, dict) or not {"step", "counters"} <= state.keys():
        raise ValueError(f"load_state() takes what state() gave (step, counters, strengths), got {reprlib.repr(state)}")
    own, other = {f.site.name for f in fitted}, set(state["counters"])
    if own != other:
        apart = (("only here", own - other), ("only there", other - own))
        lines = [f"{which}: {', '.join(sorted(names))}" for which, names in apart if names]
        raise ValueError(
            f"this state is that of a model with other regularized layers ({'; '.join(lines)}): regularize the model "
            "as it was "
            "when state() was called, with the same where="
        )
    strengths.check_state(methods, state.get("strengths", ()))
    # States of version 0.1 name no methods. Strengths may differ: a run may go on with others.
    kinds = [type(method).__name__ for method in methods]
    if (known := state.get("methods", kinds)) != kinds:
        raise ValueError(
            f"this state is that of {' + '.join(known) or 'no method'}, and the methods here are "
            f"{' + '.join(kinds) or 'none'}: "
            "regularize with the methods that state() was called with"
        )


def load_progress(
    state: dict[str, Any], fitted: list[FittedLayer], strengths: Strengths, methods: Sequence[Method]
) -> int:
    """Take a state that was checked, and give its step."""
    step = int(state["step"])
    for f in fitted:
        f.passes.counter.fill_(int(state["counters"][f.site.name]))
    # States of version 0.1's first days know of no strengths.
    strengths.load_state(methods, state.get("strengths", ()))
    strengths.write(fitted, step)
    return step
