"""The studies of SigmaReparam on sequences and views: each at its least size, end to end, from data to judged
claims."""

import math
from dataclasses import replace

import pytest
import torch
from headwise_papers.tasks import contrast
from headwise_papers.tasks.contrast import Contrast
from made_up_data import WORDS, write_an4, write_multi30k
from small_studies import carry

from headwise.lab.comparing.choosing import choose_study
from headwise.lab.comparing.request import Request
from headwise.lab.studies.registry import Installed
from headwise_verdict.results.analysis import analyse

pytestmark = pytest.mark.grid


def small(name, *settings, methods=(), scale="small"):
    """Return the study as the command line would, at settings that take seconds; a seed is enough to see it run."""
    asked = {"study": name, "studies": Installed(), "scale": scale, "seeds": 2, "device": "cpu"}
    return choose_study(Request(**asked, settings=settings, methods=methods))


@pytest.mark.parametrize("name", ["sigma-speech", "sigma-translation", "sigma-simclr"])
def test_all_scales_are_studies_and_every_claim_names_an_arm_of_them(name):
    for scale in Installed().load(name).STUDY.scales:
        study = choose_study(Request(study=name, studies=Installed(), scale=scale, device="cpu"))
        assert study.scale == scale and study.claims
        assert {test.arm for claim in study.claims for test in claim.tests} <= set(study.arms)


def test_sigma_speech_runs_from_data_to_claims(tmp_path):
    folder = write_an4(tmp_path, WORDS * 3)
    study = small("sigma-speech", "steps=3", "dim=16", "depth=2", "mlp_dim=16", "stride=3")
    results = carry(located(study, folder), tmp_path / "out", data=folder)
    assert len(results) == 2 * len(study.arms)
    assert all(0 < result["metrics"]["test/letter_error"] < 10 for result in results)
    judged = analyse(tmp_path / "out").claims
    assert [claim.text for claim in judged] == [claim.text for claim in study.claims]


def test_sigma_translation_runs_from_data_to_claims(tmp_path):
    folder = write_multi30k(tmp_path)
    tiny = ("dim=16", "mlp_dim=16", "vocabulary=280", "test_size=20", "translated=4", "layer_steps=12")
    deep = (
        "baseline | norm=deep",
        "baseline | depth=18, norm=deep",
        'SigmaReparam(init="one", layers="all") | depth=18',
    )
    study = small("sigma-translation", *tiny, methods=deep)
    results = carry(located(study, folder), tmp_path / "out", data=folder)
    # twelve steps' worth of a layer: two at 6 layers, one at 18
    assert [result["steps"] for result in results] == [2, 2, 1, 1] * 2
    for result in results:
        # an untrained model guesses among 280 tokens, and may be worse than that
        assert 0.5 < result["metrics"]["test/loss"] / math.log(280) < 2
        assert 0 <= result["metrics"]["test/greedy/bleu"] < 1
        assert result["metrics"]["heads/attention_entropy/mean"] > 0
    judged = {claim.text: claim.verdict for claim in analyse(tmp_path / "out").claims}
    assert judged["At 50 layers a side it is behind DeepNorm."] == "not testable here"


def test_deep_models_take_steps_by_their_depth(tmp_path):
    folder = write_multi30k(tmp_path)
    tiny = ("dim=16", "mlp_dim=16", "vocabulary=280", "test_size=20", "translated=4")
    tiny += ("layer_steps=36", "deep_layer_steps=50")
    deep = ("baseline | depth=50, norm=deep, learning_rate=0.002",)
    study = small("sigma-translation-deep", *tiny, methods=deep, scale="gpu")
    results = carry(located(study, folder), tmp_path / "out", data=folder)
    assert [result["steps"] for result in results] == [2, 1] * 2
    whole = located(choose_study(Request(study=study.name, studies=Installed(), scale="gpu", device="cpu")), folder)
    assert [whole.configuration(arm, 0).settings["steps"] for arm in whole.arms] == [1200] * 3 + [600] * 3
    assert {claim.verdict for claim in analyse(tmp_path / "out").claims} == {"not testable here"}


def test_the_entropy_of_each_norm_is_judged_with_its_floor(tmp_path):
    folder = write_multi30k(tmp_path)
    tiny = ("dim=16", "mlp_dim=16", "vocabulary=280", "test_size=20", "translated=4", "layer_steps=24", "watch_every=2")
    study = small("sigma-translation-rates", *tiny)
    results = carry(located(study, folder), tmp_path / "out", data=folder, watch=True)
    assert [result["steps"] for result in results] == [4] * 2 * len(study.arms)
    for result in results:
        share, floor = (result["metrics"][f"heads/{name}/mean"] for name in ("entropy_share", "entropy_floor_centred"))
        assert 0 < result["metrics"]["watched/entropy_share/least"] <= 1 and share <= 1
        assert 0 < floor <= result["metrics"]["heads/attention_entropy/mean"]
    # two seeds decide nothing, and models of four steps have not learned
    assert {claim.verdict for claim in analyse(tmp_path / "out").claims} == {"not testable here"}


def test_sigma_simclr_runs_from_views_to_claims(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(64) % 4
    monkeypatch.setattr(Contrast, "data", lambda self, split: None if split == "validation" else (images, labels))
    monkeypatch.setattr(Contrast, "files", lambda self: [])
    monkeypatch.setattr(contrast, "SOURCE", replace(contrast.SOURCE, classes=4))
    tiny = ("dim=16", "mlp_dim=16", "depth=1", "steps=2", "train_size=64", "test_size=32", "probe_epochs=1")
    study = small("sigma-simclr", *tiny)
    results = carry(study, tmp_path / "out")
    assert len(results) == 8 and all(result["phases"] == ["contrast", "probe"] for result in results)
    assert all(0 <= result["metrics"]["test/accuracy"] <= 1 for result in results)
    frozen = [result for result in results if "frozen_patch" in result["arm"]]
    assert len(frozen) == 2 and len(analyse(tmp_path / "out").claims) == 1


def located(study, folder):
    return study.model_copy(update={"task": study.task.located(folder)})
