"""Typed records of what a study and its runs write to disk; the writer, the analysis and the report share them.

An outcome's name is `<evaluation>/<metric>` ("test/accuracy", "train/loss", "test/fog-3/accuracy"), `gap/<metric>` for
train − test, `heads/<statistic>/layer 3` or `heads/<statistic>/worst`, `rates/<statistic>/rate` and `/fit`,
`watched/<statistic>/least`, `/greatest` and `/last`,
`alerts/<kind>/step` and `/lead`, `training/steps_to_goal` and `/spikes`, or `cost/<what>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headwise_verdict.files.errors import StudyError

# words of a label that say on which data an outcome is measured
NAMES_A_SPLIT = re.compile(r"(?<![a-z])(test|val|valid|validation|dev|eval|evaluation|held.?out)(?![a-z])", re.I)


class OutcomeNames:
    """The names of outcomes that a run or a study may have whatever its task measures."""

    # costs (seconds, bytes, counts, operations), each of the outcome cost/<name>, do not measure quality
    COSTS = ("seconds_per_step", "peak_memory_bytes", "parameters", "flops_per_step", "inference_seconds_per_example")
    # whether a run diverged: claims may name it, but no run writes it as a figure
    DIVERGED = "diverged"
    # log10 of the learning rate at which a seed's runs begin to diverge along a sweep; defined for sweeps, not for arms
    CRITICAL_RATE = "critical_rate"
    # root mean square of the change of the parameters that an arm's methods added, and its ratio to the root mean
    # square of their initial values; only for arms whose methods learn parameters
    MOVED, MOVED_RELATIVE = "methods/moved", "methods/moved_relative"
    # steps until the smoothed training loss reaches the task's goal, and spikes of the loss in 1,000 steps
    STEPS_TO_GOAL, SPIKES = "training/steps_to_goal", "training/spikes"

    @staticmethod
    def in_words(name: str) -> str:
        """Return the name of an outcome in words: "test loss" for test/loss, "val loss" for test/val_loss."""
        evaluation, _, metric = name.partition("/")
        return label_on(words_of(evaluation), words_of(metric))


# label, unit and better direction of outcomes of any task
FIXED: dict[str, tuple[str, str, bool | None]] = {
    OutcomeNames.DIVERGED: ("diverged runs", "%", False),
    OutcomeNames.CRITICAL_RATE: ("critical learning rate (log10)", "decades", True),
    OutcomeNames.STEPS_TO_GOAL: ("steps to the goal of the training loss", "steps", False),
    OutcomeNames.SPIKES: ("spikes of the training loss in 1,000 steps", "", False),
}


def words_of(name: str) -> str:
    """Return a name with spaces for underscores and slashes."""
    return re.sub(r"[_/]+", " ", name)


def label_on(evaluation: str, label: str) -> str:
    """Return the label of an outcome with its evaluation: "test loss"; "val loss" says itself where it is measured."""
    return label if evaluation == "test" and NAMES_A_SPLIT.search(label) else f"{evaluation} {label}".strip()


def words_of_rate(name: str) -> str:
    """Return the description, with its unit, of an outcome rates/<statistic>/rate or rates/<statistic>/fit."""
    _, statistic, kind = name.split("/")
    words = words_of(statistic)
    if kind == "fit":
        return f"R² of an exponential course of {words}"
    return f"exponential rate of {words}, e-folds per 1,000 steps"


class StoredRecord(BaseModel):
    """A record read from disk; fields that a later version added are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), populate_by_name=True)


class MetricRecord(StoredRecord):
    """A metric: its name in outcomes, label, unit ("%" for a share in [0, 1]) and good direction."""

    name: str
    label: str
    higher_is_better: bool
    unit: str = ""
    # the value that a diverged run counts as (chance for a classifier); None excludes diverged runs
    failure: float | None = None


class Outcome(StoredRecord):
    """The description of one figure of a run; `higher_is_better` is None when neither direction is good."""

    name: str
    label: str
    unit: str = ""
    higher_is_better: bool | None = None
    kind: Literal["metric", "gap", "heads", "watched", "alerts", "cost", "methods"] = "metric"


