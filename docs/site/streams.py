"""Join the output that a cell printed in pieces: myst-nb ends every piece with a line break, which splits lines."""

from __future__ import annotations

from typing import Any

import myst_nb.core.render


def register() -> None:
    """Replace myst-nb's merging of streams (`nb_merge_streams`) with `joined`."""
    myst_nb.core.render.coalesce_streams = joined


def joined(outputs: list[Any]) -> list[Any]:
    """Return the outputs with one stream of each name: stdout before stderr, at the position of the first piece."""
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
