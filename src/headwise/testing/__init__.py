"""Assertions for tests: `check_method(MyMethod)` for a method's contract, `assert_not_worse` for runs of two arms."""

from headwise.testing.contract import check_method
from headwise.testing.judged import assert_not_worse

__all__ = ["assert_not_worse", "check_method"]


def __dir__() -> list[str]:
    return sorted(__all__)
