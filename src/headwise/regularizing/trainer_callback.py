"""transformers.Trainer: a callback that takes the optimizer's steps to the handle, and its counters into
checkpoints."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Protocol


class Stepped(Protocol):
    """What a callback asks of the handle."""

    def after_step(self) -> None:
        """Tell the methods that the optimizer stepped."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take the state of an earlier run."""
        ...


def callback(handle: Stepped) -> Any:
    """Return a `transformers.TrainerCallback` that calls `handle.after_step()` after each optimizer step.

    The handle's step, draw counters and strengths are saved with the Trainer's checkpoints, and read when a run is
    resumed or ends with the weights of its best checkpoint.

    Raises:
        ImportError: naming the extra, where transformers is not installed.
    """
    try:
        from transformers import TrainerCallback
        from transformers.trainer import TRAINER_STATE_NAME
        from transformers.trainer_callback import ExportableState
    except ImportError as error:
        raise ImportError("callback() is for transformers.Trainer: pip install headwise[hf]") from error

    class HeadwiseCallback(TrainerCallback, ExportableState):
        """Takes the optimizer's steps to the handle, and the handle's counters to the checkpoint and back."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                self._take(state.stateful_callbacks)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Trainer has put the best checkpoint's weights into the model: their strengths belong to them.
            if args.load_best_model_at_end and state.best_model_checkpoint is not None:
                kept = Path(state.best_model_checkpoint, TRAINER_STATE_NAME)
                saved = json.loads(kept.read_text(encoding="utf-8"))["stateful_callbacks"] if kept.exists() else {}
                if not self._take(saved):
                    warnings.warn(
                        f"{kept} holds no state of {handle!r}: its strengths stay those of the last step", stacklevel=2
                    )

        def _take(self, saved: dict[str, Any] | None) -> bool:
            """Find the handle's own state among those that a Trainer saved; tell whether it was there."""
            kept = (saved or {}).get(type(self).__name__, [])
            for entry in kept if isinstance(kept, list) else [kept]:
                # Of several regularized models in one Trainer, each finds its own entry by its sites.
                progress = entry["attributes"]["progress"]
                if progress["counters"].keys() == handle.state()["counters"].keys():
                    handle.load_state(progress)
                    return True
            return False

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            handle.after_step()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"progress": handle.state()}}

    return HeadwiseCallback()