class EnvironmentRecord(StoredRecord):
    """The code and hardware that results came from, and how many runs share them."""

    runs: int = 0
    commit: str | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None


class RunEntry(StoredRecord):
    """One run of a study: the name of its folder, its arm and its seed."""

    hash: str
    arm: str
    seed: int


class AxisRecord(StoredRecord):
    """The arms that one `--sweep` made, in the order of the swept values."""

    name: str
    values: list[float]
    arms: list[str]
    # the sweep as the user wrote it
    text: str = ""

    @property
    def of_rates(self) -> bool:
        """Return whether it is an axis of learning rates."""
        return self.name.rpartition(".")[2] == "learning_rate" and min(self.values) > 0


class ClaimTest(StoredRecord):
    """What a claim predicts for one outcome of an arm or of a sweep.

    "higher" and "lower" refer to the number itself, whichever direction is better. "rises", "falls" and "inside" (the
    best value is neither the first nor the last) apply to a sweep, and `arm` is then the text of the sweep. The outcome
    "diverged" is whether a run diverged. With a `level`, the arm is compared with this published figure instead of
    another arm; because a figure of one setting does not apply to another, `scale` names the only scale at which it is
    judged. With `by`, an arm is "higher" or "lower" by more than this amount; a negative amount asks whether it is no
    worse than that. The outcome "critical_rate" is log10 of the learning rate at which a seed's runs begin to diverge:
    `arm` and `against` are then two sweeps of learning rates.

    Example:
        >>> from headwise_verdict.results.records import ClaimTest
        >>> ClaimTest(arm="DropHead(p=0.2)", outcome="test/accuracy", says="higher", effect=0.005).against
        'baseline'
    """

    arm: str
    outcome: str
    says: Literal["higher", "lower", "same", "rises", "falls", "inside"]
    against: str = "baseline"
    # the outcome of `against`, if another one (the last layer's figure against the first's); "": the same outcome
    against_outcome: str = ""
    # a number to compare `arm` with instead of another arm, in the outcome's unit
    level: float | None = None
    # the amount that "higher" or "lower" must exceed, in the outcome's unit; negative: by how much it may fail
    by: float | None = Field(default=None, allow_inf_nan=False)
    # the published effect, in the outcome's unit; for a sweep, from its first value to its last
    effect: float | None = None
    # a smaller difference counts as none, in the outcome's unit; None: the study's own margin for "same", else half
    # of the effect
    margin: float | None = Field(default=None, gt=0)
    # the only scale at which the test is judged; "": every scale
    scale: str = ""

    @model_validator(mode="after")
    def _has_a_meaning(self) -> ClaimTest:
        if self.outcome == OutcomeNames.DIVERGED and self.says == "inside":
            raise ValueError(
                f"{self.arm}: says='inside' does not apply to the outcome {OutcomeNames.DIVERGED!r}; "
                "use higher, lower, same, rises or falls"
            )
        if self.outcome == OutcomeNames.CRITICAL_RATE and (
            self.along_axis or self.against_outcome or (self.against == "baseline" and self.level is None)
        ):
            raise ValueError(
                f"{self.arm}: a critical rate needs a sweep of learning rates, compared with another sweep or a level"
            )
        if self.margin is not None and self.along_axis:
            raise ValueError(f"{self.arm}: along an axis a margin has no meaning; give the effect from end to end")
        if self.level is not None and self.against != "baseline":
            raise ValueError(f"{self.arm}: a level takes the place of another arm, such as {self.against}")
        if (self.against_outcome or self.level is not None) and self.along_axis:
            raise ValueError(f"{self.arm}: an axis is compared with neither another outcome nor a level")
        if self.against_outcome and self.outcome == OutcomeNames.DIVERGED:
            raise ValueError(f"{self.arm}: divergence is compared with no other outcome")
        if self.against_outcome and self.level is not None:
            raise ValueError(f"{self.arm}: it is compared with {self.against_outcome} or with {self.level:g}, not both")
        is_number = self.outcome not in (OutcomeNames.DIVERGED, OutcomeNames.CRITICAL_RATE)
        if self.by is not None and (self.says not in ("higher", "lower") or not is_number):
            raise ValueError(f"{self.arm}: by={self.by:g} applies to a number that is higher or lower")
        if self.by is not None and not self.level is self.effect is self.margin is None:
            raise ValueError(f"{self.arm}: by={self.by:g} takes neither a level, an effect nor a margin")
        if self.effect is not None and self.says in ("same", "inside"):
            raise ValueError(f"{self.arm}: says={self.says!r} takes no effect")
        if self.effect is not None and (self.effect == 0 or (self.effect < 0 and self.says in ("higher", "rises"))):
            raise ValueError(f"{self.arm}: an effect of {self.effect:g} is not what says={self.says!r} means")
        return self

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the arms of a test that does not concern a sweep."""
        return (self.arm,) if self.level is not None else (self.arm, self.against)

    @property
    def beyond(self) -> float:
        """Return what is added to the figure of `against` before the comparison: `by`, negative for "lower"."""
        return (self.by or 0.0) * (-1 if self.says == "lower" else 1)

    @property
    def along_axis(self) -> bool:
        """Return whether the test concerns a sweep."""
        return self.says in ("rises", "falls", "inside")


class EarlierVerdict(StoredRecord):
    """A verdict that a claim had until a premise, a margin or a setting was stated after its runs.

    It is kept next to the present verdict and counted: a premise that comes after the figures hides nothing.
    """

    verdict: str
    # the day on which the claim was judged otherwise, YYYY-MM-DD
    until: str
    why: str


ClaimKind = Literal["measured", "calculation", "by construction", "figures known"]


class Claim(StoredRecord):
    """A published statement that a study tests, with its source, its published figures and the tests that decide it.

    `kind` tells how much its verdict can show. "measured": stated before its figures were known, and judged from runs.
    "calculation": judged from a calculation, which no training enters. "by construction": it could not have come out
    otherwise. "figures known": stated when its figures were known. Only "measured" ones are counted as findings.

    Example:
        >>> from headwise_verdict.results.records import Claim, ClaimTest
        >>> higher = ClaimTest(arm="DropHead(p=0.2)", outcome="test/accuracy", says="higher", effect=0.005)
        >>> Claim(
        ...     text="DropHead helps.", source="arXiv 2004.13342", published={"gain": "+0.5 points"}, tests=(higher,)
        ... ).needs
    """

    text: str
    source: str = ""
    published: dict[str, str] = {}
    tests: tuple[ClaimTest, ...] = ()
    # names of the premises that the claim requires; None: all premises of the study
    needs: tuple[str, ...] | None = None
    kind: ClaimKind = "measured"
    # verdicts that were given up after the runs, the oldest first
    before: tuple[EarlierVerdict, ...] = ()

    @field_validator("tests", "needs", "before", mode="before")
    @classmethod
    def _of_json(cls, value: Any) -> Any:
        # JSON has no tuples, and records are validated strictly
        return tuple(value) if isinstance(value, list) else value


class Premise(StoredRecord):
    """A condition that must hold before claims are judged, such as that the baseline learned; its tests are a claim's.

    A test of the outcome "diverged" with a level is decided by the share of these runs that diverged; every other test
    must be shown statistically.

    Example:
        >>> from headwise_verdict.results.records import ClaimTest, Premise
        >>> better_than_chance = ClaimTest(arm="baseline", outcome="test/accuracy", says="higher", level=0.2)
        >>> Premise(name="learned", text="The baseline is better than chance.", tests=(better_than_chance,)).name
        'learned'
    """

    name: str
    text: str = ""
    tests: tuple[ClaimTest, ...] = ()

    _of_json = field_validator("tests", mode="before")(lambda value: tuple(value) if isinstance(value, list) else value)


class StudyRecord(StoredRecord):
    """The content of study.json: question, arms, seeds, metrics, runs, and the origin of the results."""

    format: Literal[2] = 2
    # distinguishes this study from another one in the same folder
    identity: str = ""
    name: str = ""
    # the declared scale that the settings match, "other" if they match none
    scale: str = ""
    title: str = ""
    question: str = ""
    kind: str = "compare"
    arms: list[str] = Field(min_length=1)
    baseline: str
    seeds: list[int]
    # the outcome that decides the verdicts
    primary: str
    metrics: list[MetricRecord]
    evaluations: list[str] = ["train", "validation", "test"]
    # a smaller difference counts as none; in the unit of the primary metric
    margin: float | None = None
    axes: list[AxisRecord] = []
    claims: list[Claim] = []
    premises: list[Premise] = []
    settings: dict[str, Any] = {}
    runs: list[RunEntry] = []
    # SHA-256 of the entries that verdicts depend on, and of it with the list of runs; with a ledger, every result has
    # a digest
    digest: str | None = None
    ledger: str | None = None
    command: str | list[str] = ""
    commit: str | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None
    environments: list[EnvironmentRecord] = []
    notes: list[str] = []

    @property
    def by_step(self) -> bool:
        """Return whether points of its curves are of steps, whose epochs are not known: of a script, or of a table."""
        return self.of_script or self.kind == "numbers"

    @property
    def of_script(self) -> bool:
        """Return whether the runs are those of the user's own training script."""
        return {"script", "arguments"} <= self.settings.keys()

    def parts(self, name: str) -> tuple[str, str]:
        """Return evaluation and metric of an outcome's name; a declared metric's name may contain slashes."""
        known = [metric.name for metric in self.metrics if name.endswith(f"/{metric.name}")]
        metric = max(known, key=len, default=name.rpartition("/")[2])
        return name[: -len(metric) - 1], metric

    def outcome(self, name: str) -> Outcome:
        """Return the description of the outcome of this name."""
        whole = next((metric for metric in self.metrics if metric.name == name and "/" in name), None)
        if whole is not None:
            # an outcome of a table, which is declared with its evaluation: "eval/loss"
            return Outcome(name=name, label=whole.label, unit=whole.unit, higher_is_better=whole.higher_is_better)
        if name in FIXED:
            label, unit, better = FIXED[name]
            return Outcome(name=name, label=label, unit=unit, higher_is_better=better)
        group, _, rest = name.partition("/")
        if group == "rates":
            return Outcome(name=name, label=words_of_rate(name))
        if group == "methods":
            words = "change of own parameters" + (" over their start" if name.endswith("relative") else "")
            return Outcome(name=name, label=words, kind="methods")
        if group == "alerts":
            return Outcome(name=name, label=words_of(name), unit="steps", kind="alerts")
        if group in ("cost", "heads", "watched"):
            better = False if group == "cost" else None
            return Outcome(name=name, label=words_of(rest), higher_is_better=better, kind=group)  # type: ignore[arg-type]
        evaluation, kind = self.parts(name)
        known = next((metric for metric in self.metrics if metric.name == kind), None)
        if known is None:
            return Outcome(name=name, label=words_of(name))
        label = label_on(evaluation, known.label)
        if evaluation == "gap":
            return Outcome(name=name, label=label, unit=known.unit, kind="gap")
        # a figure on the training data measures the fit, for which neither direction is good
        better = None if evaluation == "train" else known.higher_is_better
        return Outcome(name=name, label=label, unit=known.unit, higher_is_better=better)

    @property
    def failure(self) -> float | None:
        """Return the value that the task declares for a diverged run in the primary metric, or None."""
        kind = self.parts(self.primary)[1]
        return next((metric.failure for metric in self.metrics if metric.name == kind), None)


