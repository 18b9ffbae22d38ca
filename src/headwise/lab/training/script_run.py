"""The interface of a training script to its study: arm, seed, folder, the arm's methods, and recorded figures."""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import reprlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.files.arguments import is_a
from headwise.lab.files.script_run import Told, current

if TYPE_CHECKING:
    from torch import nn

    from headwise.attend import Regularized
    from headwise.health import Watch
    from headwise.lab.training.fit import PlainHandle

# values read of each tensor: all of a smaller one, evenly spaced ones of a larger one
SAMPLE = 16_384


def of_weights(model: nn.Module) -> str:
    """Return the digest of a model's parameters and buffers: names, shapes, dtypes and values (sampled if large)."""
    digest = hashlib.blake2b(digest_size=12)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(name.encode())
        _add(digest, tensor)
    return digest.hexdigest()


class BatchDigest:
    """The digest of batches in their order: after each batch, it covers all batches so far.

    Each digest covers the one before and the new batch, so that a resumed process continues from a number and a text.

    Attributes:
        count: the number of batches so far.
        known: whether it covers every batch of the run: a resumed process does not know what came before it, until it
            loads the state that the script saved in its checkpoint.
    """

    def __init__(self, *, known: bool = True) -> None:
        self.count, self.known, self._digest = 0, known, ""

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores."""
        return {"count": self.count, "digest": self._digest}

    def load(self, state: Any) -> None:
        """Continue from the `state()` of an earlier process of the run, if there is one and this process needs it."""
        if not self.known and self.count == 0 and isinstance(state, dict) and state.keys() == self.state().keys():
            self.count, self._digest, self.known = int(state["count"]), str(state["digest"]), True

    def add(self, batch: Any) -> str | None:
        """Add a batch; return the digest if the count is a power of two, so that short runs can be compared.

        Raises:
            TypeError: if a batch holds no tensor, number or text.
        """
        values = list(_leaves(batch))
        if not values:
            raise TypeError(
                f"run.saw() was given {type(batch).__name__}, which holds no tensor, number or text. Give the batch."
            )
        digest = hashlib.blake2b(self._digest.encode(), digest_size=12)
        for leaf in values:
            _add(digest, leaf)
        self.count, self._digest = self.count + 1, digest.hexdigest()
        return self._digest if self.count & (self.count - 1) == 0 else None


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        for name in sorted(batch, key=str):
            yield str(name)
            yield from _leaves(batch[name])
    elif isinstance(batch, (list, tuple)):
        for item in batch:
            yield from _leaves(item)
    elif isinstance(batch, (str, bytes, int, float)) or _is_tensor(batch):
        yield batch
    elif hasattr(batch, "__array__"):
        array = batch.__array__()
        yield f"{array.shape} {array.dtype}"
        yield array.reshape(-1)[:: max(1, array.size // SAMPLE)].tobytes()


def _is_tensor(value: Any) -> bool:
    # a script need not use torch
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _add(digest: Any, leaf: Any) -> None:
    if not _is_tensor(leaf):
        digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
        return
    digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
    local = leaf.to_local() if hasattr(leaf, "to_local") else leaf  # a part of a sharded tensor
    if local.device.type == "meta" or local.numel() == 0:
        return
    flat = local.detach().reshape(-1)
    if len(flat) > SAMPLE:
        flat = flat[:: len(flat) // SAMPLE]
    values = flat.cpu().contiguous()
    digest.update(ctypes.string_at(values.data_ptr(), values.numel() * values.element_size()))


BASELINE = "baseline"
# optimizer steps between two readings of a watched script
WATCHED_EVERY = 50


class Run:
    """One run of a study, as its script uses it; without a study, the baseline with seed 0, and nothing is written.

    Attributes:
        arm: the text of the arm, such as "baseline".
        seed: the seed for everything in the script; below 2³².
        resumed: whether an earlier process of this run was interrupted; then resume from your checkpoint in `folder`.
        trial: whether this is a trial of `--tune`, which is judged only on `record(split="validation", …)`.

    Example:
        >>> import headwise
        >>> run = headwise.run()  # no study started this process
        >>> run.arm, run.seed, run.resumed
        ('baseline', 0, False)
    """

    def __init__(self, told: Told) -> None:
        terms = told.terms
        self.arm: str = terms.get("arm", BASELINE)
        self.seed: int = terms.get("seed", 0)
        self.resumed: bool = terms.get("resumed", False)
        self.trial: bool = terms.get("purpose") == "trial"
        self._told = told
        self._handle: Regularized | None = None
        self._fitted = False
        # an earlier process of this run may have trained to the end
        self._acted = bool(terms.get("acted"))
        self._order = BatchDigest(known=terms.get("counts", True)) if told.writes else None
        self._watch: Watch | None = None
        self._steps: Any = None
        told.tell("begin")

    @property
    def folder(self) -> Path:
        """Return this run's own folder, for checkpoints; without a study, `headwise-alone` in the working folder."""
        path = Path(self._told.terms.get("folder", "headwise-alone"))
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def in_study(self) -> bool:
        """Return whether a study started this process."""
        return self._told.path is not None

    def regularize(
        self, model: nn.Module, *, example: Any = None, steps: int | None = None
    ) -> Regularized | PlainHandle:
        """Fit this arm's methods onto the layers that the arm names, and return the handle.

        Call it once, on the model with its initial weights, before it is wrapped for distributed training, compiled, or
        loaded from a checkpoint: the digest of the weights shows that all arms of a seed start equal. The handle of an
        arm without methods has the same calls, which do nothing.

        Args:
            model: any module that `headwise.regularize` takes.
            example: a batch, as `headwise.regularize` takes it.
            steps: optimizer steps of the whole training; required if the arm has a schedule, and used by the plan to
                estimate the duration of the study.

        Raises:
            RuntimeError: if called twice.
            ValueError: as `headwise.regularize` does, and if a schedule has no `steps`.
        """
        from headwise.lab.training.fit import fit_arm

        is_a("steps", steps, (int, type(None)), "a whole number of steps or None")
        if not isinstance(getattr(model, "training", None), bool):
            raise TypeError(f"model must be a torch module, got {reprlib.repr(model)}")
        if self._fitted:
            raise RuntimeError("run.regularize() was called twice. Call it once, on the model that is trained.")
        self._fitted = True
        if self._told.writes:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            self._told.tell("weights", digest=of_weights(model), parameters=parameters)
        handle, self._handle = fit_arm(self.arm, model, example=example, seed=self.seed, steps=steps)
        handle.order = self._order
        layers = [fitted.site.name for fitted in self._handle.fitted] if self._handle is not None else []
        self._told.tell("regularized", arm=self.arm, layers=layers, steps=steps)
        if self._told.terms.get("watch"):
            self._begin_to_watch(model)
        if self._told.terms.get("tries"):
            self._tell_steps(model)
        return handle

    def takes(self, steps: int) -> None:
        """Report the optimizer steps of the whole training, if they are known only after `regularize`."""
        is_a("steps", steps, int, "a whole number of steps")
        self._told.tell("takes", steps=steps)

    def saw(self, batch: Any) -> None:
        """Record a training batch (tensors, numbers and texts, in tuples and dicts), to show that arms are paired.

        Of a large tensor, 16,384 evenly spaced numbers are read. A resumed process continues if its checkpoint holds
        `handle.state()`; else only the batches before the interruption are compared.
        """
        if self._order is None or not self._order.known:
            return
        digest = self._order.add(batch)
        if digest is not None:
            self._told.tell("saw", count=self._order.count, digest=digest)

    def log(self, *, step: int, **figures: Any) -> None:
        """Add a point to the curves of this run: figures by name at an optimizer step, counted from 1.

        A `loss` that is not finite, or that rose too far by the study's rule, ends the run as diverged.
        """
        if self._watch is not None and not self._watch.steps and self.resumed:
            self._watch.step_to(step)
        self._note_acting()
        self._told.log(step, figures)

    def record(self, *, split: str = "test", **figures: Any) -> None:
        """Record the outcomes of the run, once for each split.

        Raises:
            ValueError: if no figure is given, a figure is not finite, or a figure of a split is recorded twice.
            RuntimeError: if a method of this arm never acted.
        """
        is_a("split", split, str, "a word")
        self._refuse_idle()
        self._note_acting()
        self._told.record(split, figures)

    def evaluated(self, split: str, figures: dict[str, float]) -> None:
        """Record the figures of an evaluation; the last of a split counts, unless `record` gives that figure."""
        is_a("split", split, str, "a word")
        is_a("figures", figures, Mapping, "figures by name")
        finite = {name: value for name, value in figures.items() if math.isfinite(value)}
        self._note_acting()
        if finite:
            self._told.tell("evaluate", split=split, figures=finite)

    def _note_acting(self) -> None:
        if self._handle is not None and not self._acted and not self._handle.removed and not self._handle.idle():
            self._acted = True
            self._told.tell("acted")

    def _refuse_idle(self) -> None:
        methods = self._told.terms.get("methods") or []
        if methods and not self._fitted:
            raise RuntimeError(
                f"{self.arm} was requested and never acted: call run.regularize(model) on the model that is trained."
            )
        idle = self._handle.idle() if self._handle is not None and not (self._acted or self._handle.removed) else ""
        if idle:
            raise RuntimeError(f"{self.arm} was requested and never acted: {idle}")

    def _tell_steps(self, model: nn.Module) -> None:
        """Record when each optimizer step begins, so that a tried script need not log for its steps to be timed."""
        from headwise.attend import OptimizerSteps

        # with several optimizers, the one that is ahead counts
        begun: set[int] = set()

        def begins(number: int, optimizer: Any) -> None:
            if number not in begun:
                begun.add(number)
                self._told.tell("step", step=number)

        self._steps = OptimizerSteps(model, begins)
        self._steps.listen()

    def _begin_to_watch(self, model: nn.Module) -> None:
        from headwise.attend import OptimizerSteps
        from headwise.health import watch

        every = self._told.terms.get("watch_every") or WATCHED_EVERY
        watching = watch(model, every=every, log=self._told.terms["health"], on_alert=None)
        self._watch = watching
        # a reading before an optimizer's step is as good as one after it: no forward lies between
        self._steps = OptimizerSteps(model, lambda number, optimizer: watching.step())
        self._steps.listen()


_runs: list[Run] = []


def run() -> Run:
    """Return the run that this process carries out: its arm, seed and folder come from the study that started it.

    Without a study, it is the baseline with seed 0, and recorded figures are checked but not written.

    Raises:
        StudyError: if the environment names a run that does not exist.

    Example:
        >>> import headwise
        >>> run = headwise.run()
        >>> run.log(step=1, loss=0.7)
        >>> run.record(accuracy=0.91)
    """
    told = current()
    if not told.writes and told.path is None and not os.environ.get("HEADWISE_RUN"):
        # without a study, each call returns a new run: a notebook may train twice
        return Run(Told(None))
    if not _runs:
        _runs.append(Run(told))
    return _runs[0]
