"""The loggers that people use get layer means, heat maps and alerts, each in its own way and at the right step."""

import importlib.util
import inspect
import math
import sys
import types
from importlib import import_module

import pytest
import torch
from watch.logger_libraries import LightningLogger, Mlflow, MlflowClient, Picture, Trackio
from watch.test_watch_logs import WandbRun
from watch.watched_model import figure, read, sharpen, watched

import headwise
from headwise.health.watching.logs import TensorBoard, logs_of
from headwise.health.watching.pictures import ABSENT, COLOURS, GAP, NOT_FINITE, SQUARE, heat_map, shown, squares

LAYER, MAP = "health/entropy_share/blocks.0.attn", "health/map/entropy_share"


def trained(log, **settings):
    """Read a model well, and once more with an alert; give the watch."""
    model, watch = watched(log=log, **settings)
    read(model, watch)
    sharpen(model, 300)
    read(model, watch)
    assert watch.alerts()
    return watch


def mean_of(watch, step, site="blocks.0.attn", statistic="entropy_share"):
    found = [r["value"] for r in watch.records() if (r["site"], r["step"], r["statistic"]) == (site, step, statistic)]
    assert len(found) == 4
    return sum(found) / len(found)


def test_a_reading_is_shown_as_layer_means_with_the_ends_of_its_map():
    records = [figure("entropy_share", 0.1 * head, head=head) for head in range(4)] + [
        figure("token_cosine", 0.5, head=None)
    ]
    seen = shown(records)
    site = "blocks.3.attn"
    assert seen.figures[f"health/entropy_share/{site}"] == pytest.approx(0.15)
    assert (seen.figures["health/entropy_share/lowest"], seen.figures["health/entropy_share/highest"]) == (
        0.0,
        pytest.approx(0.3),
    )
    assert seen.figures[f"health/token_cosine/{site}"] == 0.5
    assert set(seen.maps) == {MAP} and not any("head" in name.rpartition("/")[2] for name in seen.figures)
    assert shown(records, heads=True).figures[f"health/entropy_share/{site}/head3"] == pytest.approx(0.3)
    broken = shown([*records, figure("entropy_share", math.nan, head=4)]).figures
    assert math.isnan(broken[f"health/entropy_share/{site}"]) and broken[
        "health/entropy_share/highest"
    ] == pytest.approx(0.3)


def test_a_heat_map_has_a_row_for_each_layer_and_a_column_for_each_head():
    records = [
        figure("a", value, head=head, site="x") | {"depth": 1} for head, value in enumerate((0.0, 1.0, math.inf))
    ]
    records.append(figure("a", 0.5, head=0, site="w") | {"depth": 0})
    picture, size = squares(records), SQUARE + GAP
    assert picture.dtype == torch.uint8 and picture.shape == (2 * size - GAP, 3 * size - GAP, 3)
    corners = [[tuple(picture[row * size, column * size].tolist()) for column in range(3)] for row in range(2)]
    assert corners == [[COLOURS[2], ABSENT, ABSENT], [COLOURS[0], COLOURS[-1], NOT_FINITE]]


def test_tensorboard_shows_layer_means_heat_maps_and_alerts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "theirs")) as theirs:
        watch = trained([TensorBoard(tmp_path / "ours"), theirs])
        watch.remove()
        theirs.add_scalar("loss", 1.0, 2)
    for name in ("ours", "theirs"):
        seen = EventAccumulator(str(tmp_path / name))
        seen.Reload()
        assert [(e.step, e.value) for e in seen.Scalars(LAYER)] == [
            (s, pytest.approx(mean_of(watch, s))) for s in (0, 1)
        ]
        picture = seen.Images(MAP)[1]
        painted = heat_map([r for r in watch.records() if (r["statistic"], r["step"]) == ("entropy_share", 1)])
        assert (picture.step, picture.height, picture.width) == (1, *painted.shape[:2])
        (alert,) = seen.Tensors("health/logit_growth/text_summary")
        assert alert.step == 1 and b"QKNorm" in alert.tensor_proto.string_val[0]


def test_wandb_gets_images_and_alerts_in_the_row_it_is_at(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Image=Picture))
    run, told = WandbRun(), []
    run.alert = lambda title, text, level=None, wait_duration=None: told.append((title, text))
    watch = trained(run)
    run.finish()
    (row,) = run.rows
    assert (
        row["health/step"] == 1.0 and isinstance(row[MAP], Picture) and row[LAYER] == pytest.approx(mean_of(watch, 1))
    )
    title, text = next(one for one in told if "logit_growth" in one[0])
    assert title == "attention: logit_growth, step 1" and "QKNorm" in text


