"""Helpers for the tests of studies: build a tiny study, run it in this process, and compare results."""

import json
from pathlib import Path

from headwise.lab.comparing.compare import compare
from headwise.lab.comparing.comparison import Comparison
from headwise.lab.engines.local import HereEngine
from headwise.lab.experiments.study import Study
from headwise.lab.experiments.task_source import load_task

PLACE = str(Path(__file__).with_name("tiny_task.py"))
ENVIRONMENT = {"versions": {}, "commit": None, "hardware": {}}
# Measurements of time, which differ between runs.
MEASURED = ("cost/seconds_per_step", "cost/inference_seconds_per_example", "seconds", "apart")
# Circumstances of a run that change no number, and the digests, because the metric stream contains seconds.
CIRCUMSTANCES = (*ENVIRONMENT, "watched", "cost_is_indicative", "digests", "digest")


class Silent:
    """Listener that records a study's messages, plans and finished runs without printing."""

    def __init__(self):
        self.said, self.plans, self.ends = [], [], []

    def plan(self, total, finished, after=0):
        self.plans.append((total, finished))

    def hear(self, order, event):
        if event["event"] == "done":
            self.ends.append(order)
        elif event["event"] == "note":
            self.say(event["text"])

    def say(self, text):
        self.said.append(text)


def tiny_study(task="Tiny", methods=(), seeds=1, **settings):
    """Return a study of the tiny task; the settings are those of the task."""
    kind = load_task(f"{PLACE}:{task}")
    return Study(
        name="tiny",
        title="Tiny",
        question="Does it run?",
        task=kind(**settings),
        task_place=f"{PLACE}:{task}",
        methods=methods,
        seeds=seeds,
    )


def study_of(place, methods=(), seeds=1, **settings):
    """Return a study of any task; the settings are those of the task."""
    kind = load_task(place)
    return Study(
        name=kind.__name__,
        title=kind.__name__,
        question="Does it run?",
        task=kind(**settings),
        task_place=place,
        methods=methods,
        seeds=seeds,
    )


def carry(study, out, engine=None, listener=None, **options):
    """Run a study, in this process unless an engine is passed, and return its results as dicts."""
    engine = engine or HereEngine()
    comparison = Comparison(study, Path(out), engine, listener or Silent(), environment=ENVIRONMENT, **options)
    return [result.model_dump() for result in compare(comparison)]


def orders(study, out, **options):
    """Return the orders of a study's final runs."""
    comparison = Comparison(study, Path(out), HereEngine(), None, environment=ENVIRONMENT, **options)
    return [comparison.order(configuration) for configuration in study.configurations()]


def numbers(folder):
    """Return the metric stream and the result of a run, without measurements of time."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((Path(folder) / "result.json").read_text())
    # With several processes, peak memory depends on when a thread of the process group frees its memory.
    apart = (*MEASURED, "cost/peak_memory_bytes") if result["config"].get("processes", 1) > 1 else MEASURED
    metrics = {k: v for k, v in result["metrics"].items() if k not in apart}
    computed = {k: v for k, v in result.items() if k not in CIRCUMSTANCES} | {"metrics": metrics}
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines], computed


def all_numbers(out):
    """Return the numbers of every run of a study, by hash."""
    return {folder.name: numbers(folder) for folder in sorted((Path(out) / "runs").iterdir())}
