"""`watch` and its handle, which read the health of every head during training without changing a bit of it."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from headwise.attend import OptimizerSteps, Where
from headwise.files.arguments import is_a, is_path, suggesting
from headwise.files.html import html_table
from headwise.files.user_warnings import warn
from headwise.health.health_records import Alert, Line, Record, figures_among
from headwise.health.watching.alerts import Alerts, HealthAlert, HealthWarning, Judge
from headwise.health.watching.beside import EVERY, beside
from headwise.health.watching.cadence import MOVED, NEAR, Cadence
from headwise.health.watching.diagnosis import Diagnosis, Incidents, told
from headwise.health.watching.drift import Drift
from headwise.health.watching.figures import Figures
from headwise.health.watching.logs import Careful, logs_of
from headwise.health.watching.losses import LOSS_SPIKE, NO_LOSS, Losses
from headwise.health.watching.places import Places
from headwise.health.watching.recorder import Recorder, SiteObserver, is_first, joined, ranks
from headwise.health.watching.replay_file import Keeper
from headwise.health.watching.rules import OF_STEPS, Thresholds
from headwise.health.watching.weights import Weights
from headwise.health.watching.whole_model import MODEL, Loss, WholeModel, names_with

# The number of the optimizer step before which `step()` must have been called; otherwise a warning follows.
BY_STEP = 3

OnAlert = Literal["warn", "raise"] | Callable[[Alert], Any] | None


@suggesting
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
    closer: int | None = 10,
    loss: Loss | None = None,
    log_heads: bool = False,
    keep: int | None = None,
    keep_in: str | os.PathLike[str] = "replays",
) -> Watch:
    """Watch the attention of a model and return the handle, whose `step()` is called after each optimizer step.

    Args:
        model: any model that `regularize` reaches. If you regularize the model, do so before watching it; watch it
            before `fully_shard`, because the fused projections of a sharded model cannot be separated.
        every: the number of steps between readings; the first reading is of step 0, before any update.
        log: one or several logs: the path of a file for `JsonLines`, `TensorBoard`, `MLflowRun`, or an existing logger
            with `log_metrics(dict, step)` or `log(dict, step)`, such as a wandb run, mlflow, trackio, a SummaryWriter,
            a Lightning logger or an Accelerator. `JsonLines` gets every record. The others get six figures, two heat
            maps and the alerts with their remedies; if `statistics` is given, they get the mean of each layer and a
            heat map of the heads for each named statistic instead.
        on_alert: "warn", "raise" (from `step()`), a function of the alert's record, or None.
        rows: the number of queries to read of each sequence; None reads all. Means of a sample are unbiased and have a
            95 % interval; extrema and ratios are marked `sampled`.
        where: which sites to read, as in `regularize`.
        statistics: names of statistics; None for the usual ones of activations and weights. The following are read only
            if they are named. `min_logit`, `top_key_distance` and `top_key_share` need another pass over the logits,
            `attention_write` and `mlp_write` hooks where the branches end, and `largest_log_sum_exp` is near
            `max_logit`. `log_sum_exp_drift`, `sink_mass_growth`, `sink_weight_growth` and `gate_mean_growth` are the
            change since the first reading of a head. `matrix_norm` is the spectral norm of every matrix of the model.
            `gradient_norm` and `update_ratio` (‖ΔW‖/‖W‖ of a step) are read for each attention layer, for the rest of
            each block and for the parameters outside all blocks. `update_entropy`, `update_norm` and `update_rank` are
            the spectral entropy, spectral norm and stable rank of the change of each head's W_qᵀW_k in a step.
            `gradient_spike` and `loss_spike` are the largest deviation of a step since the last reading from the steps
            before it (a thousand steps; fifty for the loss), in their standard deviations.
        thresholds: the limits of the alerts.
        closer: the number of steps between readings once a cheap signal has moved, for `every` steps at a time and at
            most half of the training; None for none. Such signals are a loss or `gradient_norm` passed to `step()`
            three standard deviations above the fifty steps before, and a largest logit at half of its limit. With
            several processes only the latter, which all of them know.
        loss: a function that returns the loss of a fixed batch, for example `lambda: criterion(model(x), y)`. It adds
            the statistics `sharpness` and `sharpness_share`, the sharpness as a share of what the optimizer tolerates.
            It is called when the optimizer's step begins, and costs about a hundred backward passes; see
            `headwise.sharpness`.
        log_heads: log every head as a figure too.
        keep: the number of steps before an alert that can be run again with `headwise replay`. An alert writes a file
            with weights, optimizers, the random state, settings and `batch` of each step, and the last `keep` readings.
            Costs the memory of two copies of weights and optimizers.
        keep_in: the folder for these files, named `step_<number>.pt`.

    Raises:
        ValueError: if no site can be reached, a name is unknown or a number is out of range. The model is unchanged
            then.
        TypeError: if a log or `on_alert` is of none of the kinds listed above, or an argument has an unknown name.

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
    is_a("model", model, nn.Module, "a torch module")
    is_a("every", every, int, "a whole number of steps")
    is_a("rows", rows, (int, type(None)), "a whole number of queries or None")
    is_a("keep", keep, (int, type(None)), "a whole number of steps or None")
    is_a("closer", closer, (int, type(None)), "a whole number of steps or None")
    is_a("log_heads", log_heads, bool, "True or False")
    is_a("thresholds", thresholds, (Thresholds, type(None)), "headwise.Thresholds(...) or None")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function that returns the loss of a fixed batch, or None, got {loss!r}")
    is_path("keep_in", keep_in)
    is_a("statistics", statistics, (Sequence, set, frozenset, type(None)), "a list of names or None")
    if wrong := [name for name in statistics or () if not isinstance(name, str)]:
        raise TypeError(f"statistics must be a list of names, got {wrong[0]!r} in it")
    if every < 1 or (rows is not None and rows < 2):
        raise ValueError(f"every must be at least 1 and rows at least 2, got every={every}, rows={rows}")
    if on_alert not in ("warn", "raise", None) and not callable(on_alert):
        raise TypeError(f'on_alert is "warn", "raise", a function of a record or None, got {on_alert!r}')
    if closer is not None and closer < 1:
        raise ValueError(f"closer is the number of steps between closer readings and must be at least 1, got {closer}")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is the number of steps to run again and must be at least 1, got {keep}")
    names, logs = names_with(statistics, loss), logs_of(log, log_heads, brief=statistics is None, every=every)
    cadence, limits = Cadence(every, closer), thresholds or Thresholds()
    watching = Watch(model, cadence, Careful(logs), on_alert, rows, where, names, limits, loss)
    if keep is not None:
        watching.keep(keep, Path(keep_in))
    return watching