def test_trackio_gets_rows_images_and_alerts_at_the_step_of_the_reading(monkeypatch):
    module = Trackio()
    monkeypatch.setitem(sys.modules, "trackio", module)
    watch = trained(module)
    assert {step for step, _ in module.rows} == {0, 1}
    assert any(isinstance(row.get(MAP), Picture) for _, row in module.rows)
    assert module.rows[0][1][LAYER] == pytest.approx(mean_of(watch, 0)) and any(
        "logit_growth" in title for title, _ in module.alerts
    )


def test_mlflow_gets_metrics_images_and_texts_by_its_module_or_by_a_client_and_a_run(monkeypatch):
    module, client = Mlflow(), MlflowClient()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with pytest.raises(TypeError, match=r"does not identify a run: pass log=headwise.MLflowRun\(client, run_id\)"):
        watched(log=client)
    watch = trained([module, headwise.MLflowRun(client, "r1"), LightningLogger(client, "r2")])
    assert module.metrics[1][LAYER] == pytest.approx(mean_of(watch, 1)) and (1, MAP) in module.images
    assert any("QKNorm" in text for name, text in module.texts.items() if name == "health/step_1_logit_growth.txt")
    assert {run for run, _ in client.batches} == {"r1"}
    assert (LAYER, module.metrics[1][LAYER], 1) in [(key, value, step) for key, value, _, step in client.batches[1][1]]
    assert {("r1", 1, MAP), ("r2", 1, MAP)} <= set(client.images) and (
        "r2",
        "health/step_1_logit_growth.txt",
    ) in client.texts


def test_loggers_of_lightning_get_metrics_and_what_is_behind_them_the_rest(tmp_path):
    plain = LightningLogger(object())
    watch = trained(plain, log_heads=True)
    assert [step for step, _ in plain.seen] == [0, 1, 1]
    assert plain.seen[0][1][LAYER] == pytest.approx(mean_of(watch, 0)) and f"{LAYER}/head3" in plain.seen[0][1]
    assert "QKNorm" in plain.seen[2][1]["health/alert/logit_growth"]


def test_an_object_of_ones_own_gets_alerts_as_texts():
    class Run:
        def __init__(self):
            self.seen = []

        def log(self, data, step=None):
            self.seen.append((step, data))

    run = Run()
    trained(run)
    assert [step for step, _ in run.seen] == [0, 1, 1] and run.seen[1][1]["health/alerts"] >= 1.0
    assert "QKNorm" in run.seen[2][1]["health/alert/logit_growth"]


def test_a_log_of_one_figure_by_its_name_is_refused_with_the_remedy():
    class LightningModule:
        def log(self, name, value, prog_bar=False):
            raise AssertionError

    with pytest.raises(TypeError, match=r"LightningModule.log\(name, value\) takes one figure .*log=trainer.loggers"):
        watched(log=LightningModule())


def test_pictures_that_cannot_be_made_keep_no_alert_back():
    class Broken(Trackio):
        def Image(self, value):
            raise ImportError("no pillow")

    module = Broken()
    sys.modules["trackio"] = module
    try:
        with pytest.warns(RuntimeWarning, match="no pillow"):
            trained(module)
    finally:
        del sys.modules["trackio"]
    assert len(module.rows) >= 2 and module.alerts


def parameters(function):
    return list(inspect.signature(function).parameters)


LIBRARIES = {
    "wandb": lambda real: [(real.Image.__init__, ["data_or_path"])],
    "trackio": lambda real: [(real.log, parameters(Trackio.log)[1:]), (real.alert, parameters(Trackio.alert)[1:])],
    "mlflow": lambda real: [
        (getattr(kind, name), parameters(getattr(ours, name))[1:])
        for kind, ours, names in (
            (real, Mlflow, ("log_metrics", "log_image", "log_text")),
            (real.MlflowClient, MlflowClient, ("log_batch", "log_image", "log_text")),
        )
        for name in names
    ],
    "tensorboard": lambda real: [
        (import_module("torch.utils.tensorboard").SummaryWriter.add_image, ["tag", "img_tensor", "global_step"])
    ],
}


# each where it is installed; tensorboard always is
@pytest.mark.parametrize("name", [name for name in LIBRARIES if importlib.util.find_spec(name)])
def test_the_stand_ins_have_the_signatures_of_the_libraries(name):

    real = __import__(name)
    for function, ours in LIBRARIES[name](real):
        assert set(ours) <= set(parameters(function)), function
    assert logs_of([]) == []
