"""Watch: read the health of every head while a model trains, without changing a bit of the training."""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.files.health_records import Alert, Line, Record, figures_among
from headwise.pages.notebook import html_table
from headwise.regularizing.optimizer_steps import OptimizerSteps
from headwise.regularizing.plan import Where
from headwise.watching.alerts import Alerts, HealthAlert, HealthWarning, Judge, told
from headwise.watching.figures import Figures
from headwise.watching.logs import Careful, logs_of
from headwise.watching.losses import LOSS_SPIKE, NO_LOSS, Losses
from headwise.watching.places import Places
from headwise.watching.recorder import Recorder, is_first, joined
from headwise.watching.replay_file import Keeper
from headwise.watching.rules import OF_STEPS, Thresholds
from headwise.watching.site_observer import SiteObserver
from headwise.watching.weights import Weights
from headwise.watching.whole_model import MODEL, Loss, WholeModel, names_with

# The step of an optimizer before which step() must have been called once.
BY_STEP = 3

OnAlert = Literal["warn", "raise"] | Callable[[Alert], Any] | None


def watch(
    model: nn.Module,
    every: int = 50,
    log: Any = (),
    on_alert: OnAlert = "warn",
    *,
    rows: int | None = None,
    where: Where = None,
    statistics: list[str] | None = None,
    thresholds: Thresholds | None = None,
    loss: Loss | None = None,
    log_heads: bool = False,
    keep: int | None = None,
    keep_in: str | os.PathLike[str] = "replays",
) -> Watch:
    """Watch the attention of a model, regularized or not; call `step()` of what is given after each optimizer step.

    Args:
        model: any model that `regularize` reaches; regularize it first where both are wanted, and watch it before
            `fully_shard` (fused projections of a sharded model cannot be told apart).
        every: steps between readings; the first reading is of step 0, before any update.
        log: one or several of `JsonLines`, `TensorBoard`, `MLflowRun`, or the loggers that there are: objects with
            `log_metrics(dict, step)` or `log(dict, step)` such as a wandb run, mlflow, trackio, a SummaryWriter,
            loggers of Lightning, an Accelerator. These get six figures, two heat maps and alerts with what helps; where
            `statistics` names some, of each of these a mean for each layer and a heat map of the heads. `JsonLines`
            gets every record.
        on_alert: "warn", "raise" (from `step()`), a function of the alert's record, or None.
        rows: read this many queries of each sequence: means are unbiased and come with a 95 % interval, extrema and
            ratios are marked `sampled`. None reads all.
        where: which sites are read, as in `regularize`.
        statistics: names of statistics, of activations and weights; None for all. Read where they are named:
            `matrix_norm`, the spectral norm of every matrix of the model; `gradient_norm` and `update_ratio` (‖ΔW‖/‖W‖
            of a step) of each attention layer, each block and what stands outside; `update_entropy`, the spectral
            entropy of what a step does to each head's W_qᵀW_k; `gradient_spike` and `loss_spike`, the largest deviation
            of a step since the last reading from the steps before it (a thousand; fifty of the loss), in their standard
            deviations.
        thresholds: limits of the alerts.
        loss: gives the loss of a fixed batch, for example `lambda: criterion(model(x), y)`: its `sharpness` is read,
            and the `sharpness_share` of what the optimizer bears. It is called when the optimizer's step begins, and
            costs about a hundred backward passes; see `headwise.sharpness`.
        log_heads: give loggers every head as a figure too.
        keep: keep what it takes to run the last `keep` steps again, and write it where an alert comes, with the last
            `keep` readings: weights, optimizers, each step's random state, settings and `batch`; `headwise replay` runs
            them again. It holds two copies of weights and optimizers.
        keep_in: the folder of these files, `step_<number>.pt`.

    Raises:
        ValueError: where no site can be reached, a name is unknown or a number out of range; the model is untouched
            then.
        TypeError: where a log or `on_alert` is not of a kind listed above.

    Example:
        >>> import torch, headwise
        >>> layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, num_layers=2)
        >>> watch = headwise.watch(model, every=2, statistics=["attention_entropy", "max_logit"])
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> for step in range(3):
        ...     loss = model(torch.randn(4, 8, 16)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     watch.step(loss)
        >>> sorted({record["step"] for record in watch.records()})
        [0, 2]
        >>> watch.alerts()
        []
        >>> watch.remove()
    """
    if every < 1 or (rows is not None and rows < 2):
        raise ValueError(f"every must be at least 1 and rows at least 2, got every={every}, rows={rows}")
    if on_alert not in ("warn", "raise", None) and not callable(on_alert):
        raise TypeError(f'on_alert is "warn", "raise", a function of a record or None, got {on_alert!r}')
    if keep is not None and keep < 1:
        raise ValueError(f"keep is the number of steps to run again, at least 1, got {keep}")
    names, logs = names_with(statistics, loss), logs_of(log, log_heads, brief=statistics is None)
    made = Watch(model, every, Careful(logs), on_alert, rows, where, names, thresholds or Thresholds(), loss)
    if keep is not None:
        made.keep(keep, Path(keep_in))
    return made


