"""The contract of a method as one call, `check_method(MyMethod)`, for built-in and third-party methods."""

from headwise.testing.contract import check_method

__all__ = ["check_method"]


def __dir__() -> list[str]:
    return sorted(__all__)
