"""LASER."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headwise.attend.attention.exponential import exponentials, logarithms
from headwise.attend.core import Call, Method


class LASER(Method):
    """Attends to the exponentials of the values and takes the logarithm of the result.

    Duvvuri and Dhillon 2025, arXiv 2411.03493.

    log(A·exp(v - m)) + m in training and evaluation, with m the largest value of each channel over the keys that any
    query may see, without a gradient. The logarithm passes larger gradients through small weights than a mean does.
    Only values and outputs change, so that it runs around every kernel, and other methods see plain values and
    outputs. A value counts as at least m - 61 (in fp16 m - 19). This keeps the gradients of queries and keys finite
    however far apart logits are; in fp16, whose range is too small for it, they may overflow. In bf16 exponentials have
    8 bits, so that outputs are off by some 0.004 whatever their size. The output of a query without keys, or whose
    weights are all dropped, is 0. Sinks, whose weight has no value, are refused, and so are methods that make weights
    negative.
    """

    no_neutral = "the logarithm of a mean of exponentials equals the mean only if all values are equal"
    acts = "both"
    negative = "refuses"

    def around(self, v: Tensor, call: Call) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        if call.sinks is not None:
            raise ValueError(
                f"LASER: the sinks of {call.site.name} have no values, of which it would take exponentials; "
                "leave it out with where="
            )
        e, largest = exponentials(v, _seen(call))
        return e, lambda out: logarithms(out, largest)


def _seen(call: Call) -> Tensor | None:
    """Return which keys any query may see, bool (B|1, H|1, N), or None for all."""
    allowed = None if call.mask is None else call.allowed()
    return None if allowed is None else allowed.any(2)
