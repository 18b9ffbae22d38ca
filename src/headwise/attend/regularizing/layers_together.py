"""What the layers of a model compute together in one forward: reparametrized weights, and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from headwise.attend.attention.fitted_layer import FittedLayer
from headwise.attend.core import Method, SharedState
from headwise.attend.core.random_draws import draw_ahead
from headwise.attend.regularizing.penalties import by_method


def begin(methods: Sequence[Method], fitted: list[FittedLayer], shared: SharedState) -> Iterator[Callable[[], None]]:
    """Begin what layers share in a forward of the whole model, and yield what ends it."""
    if any(method.overrides("forward_begins") for method in methods):
        for method, fits in by_method(fitted):
            if (ending := method.forward_begins(fits)) is not None:
                yield ending
    # The keys of other draws are numbers that each pass takes from torch's generator.
    if shared.draws == "counter" and len(fitted) > 1 and any(method.draws() for method in methods):
        yield draw_ahead(lambda: [layer.passes.next_key() for layer in fitted])
