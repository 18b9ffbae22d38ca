"""What a cell printed in pieces is one text: myst-nb ends every piece with a line break, which tears lines apart."""

from __future__ import annotations

from typing import Any

import myst_nb.core.render


def register() -> None:
    """Put `joined` in the place of what myst-nb merges streams with (`nb_merge_streams`)."""
    myst_nb.core.render.coalesce_streams = joined


def joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with one stream of each name: pieces as they are, stdout before stderr, at its first place."""
    streams: dict[str, Any] = {}
    kept: list[Any] = []
    for output in outputs:
        if output["output_type"] != "stream":
            kept.append(output)
        elif output["name"] in streams:
            streams[output["name"]]["text"] += output["text"]
        else:
            streams[output["name"]] = output
            kept.append(output)
    ordered = iter([streams[name] for name in ("stdout", "stderr") if name in streams])
    return [next(ordered) if output["output_type"] == "stream" else output for output in kept]
