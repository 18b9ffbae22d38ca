"""What the first and last layer look at: kept by a run, shown by the report; streams among the statistics of heads."""

import json
from pathlib import Path

import pytest
import torch
from small_studies import carry, study_of

import headwise_verdict.reporting
from headwise.lab.training.checkpoint import load_checkpoint
from headwise_verdict.results.folder import read_study

PLACE = f"{Path(__file__).with_name('maps_task.py')}:Mapped"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    made = study_of(PLACE, methods=("NeuTRENO(strength=0.6)", "Temperature(value=0.1)"), seeds=1)
    carry(made, folder)
    return made, read_study(folder)


def model_of(made, run):
    model = made.task.model()
    tensors = load_checkpoint(run.path, pytest.fail).tensors
    model.load_state_dict({k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")})
    return model.eval()


def what_enters(model):
    """Give, by depth, what enters each attention layer in the next forward."""
    entered = {}
    for depth in (0, 1):
        block = model[1].blocks[depth]
        block.attn.register_forward_pre_hook(lambda _, x, depth=depth: entered.update({depth: x[0]}))
    return entered


def test_the_maps_are_the_softmax_of_the_trained_models_logits(study):
    made, folder = study
    images = made.task.data("test")[0][:1]
    for arm, temperature in (("baseline", 1.0), ("Temperature(value=0.1)", 0.1)):
        run = folder.runs[arm, 0]
        model = model_of(made, run)
        entered = what_enters(model)
        with torch.no_grad():
            if temperature != 1.0:
                import headwise

                headwise.regularize(model, headwise.Temperature(value=temperature))
            model(images)
            assert [layer.depth for layer in run.maps.layers] == [0, 1] and run.maps.tokens == 5
            for layer in run.maps.layers:
                attention = model[1].blocks[layer.depth].attn
                q, k, _ = attention.qkv(entered[layer.depth]).view(1, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
                weights = torch.softmax(q @ k.mT / 2 / temperature, -1)[0]
                assert torch.allclose(torch.tensor(layer.heads), weights, atol=6e-4)


def test_streams_are_outcomes_of_heads(study):
    made, folder = study
    run = folder.runs["baseline", 0]
    model, images = model_of(made, run), made.task.data("test")[0]
    entered = []
    for block in model[1].blocks:
        block.register_forward_hook(lambda _, x, y: entered.extend([x[0], y]))
    with torch.no_grad():
        model(images)
    unit = torch.nn.functional.normalize(entered[1], dim=-1)
    cosine = ((unit.sum(1).square().sum(-1) - 5) / 20).mean()
    assert run.metric("heads/stream_cosine/layer 1") == pytest.approx(float(cosine), abs=1e-5)
    unit = torch.nn.functional.normalize(entered[3], dim=-1)
    cosine = ((unit.sum(1).square().sum(-1) - 5) / 20).mean()
    assert run.metric("heads/final_cosine/layer 1") == pytest.approx(float(cosine), abs=1e-5)
    # what enters attention is another figure
    assert run.metric("heads/token_cosine/layer 1") != run.metric("heads/stream_cosine/layer 1")


def test_the_report_shows_each_arm_beside_the_baseline(study):
    folder = study[1]
    page = headwise_verdict.reporting.write(folder.path).read_text(encoding="utf-8")
    for arm in folder.arms[1:]:
        for part in ("first layer", "last layer"):
            assert f"maps, {part}: {arm}" in page and f"maps, {part}: baseline beside {arm}" in page


def test_maps_that_were_changed_are_damage(study, tmp_path):
    path = study[1].runs["baseline", 0].path / "maps.json"
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(json.loads(whole) | {"tokens": 9}))
        assert any("maps.json" in word for run in read_study(study[1].path).damaged() for word in run.damage)
    finally:
        path.write_text(whole)
