"""Comparing: experiments, training, engines and their command; needs the extra study.

This is the door: what files of other parts take from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headwise.files.doors import door

if TYPE_CHECKING:
    from headwise.lab.experiments.evaluation import Batch as Batch
    from headwise.lab.experiments.evaluation import Evaluation as Evaluation
    from headwise.lab.experiments.evaluation import Metric as Metric
    from headwise.lab.experiments.evaluation import Rows as Rows
    from headwise.lab.experiments.study import Scale as Scale
    from headwise.lab.experiments.study import Study as Study
    from headwise.lab.experiments.subject import Phase as Phase
    from headwise.lab.experiments.task import Task as Task
    from headwise.lab.files.data_set import DataSet as DataSet
    from headwise.lab.studies.from_python import compare as compare
    from headwise.lab.studies.vision_transformer import VisionTransformer as VisionTransformer
    from headwise.lab.training.script_run import Run as Run
    from headwise.lab.training.script_run import run as run
    from headwise.lab.training.trainer_callback import HeadwiseCallback as HeadwiseCallback

# each name with its module, imported on first use
_DOOR = {
    # train arms and seeds of a task, paired
    "compare": "studies.from_python",
    # a small model for tasks of pictures
    "VisionTransformer": "studies.vision_transformer",
    # what a training script records of its run
    "run": "training.script_run",
    # what run returns
    "Run": "training.script_run",
    # methods and watch in a transformers Trainer
    "HeadwiseCallback": "training.trainer_callback",
    # data, model and loss of an experiment
    "Task": "experiments.task",
    # a task with arms and seeds
    "Study": "experiments.study",
    # a size of a study
    "Scale": "experiments.study",
    # a part of a training
    "Phase": "experiments.subject",
    # an outcome with label, unit and direction
    "Metric": "experiments.evaluation",
    # when and on what a task is measured
    "Evaluation": "experiments.evaluation",
    # inputs and targets of a step
    "Batch": "experiments.evaluation",
    # outcomes of each example
    "Rows": "experiments.evaluation",
    # the files that a task reads
    "DataSet": "files.data_set",
}
__getattr__, __all__ = door(__name__, _DOOR)
