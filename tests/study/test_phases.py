"""Phases: parts of a run that share weights, curves and the checkpoint, and go on to the same bits."""

import random
import re
import time

import pytest
import torch
from grids import part_of_grid
from small_studies import all_numbers, carry, numbers, orders, study_of
from test_core import CORE
from test_resume import in_a_child, weights

from headwise.lab.training.checkpoint import load_checkpoint
from headwise.lab.training.execution import execute
from headwise_verdict.files.errors import StudyError

ARM = "DropHead(p=0.3) + NeuTRENO(strength=0.4)"
LEARNING = 'SigmaReparam(init="current")'


def adapt(methods=(), seeds=1, **settings):
    return study_of(f"{CORE}:Adapt", methods, seeds, **settings)


def streams(out):
    return {result["arm"]: lines for lines, result in all_numbers(out).values()}


def losses(lines, phase):
    return [line["metrics"]["train/loss"] for line in lines if line["phase"] == phase]


def model_of(out):
    (folder,) = (out / "runs").iterdir()
    tensors = load_checkpoint(folder, pytest.fail).tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}, folder


def test_methods_switched_on_in_the_second_phase_leave_the_first_as_it_is(tmp_path):
    carry(adapt((ARM,)), tmp_path)
    found = streams(tmp_path)
    assert [(line["phase"], line["epoch"], line["step"]) for line in found[ARM]] == [
        ("pretrain", 1, 3),
        ("pretrain", 2, 6),
        ("adapt", 3, 9),
        ("adapt", 4, 12),
        ("adapt", 5, 15),
    ]
    assert losses(found[ARM], "pretrain") == losses(found["baseline"], "pretrain")
    assert abs(losses(found[ARM], "adapt")[0] - losses(found["baseline"], "adapt")[0]) > 1e-4


def test_a_plan_has_the_layers_of_a_later_phase_and_the_time_of_all_phases(tmp_path):
    from small_studies import Silent

    listener = Silent()
    assert carry(adapt((ARM,)), tmp_path, listener=listener, plan_only=True) == []
    said = " ".join(" ".join(listener.said).split())
    assert f"{ARM}: 2 of 2 layers" in said and "0 layers" not in said
    assert re.search(r"time: about [\d.]+ s of training, each phase timed as the first, without", said), said


@pytest.mark.grid
@pytest.mark.parametrize("way", ["on", "off", "both"])
def test_a_run_of_two_phases_killed_anywhere_ends_with_the_same_bits(tmp_path, way):
    study = adapt((f"{ARM} + {LEARNING}",), way=way)
    order = orders(study, tmp_path / "whole")[1]
    begin = time.perf_counter()
    in_a_child(order)
    whole, kills, chance = time.perf_counter() - begin, 0, random.Random(way)
    for attempt in range(100):
        broken = orders(study, tmp_path / f"broken {attempt}")[1]
        while kills < 8 and in_a_child(broken, chance.uniform(0.1, 0.8 * whole)):
            kills += 1
        in_a_child(broken)
        assert numbers(broken.folder) == numbers(order.folder)
        assert all(torch.equal(tensor, weights(broken)[name]) for name, tensor in weights(order).items())
        if kills == 8:
            break
    assert kills == 8


# in the first phase, between both, in the second
@pytest.mark.parametrize("stop", part_of_grid(range(1, 7), (2, 3, 5)))
def test_a_run_of_two_phases_stopped_at_each_checkpoint_ends_with_the_same_bits(tmp_path, monkeypatch, stop):
    from test_resume import stopped_after

    study = adapt((f"{ARM} + {LEARNING}",), way="both")
    study = study.model_copy(update={"task": study.task.model_copy(update={"loss_goal": 0.0})})
    # two epochs, the start of the second phase, three epochs
    order, whole = orders(study, tmp_path / "a")[1], orders(study, tmp_path / "b")[1]
    stopped_after(order, stop, monkeypatch)
    for one in (order, whole):
        execute(one, lambda event: None)
    assert numbers(order.folder) == numbers(whole.folder)
    assert all(torch.equal(tensor, weights(order)[name]) for name, tensor in weights(whole).items())
    # never reached: one step more than the nine of the second phase
    assert numbers(order.folder)[1]["metrics"]["training/steps_to_goal"] == 10


