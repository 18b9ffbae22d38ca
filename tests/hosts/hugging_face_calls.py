"""Looks at the calls that reach the methods on a transformers model."""

from __future__ import annotations

from typing import Any

from tiny_models import Family

from headwise.attend.regularizing.regularize import regularize


def calls_of(family: Family, method: Any) -> list[Any]:
    """Return the first call of each layer in one training forward with the method fitted."""
    handle = regularize(family.build().train(), method)
    seen: dict[str, Any] = {}
    for f in handle.fitted:
        f.armed, f.observer = True, lambda call, out: seen.setdefault(call.site.name, call)
    handle.model(**family.batch())
    return list(seen.values())
