import json
import math
import resource
import subprocess
import sys
import warnings

import pytest
import torch
from small_models import HOSTS, fresh
from watch.watched_model import VECTORS, figure, read, sharpen, watched

import headwise
from headwise.health.watching.logs import JsonLines, TensorBoard


def test_json_lines_hold_every_record_and_read_back(tmp_path):
    path = tmp_path / "made" / "health.jsonl"
    model, watch = watched(log=JsonLines(path))
    read(model, watch)
    sharpen(model, 300)
    read(model, watch)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r for r in lines if "alert" not in r] == watch.records()
    assert [r for r in lines if "alert" in r] == watch.alerts()
    assert watch.alerts()


def test_a_value_that_is_no_number_is_null_in_json(tmp_path):
    JsonLines(tmp_path / "a.jsonl").write([figure("max_logit", math.nan), figure("max_logit", math.inf)], 0)
    assert [json.loads(line)["value"] for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [None, None]


def test_a_log_that_cannot_be_written_warns_once_and_the_training_goes_on():
    model, watch = watched(log=JsonLines("/dev/full"))
    with pytest.warns(
        RuntimeWarning,
        match=r"JsonLines\('/dev/full'\) could not be written at step 0 \(OSError.*the training " r"continues",
    ):
        read(model, watch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read(model, watch)
    assert not told
    assert {r["step"] for r in watch.records()} == {0, 1}


def test_a_reading_that_found_the_disk_full_leaves_whole_lines(tmp_path):
    log = JsonLines(tmp_path / "a.jsonl")
    log.write([figure("max_logit", 1.0)], 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the size of files fails as a full disk does: a part is written, the rest is refused.
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.write([figure("max_logit", 2.0)], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write([figure("max_logit", 3.0)], 2)
    assert [json.loads(line)["value"] for line in log.path.read_text().splitlines()] == [1.0, 3.0]


def test_a_line_that_a_killed_run_left_open_is_not_glued_to_the_next(tmp_path):
    log = JsonLines(tmp_path / "a.jsonl")
    log.path.write_text('{"site": "blo')
    log.write([figure("max_logit", 3.0)], 2)
    assert json.loads(log.path.read_text().splitlines()[1])["value"] == 3.0


@pytest.mark.parametrize("shape", ["keyword", "positional", "any"])
def test_a_log_gets_its_step_by_name_where_it_has_that_name(shape):
    seen = []

    class Run:
        if shape == "keyword":

            def log(self, data, commit=None, *, step=None):
                seen.append((commit, step))

        elif shape == "positional":

            def log(self, data, at):
                seen.append((None, at))

        else:

            def log(self, data, **others):
                seen.append((None, others["step"]))

    model, watch = watched(log=Run())
    read(model, watch)
    read(model, watch)
    assert seen == [(None, 0), (None, 1)]


class WandbRun:
    """Keeps rows as a wandb run does: what is older than its step is dropped, and a call without a step ends the
    row."""

    __module__ = "wandb.sdk.wandb_run"

    def __init__(self):
        self.step, self.rows, self.open, self.dropped = 0, [], {}, []

    def log(self, data, step=None, commit=None):
        if step is not None and step < self.step:
            self.dropped.append(data)
            return
        if step is not None and step > self.step:
            self._end()
            self.step = step
        self.open |= data
        if commit or (commit is None and step is None):
            self._end()
            self.step += 1

    def _end(self):
        if self.open:
            self.rows.append({"_step": self.step, **self.open})
            self.open = {}

    def finish(self):
        self._end()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_wandb_run_keeps_every_reading_and_the_axis_of_the_loop(order, numbered):
    run = WandbRun()
    model, watch = watched(log=run, every=2)

    def log(step):
        run.log({"loss": float(step)}, **({"step": step} if numbered else {}))

    for step in range(5):
        if order == "before":
            log(step)
        read(model, watch)
        if order == "after":
            log(step)
    run.finish()
    assert not run.dropped
    name = "health/token_cosine/blocks.1.attn"
    assert [row["health/step"] for row in run.rows if name in row] == [0.0, 2.0, 4.0]
    assert [(row["_step"], row["loss"]) for row in run.rows if "loss" in row] == [(s, float(s)) for s in range(5)]


def test_the_step_of_a_run_behind_a_module_or_an_accelerator_is_found():
    class Behind:
        def __init__(self, **own):
            self.__dict__.update(own)
            self.seen = []

        def log(self, values, step=None):
            if "health/step" in values:
                self.seen.append((step, values["health/step"]))

    run = WandbRun()
    run.step = 7
    targets = [Behind(run=run), Behind(trackers=[Behind(tracker=[]), Behind(tracker=run)])]
    model, watch = watched(log=targets)
    read(model, watch)
    assert [target.seen for target in targets] == [[(7, 0.0)], [(7, 0.0)]]


def test_a_log_that_fails_does_not_keep_the_others_from_writing(tmp_path):
    class Broken:
        def log(self, metrics, step):
            raise ConnectionError("the server is gone")

    model, watch = watched(log=[Broken(), JsonLines(tmp_path / "a.jsonl")])
    with pytest.warns(RuntimeWarning, match=r"Metrics\(Broken\).*ConnectionError: the server is gone"):
        read(model, watch)
    assert (tmp_path / "a.jsonl").stat().st_size > 0


def test_an_object_with_log_gets_flat_metrics():
    class Run:
        def __init__(self):
            self.seen = []

        def log(self, metrics, step):
            self.seen.append((step, metrics))

    run = Run()
    model, watch = watched(log=run, every=2, log_heads=True)
    for _ in range(3):
        read(model, watch)
    assert [step for step, _ in run.seen] == [0, 2]
    record = watch.records()[1]
    assert run.seen[0][1]["health/entropy_share/blocks.0.attn/head1"] == record["value"]
    assert "health/token_cosine/blocks.1.attn" in run.seen[0][1]


def test_tensorboard_gets_a_scalar_for_each_record(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, watch = watched(log=TensorBoard(tmp_path, heads=True))
    read(model, watch)
    sharpen(model, 300)
    read(model, watch)
    watch.remove()
    seen = EventAccumulator(str(tmp_path))
    seen.Reload()
    tag = "health/entropy_share/blocks.0.attn/head0"
    values = [event.value for event in seen.Scalars(tag)]
    expected = [
        r["value"]
        for r in watch.records()
        if (r["site"], r["head"], r["statistic"]) == ("blocks.0.attn", 0, "entropy_share")
    ]
    assert values == pytest.approx(expected)
    assert any("logit_growth" in tag for tag in seen.Tags()["tensors"])


def test_tensorboard_that_is_not_installed_names_the_extra():
    code = (
        "import sys; sys.modules['tensorboard'] = None\n"
        "import headwise\n"
        "try:\n    headwise.TensorBoard('x')\nexcept ImportError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'headwise[tensorboard]'" in found.stdout


def test_an_accelerator_takes_the_records_as_its_log(tmp_path):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process

    class Tracker(GeneralTracker):
        name = "ours"
        requires_logging_directory = False

        def __init__(self):
            super().__init__()
            self.seen = []

        @property
        def tracker(self):
            return self.seen

        @on_main_process
        def store_init_configuration(self, values):
            self.values = values

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))

    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    accelerator.init_trackers("a")
    model = fresh(HOSTS["own"])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    watch = headwise.watch(model, every=1, on_alert=None, log=accelerator, statistics=["token_cosine"])
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(VECTORS).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            watch.step()
    assert [step for step, _ in tracker.seen] == [0, 1]
    assert "health/token_cosine/blocks.0.attn" in tracker.seen[0][1]