def statistics_median(records: list[Record]) -> float:
    """Return the median of the records' values; NaN if a value is NaN."""
    values = [record["value"] for record in records]
    return math.nan if any(map(math.isnan, values)) else statistics.median(values)


class Watch:
    """Handle of a watched model, with `step()`, `report()`, `records()`, `alerts()`, `plot()` and `remove()`."""

    def __init__(
        self,
        model: nn.Module,
        cadence: Cadence,
        logs: Careful,
        on_alert: OnAlert,
        rows: int | None,
        where: Where,
        names: list[str],
        thresholds: Thresholds,
        loss: Loss | None = None,
    ) -> None:
        self.every, self.on_alert, self.names = cadence.every, on_alert, names
        self._cadence, self._limits, self._incidents = cadence, thresholds, Incidents(cadence.every)
        self.steps, self.rows, self.removed = 0, rows, False
        self._keeper: Keeper | None = None
        self._losses, self._judge_of_losses = Losses(), Judge(thresholds, rules=OF_STEPS)
        self._gradients, self._largest = Losses(with_waves=False), 0.0
        self._logs, self._judge = logs, Judge(thresholds)
        self._figures: list[Figures] = []
        self._alerts: list[Alert] = []
        self._missed_reported = False
        self._places = Places(model, where)
        weights = Weights(names)
        self._recorder = Recorder(names, rows, weights)
        self._names_of_sites = {layer.site.index: layer.site.name for layer in self._places.sites}
        weights.look(self._places.model, [layer.site for layer in self._places.sites])
        self._observers = []
        for layer in self._places.sites:
            layer.observer = SiteObserver(layer, self._recorder, self._places.model)
            self._observers.append(layer.observer)
        self._whole, self._drift = WholeModel(self._places, names, loss), Drift(names)
        self._forgotten = OptimizerSteps(self._places.model, self._warn_forgotten)
        self._forgotten.listen()
        self._arm()

    # Methods for the training loop

    def keep(self, last: int, folder: Path) -> None:
        """Record from now on what a replay of the last steps before an alert needs, and write it to `folder`."""
        is_a("last", last, int, "a whole number of steps")
        is_path("folder", folder)
        self._keeper = Keeper(self._places.model, self._places.regularized, last, Path(folder))
        self._keeper.begin(self.steps)

    def step(
        self, loss: Tensor | float | None = None, batch: Any = None, *, gradient_norm: Tensor | float | None = None
    ) -> None:
        """Record that the optimizer stepped; after a step that was read, log its records and report its alerts.

        Args:
            loss: the loss of this step, which is judged at every step if it is given; nothing waits for a tensor on a
                device.
            batch: the examples of this step, as the training of a replay gets them: numbers, texts or tensors, or lists
                or dicts of them.
            gradient_norm: the norm of this step's gradients, such as `clip_grad_norm_` returns it; it makes readings
                closer where it moves, and nothing waits for it either.

        Raises:
            ValueError: if `watch` has `keep=` and there is no batch, or if the loss is more than one number.
            HealthAlert: if a figure is beyond its limit and `on_alert` is "raise"; records are written before.
        """
        self._alive()
        self._forgotten.stop()
        if loss is not None:
            is_a("loss", loss, (Real, Tensor), "a number or a tensor of one number")
            self._losses.add(self.steps, loss)
        if gradient_norm is not None:
            is_a("gradient_norm", gradient_norm, (Real, Tensor), "a number or a tensor of one number")
            self._gradients.add(self.steps, gradient_norm)
        if self._keeper is not None:
            if batch is None:
                raise ValueError(
                    "watch(keep=...) needs the batch of each step to run it again: call watch.step(batch=ids)"
                )
            self._keeper.step(self.steps, loss, batch)
        alerts = self._judge_losses() + (self._take() if self._armed else [])
        self._look_closer()
        if self._keeper is not None:
            if alerts and is_first():
                settings = {"statistics": self.names, "rows": self.rows, "every": self.every}
                self._keeper.write(alerts, self._last_readings(self._keeper.last), settings)
            self._keeper.after(self.steps)
        self.steps += 1
        self._arm()
        self._report(alerts)

    def _judge_losses(self) -> list[Alert]:
        """Return the alerts of the losses that are known by now, and log each with its figure."""
        alerts: list[Alert] = []
        for record in self._losses.known(wait=self._armed):
            self._moved("the loss", record)
            new = self._judge_of_losses.alerts([record])
            if new and is_first():
                self._logs.write([record, *new], record["step"])
            alerts += new
        self._alerts += alerts
        return alerts

    def _look_closer(self) -> None:
        """Have the next steps read closer if a cheap signal has moved."""
        for record in self._gradients.known(wait=self._armed):
            self._moved("the gradient norm", record)
        limit = self._limits.max_logit
        if self._armed and limit is not None and self._largest > NEAR * limit:
            self._cadence.moved(self.steps, f"the largest logit reached {self._largest:.3g} of {limit:g}")

    def _moved(self, what: str, record: Record) -> None:
        # Every process has its own loss, and all of them must read the same steps.
        if record["statistic"] == LOSS_SPIKE and record["value"] > MOVED and ranks() == 1:
            self._cadence.moved(self.steps, f"{what} rose by {record['value']:.3g} standard deviations")

    def _last_readings(self, count: int) -> list[Record]:
        steps = sorted({figure.step for figure in self._figures})[-count:]
        return [record for figure in self._figures if figure.step in steps for record in figure.records()]

    def step_to(self, step: int, known: Iterable[Line] = ()) -> None:
        """Continue at an optimizer step of a resumed run.

        Args:
            step: the number of the next optimizer step.
            known: the records written before, in their order. Alerts that they raised are not raised again, and figures
                that were healthy in them count as healthy before.
        """
        self._alive()
        is_a("step", step, int, "a whole number")
        is_a("known", known, Iterable, "records")
        for _, records in groupby(figures_among(known), key=lambda record: record["step"]):
            known_here = list(records)
            self._judge.alerts(known_here)
            self._drift.know(known_here)
        self._recorder.clear()
        self._losses, self._gradients = Losses(), Losses(with_waves=False)
        self._cadence.begin()
        self.steps = step
        if self._keeper is not None:
            self._keeper.begin(step)
        self._arm()

    def _arm(self) -> None:
        self._armed = self._cadence.due(self.steps)
        self._recorder.step = self.steps
        for layer in self._places.sites:
            layer.had_nothing = False
            if layer.armed != self._armed:
                layer.armed = self._armed
        self._whole.arm(self.steps, self._armed)

    def _take(self) -> list[Alert]:
        recorder, places = self._recorder, self._places
        of_model = self._whole.take(recorder.collect(self._whole.waiting()))
        layout, alone = places.layout(recorder.names, recorder.heads), any(x.shared.uneven for x in places.sites)
        tallies = joined(recorder.tallies, layout, places.device, alone=alone)
        self._warn_missed(set(tallies))
        figures = []
        for site in (layer.site for layer in places.sites):
            for name, tally in tallies.get(site.index, {}).items():
                figure = Figures.of(site, self.steps, name, tally)
                if figure is not None:
                    figures.append(figure)
            for name, values in recorder.of_weights.get(site.index, {}).items():
                figures.append(Figures.of_weights(site, self.steps, name, values, recorder.heads[site.index]))
        recorder.clear()
        figures += [*self._drift.of(figures), *of_model]
        records = [record for figure in figures for record in figure.records()]
        self._largest = max((record["value"] for record in records if record["statistic"] == "max_logit"), default=0.0)
        alerts = self._judge.alerts(records)
        # Not judged here: each loss was judged at its own step.
        spiked = self._losses.largest(self.steps)
        if LOSS_SPIKE in self.names:
            figures += spiked
            records += [record for figure in spiked for record in figure.records()]
        self._figures += figures
        self._alerts += alerts
        if is_first() and records:
            self._logs.write([*records, *alerts], self.steps)
        return alerts

    def _warn_missed(self, read: set[int]) -> None:
        missed = [x.site.name for x in self._places.sites if x.site.index not in read and not x.had_nothing]
        if missed and not self._missed_reported:
            self._missed_reported = True
            text = f"no training forward of step {self.steps} reached {', '.join(missed)}: nothing was read there"
            warn(f"{text}. Call the model in training mode between calls of step()", HealthWarning)
        if unseen := self._whole.unseen(self.steps):
            warn(unseen, HealthWarning)

    def _warn_forgotten(self, number: int, optimizer: Optimizer) -> None:
        # A warning and not an error, because watching must not stop a training that works without it.
        if number < BY_STEP:
            return
        self._forgotten.stop()
        if is_first():
            text = (
                f"watch.step() was not called in the first {BY_STEP - 1} optimizer steps, so nothing is recorded and "
                "every forward is read as one of step 0: call it after each optimizer.step(), or use "
                "headwise.WatchCallback with transformers.Trainer"
            )
            warn(text, HealthWarning)

    def _report(self, alerts: list[Alert]) -> None:
        news = self._incidents.add(alerts)
        if not alerts or self.on_alert is None:
            return
        if self.on_alert == "raise":
            raise HealthAlert(alerts)
        if callable(self.on_alert):
            for alert in alerts:
                self.on_alert(alert)
        elif news and is_first():
            warn(told(news), HealthWarning)

    # Results

    def records(self) -> list[Record]:
        """Return all records: dicts of site, depth, head (None for a layer), step, statistic and value."""
        return [record for figure in self._figures for record in figure.records()]

    def alerts(self) -> Alerts:
        """Return all alerts: the fields of a record, with threshold, sentence, remedy and source.

        A notebook displays them as a table.
        """
        return Alerts(self._alerts)

    def report(self, details: bool = False) -> Diagnosis:
        """Return the diagnosis, to be printed: what began, where, since when, what to do and what has followed.

        Args:
            details: list every alert too.
        """
        is_a("details", details, bool, "True or False")
        readings = len({figure.step for figure in self._figures})
        now = self._judge.ill() | self._judge_of_losses.ill()
        closer = tuple(map(str, self._cadence.stretches))
        return Diagnosis(self.steps, readings, tuple(self._incidents.all), now, closer, details)

    def plot(self, *names: str) -> Any:
        """Return charts of the named statistics, or of the six that loggers get, with a line per head and the alerts.

        A notebook displays them; `watch.plot("max_logit").save("health.html")` writes a page.

        Raises:
            ValueError: if there is no record of a name, or no record at all.
            ImportError: if altair is missing: pip install 'headwise[study]'.
        """
        from headwise.health.watching.pictures import plot

        for name in names:
            is_a("each of names", name, str, "the name of a statistic")
        return plot(self.records(), self._alerts, names)

    def reasons(self) -> dict[str, dict[str, str]]:
        """Return the reasons for missing statistics, for each site read so far and for the "model".

        Layers that mix tokens without a softmax over keys (linear attention, state spaces) and routers of experts are
        listed too, with what can be read of them.
        """
        by_site = {
            self._names_of_sites[index]: self._drift.explained(reasons)
            for index, reasons in self._recorder.reasons.items()
        }
        no_loss = LOSS_SPIKE in self.names and not self._losses.given
        whole = self._whole.reasons() | ({LOSS_SPIKE: NO_LOSS} if no_loss else {})
        others = {name: {EVERY: why} for name, why in beside(self._places.model, self._places.all_sites).items()}
        return by_site | ({MODEL: whole} if whole else {}) | others

    def remove(self) -> None:
        """Remove the watch from the model, with its observers, hooks and tensors; records and alerts remain.

        Raises:
            RuntimeError: if it was removed before.
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
            (name, min(r["value"] for r in records), statistics_median(records), max(r["value"] for r in records))
            for name, records in by_name.items()
        ]
        when = "nothing was read yet" if last is None else f"reading of step {last}"
        return (
            html_table(f"{self!r}: {when}", ("statistic", "lowest", "median", "highest"), rows)
            + self.report()._repr_html_()
        )

    def __repr__(self) -> str:
        return f"Watch({len(self._places.sites)} sites, every {self.every} steps, at step {self.steps})"
