"""The page of the statistics: the definition of each health figure, from the registries and their docstrings."""

from __future__ import annotations

import inspect
import re

from headwise.health.statistics import STATISTICS
from headwise.health.statistics.statistic import Statistic
from headwise.health.statistics.weights import WEIGHT_STATISTICS
from headwise.health.statistics.weights.product import WeightStatistic

INTRO = """# Statistics of attention

The figures that `headwise.watch`, `headwise audit` and a
[study's own fields](../../tasks.md#what-else-a-run-measures) read. `statistics=[...]` takes the names, and each record
has them under `"statistic"`. A figure belongs to a head, to a layer, or to a group of heads that share
keys and values. The limits beyond which a figure becomes an alert are in `headwise.Thresholds`.

Layers that mix tokens without a softmax over keys (linear attention, state spaces) and routers of experts have none of
the figures of heads: `watch.reasons()` lists them, with the figures of the whole model that cover their parameters."""
WEIGHTS = """## Of the weights

Each is computed for two products, of queries with keys and of values with the output projection: `spectral_norm_qk` and
`spectral_norm_vo`."""
MODEL = """## Of the whole model

Read only if they are named. The two of the loss need `loss=` in `headwise.watch`; a study passes it automatically.

| name | what it is |
|---|---|
| `matrix_norm` | the spectral norm of every matrix of the model |
| `sharpness` | the largest eigenvalue of the Hessian of the training loss: [headwise.sharpness](headwise.md) |
| `sharpness_share` | the sharpness over the stability limit of the optimizer at its rate; above 1 the steps grow |
| `gradient_norm` | the gradient norm of each attention layer, of the rest of each block, and of the model |
| `update_ratio` | the norm of the last step over the norm of the parameters, group by group |
| `update_entropy` | the spectral entropy (nats) of the last step's change of W_QᵀW_K: low where few directions change |
| `update_norm` | the spectral norm of that change, in the units of weights squared |
| `update_rank` | its stable rank Σσ²/σ₁², at most twice the head size |
| `gradient_spike` | how many standard deviations the gradient's norm is above those of the steps before |
| `loss_spike` | the same for the loss that is passed to `watch.step(loss)` |

## Since the first reading

Read only if they are named, together with the statistic that each is the change of. A continued run (`watch.step_to`)
counts from its first record.

| name | what it is |
|---|---|
| `log_sum_exp_drift` | the change of `log_sum_exp`: the softmax does not see it, half precision does |
| `sink_mass_growth` | the change of `sink_mass` |
| `sink_weight_growth` | the change of `sink_weight`, of a learned sink |
| `gate_mean_growth` | the change of `gate_mean`: below 0 a head is being switched off |"""
WORSE = {"high": "High values are unhealthy.", "low": "Low values are unhealthy."}


def page() -> str:
    """Return the page: a table with one sentence each, and below it the full text of each."""
    return (
        "\n\n".join(
            [
                INTRO,
                _table(STATISTICS),
                WEIGHTS,
                _table(WEIGHT_STATISTICS),
                MODEL,
                "## Each in full",
                *(_whole(name, kind) for name, kind in (*STATISTICS.items(), *WEIGHT_STATISTICS.items())),
            ]
        )
        + "\n"
    )


def _table(kinds: dict[str, type[Statistic]] | dict[str, type[WeightStatistic]]) -> str:
    rows = [f"| [`{name}`](#{name}) | {plain(_said(kind)[0])} | {plain(kind.unit)} |" for name, kind in kinds.items()]
    return "\n".join(["| name | what it does | unit |", "|---|---|---|", *rows])


def _whole(name: str, kind: type[Statistic] | type[WeightStatistic]) -> str:
    facts = [kind.unit, f"of each {kind.per}"]
    if issubclass(kind, Statistic):
        facts.append(kind.reduction)
    last = f"In {plain(', '.join(facts))}. {WORSE.get(kind.worse or '', '')}".strip()
    return "\n\n".join([f"### `{name}`", *map(plain, _said(kind)), last])


def _said(kind: type) -> list[str]:
    return [part.replace("\n", " ") for part in (inspect.getdoc(kind) or "").split("\n\n")]


def plain(text: str) -> str:
    """Return a docstring's text for Markdown: formulas keep their signs, code in backticks is unchanged."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_|<>\[\]])", r"\\\1", part) for part in parts)