class CellRecord(StoredRecord):
    """The entries of a run's config.json that place the run in a study; `purpose` is "final" for a final run."""

    arm: str
    seed: int
    purpose: str = "final"


class Divergence(StoredRecord):
    """The step, counted from 1 over the whole run, at which a run diverged, and the reason."""

    step: int
    why: Literal["not finite", "loss rose"] = "not finite"
    detail: str = ""


class Apart(StoredRecord):
    """The number and the seconds of the steps whose time includes other work than training."""

    steps: int = 0
    seconds: float = 0.0


class EpochLine(StoredRecord):
    """One line of metrics.jsonl: the measurements of one epoch (or block of steps) of a phase."""

    # counted from 1 over the whole run
    epoch: int
    phase: str = ""
    # the last step, counted from 1 over the whole run
    step: int | None = None
    steps: int = 0
    seconds: float = 0.0
    apart: Apart = Apart()
    learning_rate: float | None = None
    # by outcome name; None where it was not finite
    metrics: dict[str, float | None] = {}


class RunResult(StoredRecord):
    """The content of result.json: how a run ended, its outcomes by name, its configuration and its origin."""

    format: Literal[2] = 2
    status: Literal["finished", "diverged"]
    arm: str
    seed: int
    hash: str
    # by outcome name; None where it could not be measured
    metrics: dict[str, float | None]
    divergence: Divergence | None = None
    steps: int = 0
    epochs: int = 0
    phases: list[str] = []
    # whether other runs shared the processor while the costs were measured
    cost_is_indicative: bool = False
    watched: bool = False
    # for a script: digests of its initial weights and of its data order, which prove that runs are paired
    evidence: dict[str, str] = {}
    # SHA-256 of the run's other files when the run ended, None for a file that did not exist
    digests: dict[str, str | None] | None = None
    # SHA-256 of all the other entries
    digest: str | None = None
    config: dict[str, Any] = {}
    commit: str | None = None
    versions: dict[str, Any] | None = None
    hardware: dict[str, Any] | None = None


