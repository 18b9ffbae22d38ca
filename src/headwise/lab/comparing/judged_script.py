"""A training script and one change of it: pairs of runs, of the baseline and of the candidate, to be judged."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwise_verdict import PairOfRuns, StudyError

if TYPE_CHECKING:
    from headwise.lab.experiments.study import Study
    from headwise_verdict.results import RunResult

BASELINE = "baseline"


@dataclass(frozen=True)
class JudgedScript:
    """A training command, one change of it, and where the runs are kept.

    Attributes:
        command: the command that trains once; the script takes its seed and records its metric by `headwise.run()`.
        change: `name=value` of its arguments, commas between several, or an arm such as `DropHead(p=0.1)`.
        metric: the recorded name and its better direction.
        arguments: the form in which changed arguments are passed.
        out: folder of the runs; None: results/judge/NAME.
        timeout: seconds of silence after which a run is ended.
        diverged: the figure of a run that diverged; None: such a run is refused.
        first: the seed of the first pair; a change that was accepted is run again on seeds that had no say in it.
    """

    command: str
    change: str
    metric: str
    arguments: str = "argparse"
    out: Path | None = None
    timeout: float | None = None
    diverged: float | None = None
    first: int = 0

    def study(self) -> Study:
        """Return the study of two arms.

        Raises:
            StudyError: naming the command, change or form of arguments that is invalid.
        """
        from headwise.lab.experiments.arm import read_arm
        from headwise.lab.experiments.script import check_form, name_of, script_of, source_of
        from headwise.lab.experiments.study import Study
        from headwise.lab.experiments.task_source import build_task

        if not self.change.strip():
            raise StudyError("--script needs --change, the candidate: changed arguments (lr=3e-4), or a method.")
        check_form(self.arguments)
        source, name = source_of(self.command), name_of(self.command)
        task = build_task(script_of((self.metric,)), {"script": self.command, "arguments": self.arguments})
        text = f"{BASELINE} | {self.change}" if re.match(r"\+{0,2}[A-Za-z_][\w./-]*\s*=", self.change) else self.change
        candidate = read_arm(text, task).text
        if candidate == BASELINE:
            raise StudyError(f"--change {self.change!r} changes nothing. Write name=value, such as lr=3e-4.")
        place = f"{source.resolve()}:{name}" if source is not None else f"headwise.script:{name}"
        return Study(
            name=name,
            title=name,
            question=task.question,
            task=task,
            task_place=place,
            methods=(candidate,),
            seeds=2,
            device="its own",
        )

    @property
    def folder(self) -> Path:
        """Return the folder of the runs."""
        from headwise.lab.experiments.script import name_of

        return (self.out or Path("results") / "judge" / name_of(self.command)).resolve()

    def check(self) -> None:
        """Raise StudyError if the script, the change or the form of arguments is invalid."""
        self.study()

    def pairs(self) -> Iterator[PairOfRuns]:
        """Run its pairs; see `pairs_of`."""
        return pairs_of(self)


def pairs_of(script: JudgedScript) -> Iterator[PairOfRuns]:
    """Run a pair for one seed after another; which arm runs first is drawn from the seed. Kept runs are reused.

    Raises:
        StudyError: if a run fails or diverges, or the script ignores its seed.
    """
    from headwise.lab.experiments.configuration import derive

    study = script.study()
    candidate = next(arm for arm in study.arms if arm != BASELINE)
    known: dict[tuple[float, float], int] = {}
    for seed in itertools.count(script.first):
        order = (BASELINE, candidate) if derive(seed, "first of a pair") & 1 else (candidate, BASELINE)
        runs = {arm: _run(script, study, arm, seed) for arm in order}
        figures = {arm: _figure(study, run, script.diverged) for arm, run in runs.items()}
        evidence = runs[BASELINE].evidence, runs[candidate].evidence
        alike = all(evidence[0][name] == evidence[1][name] for name in evidence[0].keys() & evidence[1].keys())
        named = {"candidate": candidate, "baseline": BASELINE}
        diverged = tuple(name for name, arm in named.items() if runs[arm].metrics.get(study.task.primary()) is None)
        pair = PairOfRuns(seed, figures[candidate], figures[BASELINE], alike, diverged)
        # pairs in which both diverged are alike, whatever their seeds
        same = known.setdefault((pair.candidate, pair.baseline), seed) if len(diverged) < len(runs) else seed
        if same != seed:
            raise StudyError(
                f"seeds {same} and {seed} give the same figures in both arms: the script ignores its seed. Seed "
                "everything in it with headwise.run().seed."
            )
        yield pair


def _run(script: JudgedScript, study: Study, arm: str, seed: int) -> RunResult:
    from headwise.lab.training.job import ScriptOrder
    from headwise.lab.training.script_process import carry_script

    configuration = study.configuration(arm, seed)
    order = ScriptOrder(
        configuration=configuration,
        folder=script.folder / "runs" / configuration.identity,
        task_place=study.task_place,
        started_in=Path.cwd(),
        primary=study.task.primary(),
        outcomes=tuple(metric.name for metric in study.task.metrics),
        timeout=script.timeout,
    )
    try:
        return carry_script(order, _tell)
    except StudyError as error:
        raise StudyError(f"{arm}, seed {seed}: {error}{getattr(error, 'printed', '')}") from error


def _tell(event: dict[str, object]) -> None:
    if event.get("event") == "note":
        print(event["text"], file=sys.stderr)


def _figure(study: Study, run: RunResult, diverged: float | None) -> float:
    figure = run.metrics.get(study.task.primary())
    if figure is None and diverged is None:
        raise StudyError(
            f"{run.arm}, seed {run.seed}, diverged and has no {study.task.primary()}. Pass --diverged with the metric "
            "of a model that has learned nothing, or judge the share of runs that diverge."
        )
    return diverged if figure is None else figure  # type: ignore[return-value]
