"""What a task derives itself from the outcomes of all evaluations and phases."""

from __future__ import annotations

from headwise.experiments.task import Task
from headwise.files.errors import StudyError
from headwise.training.faults import at_fault


def summarized(task: Task, outcomes: dict[str, float]) -> dict[str, float]:
    """Return the outcomes of the task's `summary`.

    Raises StudyError where it raises, and for a name that is no outcome of a declared metric.
    """
    owner, names = type(task).__name__, [metric.name for metric in task.all_metrics()]
    try:
        own = {name: float(value) for name, value in task.summary(dict(outcomes)).items()}
    except Exception as error:
        raise StudyError(
            f"{owner}.summary could not derive its outcomes from {', '.join(outcomes) or 'none'}: "
            f"{at_fault(task, error)}"
        ) from error
    foreign = [name for name in own if name.rpartition("/")[2] not in names or "/" not in name]
    if foreign:
        raise StudyError(
            f"{owner}.summary gave {foreign[0]!r}; name it <evaluation>/<metric> with one of {', '.join(names)}."
        )
    return own
