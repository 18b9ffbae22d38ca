"""Stand-ins for wandb, mlflow, trackio and loggers of Lightning, as strict as they are in what is asked of them.

`test_watch_loggers.py` holds their signatures against the libraries' own where these are installed; they were checked
against wandb 0.31, mlflow 3.17, trackio 0.43 and lightning 2.6.
"""

import re
import types

import numpy

# what MLflow takes as the name of a metric
NAME = re.compile(r"[/\w.\- :]+")


class Picture:
    """Take what the Image of wandb and trackio take: an array (height, width, 3) of bytes."""

    def __init__(self, value):
        assert isinstance(value, numpy.ndarray) and value.dtype == numpy.uint8 and value.shape[2] == 3
        self.value = value


class Trackio(types.ModuleType):
    """Take rows at steps of one's own."""

    Image = Picture

    def __init__(self):
        super().__init__("trackio")
        self.rows, self.alerts = [], []

    def log(self, metrics, step=None):
        self.rows.append((step, metrics))

    def alert(self, title, text=None, level=None, webhook_url=None):
        self.alerts.append((title, text))


class Mlflow(types.ModuleType):
    """Take metrics, images by key and step, and texts as artifacts; refuse what MLflow refuses."""

    def __init__(self):
        super().__init__("mlflow")
        self.metrics, self.images, self.texts = {}, {}, {}
        self.entities = types.SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, timestamp, step))

    def log_metrics(self, metrics, step=None, synchronous=None):
        assert all(NAME.fullmatch(name) and isinstance(value, float) for name, value in metrics.items())
        self.metrics[step] = metrics

    def log_image(self, image, artifact_file=None, key=None, step=None):
        assert artifact_file is None and NAME.fullmatch(key) and Picture(image)
        self.images[step, key] = image

    def log_text(self, text, artifact_file):
        self.texts[artifact_file] = text


class MlflowClient:
    """Take what is logged to a run by its identity."""

    __module__ = "mlflow.tracking.client"

    def __init__(self):
        self.batches, self.images, self.texts = [], {}, {}

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        self.batches.append((run_id, metrics))

    def log_image(self, run_id, image, artifact_file=None, key=None, step=None):
        self.images[run_id, step, key] = Picture(image)

    def log_text(self, run_id, text, artifact_file):
        self.texts[run_id, artifact_file] = text


class LightningLogger:
    """Take metrics as the loggers of Lightning do, with what is behind as `experiment`."""

    def __init__(self, experiment=None, run_id=None):
        self.seen, self.experiment, self.run_id = [], experiment, run_id

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, metrics))