def statistics_median(records: list[Record]) -> float:
    """Return the median of records' values, NaN where one is."""
    values = [record["value"] for record in records]
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


class Watch:
    """The handle of a watched model: its step, its records, its alerts, and the way back."""

    def __init__(
        self,
        model: nn.Module,
        every: int,
        logs: Careful,
        on_alert: OnAlert,
        rows: int | None,
        where: Where,
        names: list[str],
        thresholds: Thresholds,
        loss: Loss | None = None,
    ) -> None:
        self.every, self.on_alert, self.names = every, on_alert, names
        self.steps, self.rows, self.removed = 0, rows, False
        self._keeper: Keeper | None = None
        self._losses, self._judge_of_losses = Losses(), Judge(thresholds, rules=OF_STEPS)
        self._logs, self._judge = logs, Judge(thresholds)
        self._figures: list[Figures] = []
        self._alerts: list[Alert] = []
        self._missed_told = False
        self._places = Places(model, where)
        weights = Weights(names)
        self._recorder = Recorder(names, rows, weights)
        self._names_of_sites = {one.site.index: one.site.name for one in self._places.sites}
        weights.look(self._places.model, [one.site for one in self._places.sites])
        self._observers = []
        for one in self._places.sites:
            one.observer = SiteObserver(one, self._recorder, self._places.model)
            self._observers.append(one.observer)
        self._whole = WholeModel(self._places, names, loss)
        self._forgotten = OptimizerSteps(self._places.model, self._tell_forgotten)
        self._forgotten.listen()
        self._arm()

    # What the training loop calls

    def keep(self, last: int, folder: Path) -> None:
        """Keep from now on what it takes to run the last steps before an alert again."""
        self._keeper = Keeper(self._places.model, self._places.regularized, last, folder)
        self._keeper.begin(self.steps)

    def step(self, loss: Tensor | float | None = None, batch: Any = None) -> None:
        """Note that the optimizer stepped; where this step was read, keep its records, write them and tell of alerts.

        Args:
            loss: of this step, which every step is judged by where it is given; nothing waits for a tensor on a
                device.
            batch: names the examples of this step, as the training of a replay takes them: numbers, texts or tensors,
                or lists or dicts of them.

        Raises:
            ValueError: where steps are kept and no batch is named, or the loss is more than one number.
            HealthAlert: where a figure passed its limit and `on_alert` is "raise"; records are written before.
        """
        self._alive()
        self._forgotten.stop()
        if loss is not None:
            self._losses.add(self.steps, loss)
        if self._keeper is not None:
            if batch is None:
                raise ValueError(
                    "watch(keep=...) cannot run a step again whose batch it does not know: watch.step(batch=ids)"
                )
            self._keeper.step(self.steps, loss, batch)
        alerts = self._judged_losses() + (self._take() if self._armed else [])
        if self._keeper is not None:
            if alerts and is_first():
                settings = {"statistics": self.names, "rows": self.rows, "every": self.every}
                self._keeper.write(alerts, self._last_readings(self._keeper.last), settings)
            self._keeper.after(self.steps)
        self.steps += 1
        self._arm()
        self._tell(alerts)

    def _judged_losses(self) -> list[Alert]:
        """Return the alerts of the losses that are known by now, and write each with the figure it is of."""
        alerts: list[Alert] = []
        for record in self._losses.known(wait=self._armed):
            found = self._judge_of_losses.alerts([record])
            if found and is_first():
                self._logs.write([record, *found], record["step"])
            alerts += found
        self._alerts += alerts
        return alerts

    def _last_readings(self, many: int) -> list[Record]:
        read = sorted({figure.step for figure in self._figures})[-many:]
        return [record for figure in self._figures if figure.step in read for record in figure.records()]

    def step_to(self, step: int, known: Iterable[Line] = ()) -> None:
        """Go on at an optimizer step of a resumed run.

        Args:
            known: what was read and written before, in its order: an alert that was told then is not told again, and
                what was well then is known to have been.
        """
        self._alive()
        for _, records in groupby(figures_among(known), key=lambda record: record["step"]):
            self._judge.alerts(records)
        self._recorder.clear()
        self._losses = Losses()
        self.steps = step
        if self._keeper is not None:
            self._keeper.begin(step)
        self._arm()

    def _arm(self) -> None:
        self._armed = self.steps % self.every == 0
        self._recorder.step = self.steps
        for one in self._places.sites:
            if one.armed != self._armed:
                one.armed = self._armed
        self._whole.arm(self.steps, self._armed)

    def _take(self) -> list[Alert]:
        recorder, places = self._recorder, self._places
        of_model = self._whole.take(recorder.collect(self._whole.waiting()))
        tallies = joined(recorder.tallies, places.layout(recorder.names, recorder.heads), places.device)
        self._tell_missed(set(tallies))
        figures = []
        for site in (one.site for one in places.sites):
            for name, tally in tallies.get(site.index, {}).items():
                figure = Figures.of(site, self.steps, name, tally)
                if figure is not None:
                    figures.append(figure)
            for name, values in recorder.of_weights.get(site.index, {}).items():
                figures.append(Figures.of_weights(site, self.steps, name, values, recorder.heads[site.index]))
        recorder.clear()
        figures += of_model
        records = [record for figure in figures for record in figure.records()]
        alerts = self._judge.alerts(records)
        # each loss was judged by itself
        spiked = self._losses.largest(self.steps)
        if LOSS_SPIKE in self.names:
            figures += spiked
            records += [record for figure in spiked for record in figure.records()]
        self._figures += figures
        self._alerts += alerts
        if is_first() and records:
            self._logs.write([*records, *alerts], self.steps)
        return alerts

    def _tell_missed(self, read: set[int]) -> None:
        missed = [one.site.name for one in self._places.sites if one.site.index not in read]
        if missed and not self._missed_told:
            self._missed_told = True
            text = f"no training forward of step {self.steps} reached {', '.join(missed)}: nothing was read there"
            warnings.warn(
                f"{text}. Call the model in training mode between calls of step()", HealthWarning, stacklevel=4
            )
        if unseen := self._whole.unseen(self.steps):
            warnings.warn(unseen, HealthWarning, stacklevel=4)

    def _tell_forgotten(self, number: int, optimizer: Optimizer) -> None:
        # A warning and no error: watching must not stop a training that is right without it.
        if number < BY_STEP:
            return
        self._forgotten.stop()
        if is_first():
            text = (
                f"watch.step() was not called in the first {BY_STEP - 1} optimizer steps, so that nothing is recorded "
                "and every forward is read as one of step 0: call it after each optimizer.step(), or use "
                "headwise.WatchCallback with transformers.Trainer"
            )
            warnings.warn(text, HealthWarning, stacklevel=5)

    def _tell(self, alerts: list[Alert]) -> None:
        if not alerts or self.on_alert is None:
            return
        if self.on_alert == "raise":
            raise HealthAlert(alerts)
        if callable(self.on_alert):
            for alert in alerts:
                self.on_alert(alert)
        elif is_first():
            for text in told(alerts):
                warnings.warn(text, HealthWarning, stacklevel=3)

    # What was read

    def records(self) -> list[Record]:
        """Return every figure that was read: dicts of site, depth, head (None for a layer), step, statistic, value."""
        return [record for figure in self._figures for record in figure.records()]

    def alerts(self) -> Alerts:
        """Return every alert: the fields of a record and threshold, sentence, remedy, source. A notebook shows them as
        a table."""
        return Alerts(self._alerts)

    def plot(self, *names: str) -> Any:
        """Return charts of the statistics named, or of the six that loggers show: a line for each head, alerts marked.

        A notebook shows them; `watch.plot("max_logit").save("health.html")` writes a page.

        Raises:
            ValueError: where nothing was read of a name.
            ImportError: where altair is missing: pip install 'headwise[study]'.
        """
        from headwise.watching.pictures import plot

        return plot(self.records(), self._alerts, names)

    def reasons(self) -> dict[str, dict[str, str]]:
        """Say, per site read so far and of the "model", which statistics have no meaning there and why."""
        found = {self._names_of_sites[index]: dict(reasons) for index, reasons in self._recorder.reasons.items()}
        unknown = LOSS_SPIKE in self.names and not self._losses.given
        whole = self._whole.reasons() | ({LOSS_SPIKE: NO_LOSS} if unknown else {})
        return found | ({MODEL: whole} if whole else {})

    def remove(self) -> None:
        """Take the watch off the model: observers, hooks and memory go, records stay.

        Raises:
            RuntimeError: when removed before.
        """
        self._alive()
        for observer in self._observers:
            observer.remove()
        self._places.leave()
        self._forgotten.stop()
        self._whole.stop()
        if self._keeper is not None:
            self._keeper.stop()
        self._recorder.clear()
        self._observers = []
        self._logs.close()
        self.removed = True

    def _alive(self) -> None:
        if self.removed:
            raise RuntimeError("this watch was removed; call headwise.watch(model) again")

    def _repr_html_(self) -> str:
        last = max((figure.step for figure in self._figures), default=None)
        newest = [record for figure in self._figures if figure.step == last for record in figure.records()]
        by_name: dict[str, list[Record]] = {}
        for record in newest:
            by_name.setdefault(record["statistic"], []).append(record)
        rows = [
            (name, min(r["value"] for r in found), statistics_median(found), max(r["value"] for r in found))
            for name, found in by_name.items()
        ]
        when = "nothing was read yet" if last is None else f"reading of step {last}"
        return (
            html_table(f"{self!r}: {when}", ("statistic", "lowest", "median", "highest"), rows)
            + self.alerts()._repr_html_()
        )

    def __repr__(self) -> str:
        return f"Watch({len(self._places.sites)} sites, every {self.every} steps, at step {self.steps})"
