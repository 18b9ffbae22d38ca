"""Assertions for tests: `check_method(MyMethod)` for a method's contract, `assert_not_worse` for runs of two arms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headwise.files.optional_imports import needing
from headwise.testing.contract import check_method

if TYPE_CHECKING:
    from headwise_verdict import assert_not_worse

__all__ = ["assert_not_worse", "check_method"]


def __getattr__(name: str) -> Any:
    """Return `assert_not_worse`, imported on first use: a method's contract needs no headwise-verdict."""
    if name != "assert_not_worse":
        raise AttributeError(f"module 'headwise.testing' has no attribute {name!r}")
    with needing("assert_not_worse", "study"):
        from headwise_verdict import assert_not_worse

        return assert_not_worse


def __dir__() -> list[str]:
    return sorted(__all__)
