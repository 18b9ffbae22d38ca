"""Acting: the methods that act on a layer in one mode, sorted by their stages once and not in every call."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.attend.core.method import Method

# The stages inside of the attention computation; without any of them, torch's fused function computes the call.
INSIDE = ("logits", "weights", "read", "read_free")


class Acting:
    """Methods that act, in order, and those of them that define each stage.

    Attributes:
        methods: all of them.
        in_call: those that act on the attention call itself, and not just on the layer's input, output or weights.
        hidden, inputs, around, output, branch: those that define the stage.
        ahead: whether any computes something before attention.
        inside: whether any edits or reads logits or weights.
        keyed: whether any draws, or penalizes, in the call, so that its pass is opened before it is cut into blocks.
        fading: the penalties in `in_call` that do nothing while their strength is 0.
    """

    def __init__(self, methods: Sequence[Method]) -> None:
        self.methods = tuple(methods)
        self.in_call = tuple(m for m in methods if m.touches_call())
        self.hidden, self.inputs, self.around, self.output, self.branch = (
            tuple(m for m in methods if m.overrides(stage))
            for stage in ("hidden", "inputs", "around", "output", "branch")
        )
        self.ahead = any(m.overrides("ahead") for m in methods)
        self.inside = any(m.overrides(stage) for m in methods for stage in INSIDE)
        self.keyed = any(m.draws() or m.penalizes for m in self.in_call)
        self.fading = tuple(m for m in self.in_call if m.penalizes and m.neutral == {"strength": 0.0})

    def without(self, methods: Sequence[Method]) -> Acting:
        """Return what acts besides some methods, which are compared by identity."""
        return Acting([m for m in self.methods if not any(m is other for other in methods)])
