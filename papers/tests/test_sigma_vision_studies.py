"""The studies of SigmaReparam on CIFAR-10, at the least size: they run to their end, and their claims are judged."""

import headwise_papers.tasks.cifar as cifar
import pytest
import torch
from headwise_papers import sigma_robust, sigma_temperature, sigma_vit, sigma_vit_shallow
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.experiments.task_source import build_task
from headwise_verdict.results.analysis import analyse

TINY = {"dim": 8, "depth": 1, "heads": 2, "head_dim": 4, "mlp_dim": 8, "patch": 16, "batch_size": 8, "steps": 6}
TINY |= {"train_size": 48, "test_size": 20}
MODULES = (sigma_vit, sigma_robust, sigma_temperature, sigma_vit_shallow)
STUDIES = {module.STUDY.name: module.STUDY for module in MODULES}


@pytest.fixture(autouse=True)
def bright_or_dark(monkeypatch):
    """Stand in for CIFAR-10's files with images whose class is their brightness."""

    def read(source, split, folder):
        generator = torch.Generator().manual_seed(5 if split == "train" else 1)
        classes = torch.randint(10, (60,), generator=generator)
        images = torch.randint(0, 20, (60, 3, 32, 32), generator=generator) + 23 * classes[:, None, None, None]
        return images.to(torch.uint8), classes

    monkeypatch.setattr(cifar, "read", read)
    monkeypatch.setattr(cifar.Cifar, "prepare", lambda self, tell: None)


def run(name, folder, methods=None, seeds=2, **settings):
    """Run a built-in study with its own arms and claims at a least size, and give its analysis."""
    study = STUDIES[name]
    task = build_task(type(study.task), study.task.model_dump() | TINY | settings).located(folder)
    update = {"seeds": seeds, "task": task}
    study = study.model_copy(update=update)
    carry(study, folder / "out", watch=study.watch)
    return analyse(folder / "out")


@pytest.mark.parametrize("name", STUDIES)
def test_claims_name_what_the_study_has_and_the_default_is_the_small_scale(name):
    study = STUDIES[name]
    assert len(canonical_claims(study)) == len(study.claims) > 1
    small = build_task(type(study.task), study.task.model_dump() | study.scales["small"].settings)
    assert small.model_dump() == study.task.model_dump() and study.scales["small"].seeds == study.seeds >= 6


@pytest.mark.parametrize("module", [sigma_vit, sigma_robust, sigma_temperature])
def test_the_scale_of_the_paper_has_the_shape_of_its_model(module):
    study = module.STUDY
    paper = build_task(type(study.task), study.task.model_dump() | study.scales["paper"].settings)
    assert paper.depth == 12 and paper.dim == 768


def test_six_layers_without_norms_run_with_each_method(tmp_path):
    found = run("sigma-vit-shallow", tmp_path)
    assert found.complete and len(found.arms) == 5
    # a model of this size learns nothing, which the premise asks
    assert {claim.verdict for claim in found.claims} == {"not testable here"}
    losses = {arm.label: arm.metrics["test/loss"].mean for arm in found.arms}
    assert len(set(losses.values())) == 5


def test_sigma_vit_reads_every_matrix_and_judges_its_claims(tmp_path):
    found = run("sigma-vit", tmp_path, watch_every=2)
    assert found.complete and len(found.arms) == 7
    spectral = next(arm for arm in found.arms if arm.label.startswith("SpectralNorm"))
    assert spectral.metrics["heads/matrix_norm/mean"].mean == pytest.approx(1, rel=0.01)
    assert spectral.metrics["watched/matrix_norm/last"].mean == pytest.approx(1, rel=0.01)
    assert {claim.verdict for claim in found.claims} <= {"undecided", "not testable here"}
    assert "blocks.0.attn.qkv q" in " ".join(found.outcomes)
    assert "fails without norms" in [premise.name for premise in found.premises]
    bare = next(arm for arm in found.arms if arm.label.startswith("baseline | norm=none"))
    norms = 2 * 2 * TINY["dim"] + 2 * TINY["dim"]
    assert found.arms[0].costs["parameters"] - bare.costs["parameters"] == norms


def test_initial_weights_have_the_size_that_is_set():
    task = build_task(type(sigma_vit.STUDY.task), sigma_vit.STUDY.task.model_dump() | {"initial_std": 0.1, "dim": 96})
    model = task.model()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    assert len(linear) == 4 * 12 + 2
    for module in linear:
        assert float(module.weight.detach().std()) == pytest.approx(0.1, rel=0.15)
        assert module.bias is None or not module.bias.any()
    own = build_task(type(task), task.model_dump() | {"initial_std": None}).model()
    assert own.blocks[0].mlp[0].bias.any()


def test_sigma_robust_counts_diverged_runs_along_each_axis(tmp_path):
    found = run("sigma-robust", tmp_path, divergence_factor=1.0001, divergence_smoothing=0.0)
    assert {trend.axis for trend in found.trends} == set(sigma_robust.STUDY.sweeps)
    trend = next(t for t in found.trends if t.outcome == "diverged" and t.axis == sigma_robust.PLAIN)
    assert trend.seeds == 2 and len(trend.values) == 4
    # where nearly every run counts as diverged, no plain model has learned
    assert [claim.verdict for claim in found.claims] == ["not testable here"] * 2


@pytest.mark.grid
def test_sigma_temperature_sees_the_entropy_fall_and_reads_the_sharpness(tmp_path):
    found = run("sigma-temperature", tmp_path, steps=10, train_size=48, watch_every=2, watch_examples=4, seeds=1)
    entropy = found.outcomes["watched/attention_entropy/least"].name
    by_arm = {arm.label: arm.metrics for arm in found.arms}
    early = by_arm[sigma_temperature.EARLY]
    assert early[entropy].mean < by_arm["baseline"][entropy].mean
    assert early["watched/sharpness/greatest"].mean > 0 and early["watched/sharpness_share/last"].n == 1
    assert early["watched/sharpness_share/beyond"].mean == float(early["watched/sharpness_share/greatest"].mean > 1)
