import json
import math
import subprocess
import sys
import warnings

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise.watching.alerts import HealthAlert, HealthWarning, Judge, Thresholds
from headwise.watching.logs import JsonLines, TensorBoard

VECTORS = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))
NAMES = ["entropy_share", "max_logit", "token_cosine", "output_norm"]


def figure(statistic, value, step=0, head=2, site="blocks.3.attn"):
    return {"site": site, "depth": 3, "head": head, "step": step, "statistic": statistic, "value": value}


def watched(**settings):
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, **{"every": 1, "on_alert": None, "statistics": NAMES, **settings})
    return model, watch


def sharpen(model, factor):
    """Makes the keys of every head large, as a training that runs away does."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[32:64] *= factor
            block.attn.qkv.bias[32:64] *= factor


def read(model, watch):
    model(VECTORS)
    watch.step()


def test_records_are_dicts_of_site_head_step_statistic_and_value():
    model, watch = watched(every=2)
    for _ in range(3):
        read(model, watch)
    assert {r["step"] for r in watch.records()} == {0, 2}
    first = watch.records()[0]
    assert first == {
        "site": "blocks.0.attn", "depth": 0, "head": 0, "step": 0, "statistic": "entropy_share", "value": first["value"],
    }  # fmt: skip
    assert isinstance(first["value"], float)
    assert {r["head"] for r in watch.records() if r["statistic"] == "token_cosine"} == {None}


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
        RuntimeWarning, match=r"JsonLines\('/dev/full'\) could not be written at step 0 \(OSError.*the training goes on"
    ):
        read(model, watch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        read(model, watch)
    assert not told
    assert {r["step"] for r in watch.records()} == {0, 1}


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
    model, watch = watched(log=run, every=2)
    for _ in range(3):
        read(model, watch)
    assert [step for step, _ in run.seen] == [0, 2]
    record = watch.records()[1]
    assert run.seen[0][1]["health/entropy_share/blocks.0.attn/head1"] == record["value"]
    assert "health/token_cosine/blocks.1.attn" in run.seen[0][1]


def test_tensorboard_gets_a_scalar_for_each_record(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model, watch = watched(log=TensorBoard(tmp_path))
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


def test_entropy_collapse_is_told_with_head_steps_and_remedy():
    judge = Judge(Thresholds())
    assert judge.alerts([figure("entropy_share", 0.5, step=60)]) == []
    (alert,) = judge.alerts([figure("entropy_share", 0.01, step=100)])
    assert alert["sentence"] == "entropy of blocks.3.attn head 2 fell below 5 % of its range (to 0.01) in 40 steps"
    assert "SigmaReparam or QKNorm bound it" in alert["remedy"]
    assert "2303.06296" in alert["source"]
    assert (alert["alert"], alert["head"], alert["step"], alert["threshold"]) == ("entropy_collapse", 2, 100, 0.05)


def test_an_alert_is_told_once_until_the_figure_recovers():
    judge = Judge(Thresholds())
    values = [0.5, 0.01, 0.01, 0.5, 0.01]
    told = [len(judge.alerts([figure("entropy_share", value, step=step)])) for step, value in enumerate(values)]
    assert told == [0, 1, 0, 0, 1]


def test_a_head_that_a_checkpoint_brings_with_low_entropy_is_no_collapse():
    assert Judge(Thresholds()).alerts([figure("entropy_share", 0.01)]) == []


@pytest.mark.parametrize(
    ("alert", "well", "ill"),
    [
        ("logit_growth", [figure("max_logit", 99.0)], [figure("max_logit", 101.0)]),
        ("logit_growth", [figure("max_logit", 99.0)], [figure("max_logit", math.nan)]),
        ("over_smoothing", [figure("token_cosine", 0.94, head=None)], [figure("token_cosine", 0.96, head=None)]),
        ("rank_collapse", [figure("high_frequency", 0.06, head=None)], [figure("high_frequency", 0.04, head=None)]),
        ("low_rank", [figure("effective_rank_vo", 2.5)], [figure("effective_rank_vo", 1.5)]),
        (
            "dead_head",
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 1.2, 0.02))],
            [figure("output_norm", v, head=h) for h, v in enumerate((1.0, 1.2, 0.005))],
        ),
        ("redundancy", [figure("head_redundancy", 0.94)], [figure("head_redundancy", 0.96)]),
        (
            "redundancy",
            [figure("head_redundancy", 0.99), figure("entropy_share", 0.95)],
            [figure("head_redundancy", 0.99), figure("entropy_share", 0.8)],
        ),
    ],
)
def test_every_alert_is_raised_beyond_its_limit_and_not_before(alert, well, ill):
    judge = Judge(Thresholds())
    assert judge.alerts(well) == []
    (found,) = judge.alerts(ill)
    assert found["alert"] == alert
    assert found["remedy"] and "arXiv" in found["source"] and "blocks.3.attn" in found["sentence"]


def test_thresholds_are_fields_that_switch_off_and_are_checked():
    assert Judge(Thresholds(max_logit=None)).alerts([figure("max_logit", 1e9)]) == []
    assert len(Judge(Thresholds(max_logit=5)).alerts([figure("max_logit", 6.0)])) == 1
    with pytest.raises(ValueError, match=r"Thresholds.max_logit must be a positive number or None, got -1"):
        Thresholds(max_logit=-1)


def test_alerts_warn_raise_or_call_as_asked():
    model, watch = watched(on_alert="warn")
    sharpen(model, 300)
    with pytest.warns(
        HealthWarning, match=r"largest logit of blocks.0.attn head \d rose above 100 .*, and \d+ more like it; QKNorm"
    ):
        read(model, watch)
    model, watch = watched(on_alert="raise")
    sharpen(model, 300)
    model(VECTORS)
    with pytest.raises(HealthAlert, match=r"rose above 100") as caught:
        watch.step()
    assert caught.value.alerts == watch.alerts()
    assert watch.records()
    seen = []
    model, watch = watched(on_alert=seen.append)
    sharpen(model, 300)
    read(model, watch)
    assert seen == watch.alerts()


def test_a_training_that_diverged_is_told_of_and_goes_on(tmp_path):
    model, watch = watched(statistics=None, log=[JsonLines(tmp_path / "a.jsonl"), TensorBoard(tmp_path / "b")])
    read(model, watch)
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.fill_(torch.nan)
    read(model, watch)
    assert {a["alert"] for a in watch.alerts()} >= {"logit_growth", "entropy_collapse"}
    assert watch.reasons()["blocks.0.attn"]["spectral_norm_qk"] == "the weights are not finite"
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])["value"] is None


def test_every_remedy_names_methods_that_exist():
    import re

    import headwise.methods  # noqa: F401
    from headwise.method import REGISTRY
    from headwise.watching.alerts import REMEDIES

    named = {word for remedy in REMEDIES.values() for word in re.findall(r"\b[A-Z][A-Za-z]+\b", remedy.text)}
    assert len(named & set(REGISTRY)) > 5
    assert {word for word in named if sum(map(str.isupper, word)) > 1} <= set(REGISTRY)


def test_the_trainer_callback_reads_optimizer_steps(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = fresh(HOSTS["llama"])
    data = [{"input_ids": torch.arange(9) + i, "labels": torch.arange(9) + i} for i in range(16)]
    callback = headwise.WatchCallback(
        every=2, on_alert=None, log=JsonLines(tmp_path / "a.jsonl"), statistics=["attention_entropy"]
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[callback]).train()
    assert {r["step"] for r in callback.watch.records()} == {0, 2}
    assert callback.watch.removed
    assert (tmp_path / "a.jsonl").exists()
    assert len(callback.watch.records()) == 2 * 4 * model.config.num_hidden_layers


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
