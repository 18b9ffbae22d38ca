"""What is done about a finished run whose files were damaged since: it is repeated, and says so."""

from __future__ import annotations

from collections.abc import Callable

from headwise.results.digests import CHECKPOINT, HEALTH, RESULT
from headwise.training.checkpoint import drop_all
from headwise.training.job import Order


def clear_damage(order: Order, note: Callable[[str], None]) -> None:
    """Make a finished run with damaged files one that is to be carried out; `note` is told which and why.

    The metric stream and the result follow from the last checkpoint, from which the run ends again at once. Readings of the
    heads stand nowhere else: without them, or with the files of another run, it starts from its beginning.
    """
    found = order.damage()
    if not found:
        return
    again = any(text.startswith((HEALTH, CHECKPOINT, f"{RESULT} is of")) for text in found)
    note(f"{order.folder}: {', '.join(found)}; the run is repeated{' from its start' if again else ''}")
    if again:
        # before the result: left in between, the run must still be seen as damaged
        drop_all(order.folder)
        (order.folder / HEALTH).unlink(missing_ok=True)
    (order.folder / RESULT).unlink()
