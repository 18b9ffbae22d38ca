"""Watch: the health of every head while a model trains. The parts stand in `headwise.watching`."""

from .watching.watch import Watch, watch

__all__ = ["Watch", "watch"]
