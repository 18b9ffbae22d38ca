"""Folding: what training alone needs leaves a model, and what evaluation needs stays."""

from __future__ import annotations

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.method import Method


def fold_methods(fitted: list[FittedLayer]) -> list[FittedLayer]:
    """Fold or drop the methods that evaluation does not need, and give the sites on which something stays."""
    kept = []
    for one in fitted:
        for method in [m for m in one.methods if not _stays(m)]:
            one.drop(method, fold=True)
        if one.methods or one.shares_values:
            kept.append(one)
    # Values are carried for methods: where none is left, no layer gives its own.
    return kept if any(one.methods for one in kept) else []


def _stays(method: Method) -> bool:
    return method.acts_in(training=False) and not method.overrides("fold")