def environments_of(results: Iterable[RunResult]) -> list[EnvironmentRecord]:
    """Return the distinct commits, versions and hardware of results with their number of runs, most frequent first."""
    distinct: dict[str, EnvironmentRecord] = {}
    for result in results:
        fields = result.model_dump(include={"commit", "versions", "hardware"})
        key = json.dumps(fields, sort_keys=True)
        known = distinct.get(key, EnvironmentRecord(**fields))
        distinct[key] = known.model_copy(update={"runs": known.runs + 1})
    return sorted(distinct.values(), key=lambda environment: -environment.runs)


# the file of a run's folder that contains its attention maps
MAPS = "maps.json"


class LayerMaps(StoredRecord):
    """The attention weights of one layer on one example, by head, query and key, rounded for a picture."""

    layer: str
    depth: int
    heads: list[list[list[float]]]


class MapsRecord(StoredRecord):
    """The attention maps of a trained model's first and last layer on the first held-out example."""

    # number of tokens in the example; only the first of them are stored
    tokens: int
    layers: list[LayerMaps]


# the name is any text, such as W&B's "eval/loss" or "val acc (top-1)"
OUTCOME = re.compile(r"\s*(?P<name>\S.*?)\s*:(?P<direction>higher|lower)(?::(?P<unit>.*))?", re.DOTALL)


def declared_outcomes(texts: Sequence[str]) -> list[MetricRecord]:
    """Return the metrics in `accuracy:higher`, `eval/loss:lower:nats` or `accuracy:higher:%` (shares in [0, 1]).

    Raises:
        StudyError: if a text has no name or direction, or two have the same name.
    """
    metrics: dict[str, MetricRecord] = {}
    for text in texts:
        match = OUTCOME.fullmatch(text)
        if match is None:
            raise StudyError(
                f"--outcome {text!r} does not say which direction is good. Write NAME:higher or NAME:lower, such as "
                "accuracy:higher; a third part is the unit: accuracy:higher:% for shares in [0, 1]."
            )
        name, higher = match["name"], match["direction"] == "higher"
        if name in metrics:
            both = ", as higher and as lower" if metrics[name].higher_is_better != higher else ""
            raise StudyError(f"--outcome {name} is given twice{both}. Give it once.")
        metrics[name] = MetricRecord(
            name=name, label=name.replace("_", " "), higher_is_better=higher, unit=(match["unit"] or "").strip()
        )
    return list(metrics.values())