def test_the_study_says_how_long_each_phase_is(tmp_path):
    import json

    carry(adapt(way="both"), tmp_path)
    settings = json.loads((tmp_path / "study.json").read_text())["settings"]
    assert settings["phases"] == "pretrain 2 epochs, then adapt 3 epochs" and "epochs" not in settings
    (found,) = streams(tmp_path).values()
    assert len(found) == 5
    carry(adapt(way="alone"), tmp_path / "alone")
    settings = json.loads((tmp_path / "alone" / "study.json").read_text())["settings"]
    assert settings["epochs"] == 2 and "phases" not in settings


def test_a_phase_starts_from_the_folder_of_a_run_and_knows_its_content(tmp_path):
    carry(adapt(way="alone"), tmp_path / "first")
    _, folder = model_of(tmp_path / "first")
    study = adapt(way="folder", start=str(folder))
    carry(study, tmp_path / "second")
    carry(adapt(way="folder", start="fresh"), tmp_path / "fresh")
    (second,), (fresh,) = streams(tmp_path / "second").values(), streams(tmp_path / "fresh").values()
    assert losses(second, "adapt")[0] < losses(fresh, "adapt")[0]
    identity = study.configuration("baseline", 0).identity
    content = bytearray((folder / "checkpoint.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "checkpoint.safetensors").write_bytes(bytes(content))
    assert adapt(way="folder", start=str(folder)).configuration("baseline", 0).identity != identity


def test_a_phase_carries_and_learns_the_weights_it_names(tmp_path):
    carry(adapt(way="alone"), tmp_path / "first")
    first, folder = model_of(tmp_path / "first")
    carry(adapt(way="head", start=str(folder), epochs=1, learning_rate=1e-9), tmp_path / "head")
    head, _ = model_of(tmp_path / "head")
    near = {name: bool((first[name] - tensor).abs().max() < 1e-6) for name, tensor in head.items()}
    assert all(near[name] == ("1.head." in name) for name in near if head[name].dim() == 2)
    # what is not learned has no state of an optimizer
    moments = load_checkpoint(model_of(tmp_path / "head")[1], pytest.fail).tensors
    learned = [tensor for name, tensor in moments.items() if name.endswith("exp_avg")]
    assert {tuple(tensor.shape) for tensor in learned} == {(4, 8), (4,)}


def test_a_foreign_checkpoint_is_refused_by_name_before_any_step(tmp_path):
    from safetensors.torch import save_file

    save_file({"1.head.weight": torch.zeros(5, 8), "other": torch.zeros(2)}, tmp_path / "model.safetensors")
    for way, message in {
        "folder": r"phase 'adapt' cannot start from .*it has no 1\.\w+.*and \d+ more",
        "head": r"it has no 1\.head\.bias; its 1\.head\.weight is \(5, 8\), the model's \(4, 8\)\. Name the weights",
    }.items():
        (order,) = orders(adapt(way=way, start=str(tmp_path)), tmp_path / way)
        with pytest.raises(StudyError, match=message):
            execute(order, lambda event: None)
        assert not (order.folder / "metrics.jsonl").exists()


def test_methods_that_go_are_folded_into_the_weights_they_leave(tmp_path):
    carry(adapt((LEARNING,), way="off", epochs=2), tmp_path / "off")
    found = streams(tmp_path / "off")[LEARNING]
    before, after = losses(found, "pretrain")[-1], losses(found, "adapt")[0]
    # what was learned with the method goes on without it
    assert after == pytest.approx(before, abs=0.1)
    result = next(r for _, r in all_numbers(tmp_path / "off").values() if r["arm"] != "baseline")
    assert result["metrics"]["cost/parameters"] == sum(p.numel() for p in adapt().task.model().parameters())
