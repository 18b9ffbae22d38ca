"""The studies of NeuTRENO at their least size: made-up images in the place of CIFAR's, a few steps, figures that are
checked."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from headwise_papers import neutreno_cifar, neutreno_depth, neutreno_incremental, neutreno_kernel, neutreno_length
from headwise_papers.tasks import deit, incremental
from headwise_papers.tasks.deit import draw_moves, moved
from headwise_papers.tasks.incremental import Incremental
from headwise_papers.tasks.top_k import in_top
from sklearn.metrics import top_k_accuracy_score
from small_studies import carry

from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.training.checkpoint import load_checkpoint
from headwise_verdict.results.claims import judged_claims
from headwise_verdict.results.folder import read_study

TINY = {
    "dim": 12,
    "depth": 3,
    "mlp_dim": 12,
    "patch": 16,
    "steps": 3,
    "batch_size": 8,
    "train_size": 24,
    "test_size": 40,
}


@pytest.fixture(autouse=True, scope="module")
def made_up_images():
    """Return images that tell their class by their brightness, of as many classes as the data has."""

    @functools.cache
    def made(count, split):
        generator = torch.Generator().manual_seed(len(split))
        classes = torch.arange(count).repeat(40 if count == 10 else 30)
        images = torch.randint(0, 100, (len(classes), 3, 32, 32), generator=generator)
        return (images + classes[:, None, None, None] * 150 // count).to(torch.uint8), classes

    with pytest.MonkeyPatch.context() as patch:
        for module in (deit, incremental):
            patch.setattr(module, "read", lambda source, split, folder: made(source.classes, split))
        yield


def at_least_size(study, **settings):
    task = type(study.task)(**study.task.model_dump() | TINY | settings)
    named = set(task.head_statistics)
    # claims of statistics that are left out, and of the twelfth layer, go
    claims = [c for c in study.claims if all(_known(t.outcome, named) for t in c.tests)]
    update = {"task": task, "seeds": 2, "claims": tuple(claims)}
    made = study.model_copy(update=update)
    return made.model_copy(update={"claims": canonical_claims(made)})


def _known(outcome, statistics):
    return not outcome.startswith("heads/") or (outcome.split("/")[1] in statistics and "layer 11" not in outcome)


def model_of(task, run):
    """Return a trained model without methods."""
    model = task.model()
    tensors = load_checkpoint(run.path, pytest.fail).tensors
    model.load_state_dict({k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")})
    return model.eval()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_top_k_is_that_of_scikit_learn(k):
    draw = np.random.default_rng(0)
    logits, classes = draw.normal(size=(200, 7)), draw.integers(0, 7, 200)
    wanted = top_k_accuracy_score(classes, logits, k=k, labels=range(7))
    assert float(in_top(torch.tensor(logits), torch.tensor(classes), k).double().mean()) == pytest.approx(wanted)


def test_top_k_of_more_classes_than_there_are_is_refused():
    with pytest.raises(ValueError, match="k must lie between 1 and the 3 classes, got 5"):
        in_top(torch.zeros(2, 3), torch.zeros(2).long(), 5)


def test_moved_images_are_flipped_and_shifted_and_never_mixed():
    images = torch.arange(6 * 2 * 8 * 8).float().view(6, 2, 8, 8)
    found, again = (moved(images, draw_moves(6, 8, torch.Generator().manual_seed(1))) for _ in range(2))
    wide = torch.nn.functional.pad(images, (4,) * 4, value=-1.0)
    for one, padded in zip(found, wide, strict=True):
        crops = [padded[:, y : y + 8, x : x + 8] for y in range(9) for x in range(9)]
        assert sum(torch.equal(one, crop) or torch.equal(one, crop.flip(-1)) for crop in crops) == 1
    assert not torch.equal(found, images) and torch.equal(found, again)


def test_adaptation_begins_where_the_plain_model_ends(tmp_path):
    arms = ("baseline | adapt=true", "NeuTRENO(strength=0.0 -> 0.6 over 20%) | adapt=true")
    study = at_least_size(neutreno_cifar.STUDY, steps=6, head_statistics=())
    study = study.model_copy(update={"methods": arms, "seeds": 1, "claims": ()})
    carry(study, tmp_path)
    runs = read_study(tmp_path).runs
    lines = {arm: runs[arm, 0].epochs for arm in study.arms}
    first = [line.metrics["train/loss"] for line in lines["baseline"] if line.phase == "train"]
    for arm in arms:
        assert [line.metrics["train/loss"] for line in lines[arm] if line.phase == "train"] == first
        assert runs[arm, 0].result.steps == 8 and runs[arm, 0].result.phases == ["train", "adapt"]
    assert runs[arms[0], 0].metric("test/loss") != runs[arms[1], 0].metric("test/loss")


@pytest.mark.grid
def test_image_classification_runs_to_figures_that_its_models_give(tmp_path):
    study = at_least_size(neutreno_cifar.STUDY)
    carry(study, tmp_path)
    folder = read_study(tmp_path)
    assert not folder.missing()
    claims = judged_claims(folder)
    # a model of this size learns nothing, which a premise of the study asks
    assert len(claims) == len(study.claims) and {claim.verdict for claim in claims} == {"not testable here"}
    run = folder.runs["baseline", 1]
    images, classes = study.task.data("test")
    chosen = torch.randperm(400, generator=torch.Generator().manual_seed(_seed_of_the_test()))[:40]
    logits = model_of(study.task, run)(study.task.batch((images[chosen], classes[chosen]), None).inputs)
    for name, k in (("accuracy", 1), ("top5", 5)):
        wanted = top_k_accuracy_score(classes[chosen], logits.detach(), k=k, labels=range(10))
        assert run.metric(f"test/{name}") == pytest.approx(wanted)
    symmetric = folder.runs['SymmetricAttention(keep="keys")', 1]
    assert symmetric.metric("heads/gradient_cosine/mean") == pytest.approx(1, abs=1e-5)
    assert 0 < run.metric("heads/gradient_cosine/mean") < 1 - 1e-6
    assert run.maps is not None and len(run.maps.layers[0].heads) == 3


def _seed_of_the_test():
    from headwise.lab.experiments.configuration import derive

    return derive(0, "test_size")


def test_kernel_attention_runs_to_a_map_that_is_no_softmax(tmp_path):
    study = at_least_size(neutreno_kernel.STUDY)
    carry(study, tmp_path)
    folder = read_study(tmp_path)
    figures = {arm: folder.runs[arm, 0].metric("test/loss") for arm in study.arms}
    assert len(set(figures.values())) == 3
    # a model of this size learns nothing, which a premise of the study asks
    assert [claim.verdict for claim in judged_claims(folder)] == ["not testable here"] * 2


@pytest.mark.parametrize(
    ("study", "axis", "arms"),
    [
        (neutreno_length.STUDY, "NeuTRENO(strength=0.6) | steps={2,3,5}", 4),
        (neutreno_depth.STUDY, "NeuTRENO(strength=0.6) | depth={2,3,4}", 4),
    ],
    ids=["length", "depth"],
)
def test_length_and_depth_change_what_their_axis_says(tmp_path, study, axis, arms):
    canonical_claims(study)
    assert study.scales["small"].seeds == 8
    task = type(study.task)(**study.task.model_dump() | TINY)
    changes = {"methods": (), "sweeps": (axis,), "seeds": 1, "claims": (), "premises": ()}
    small = study.model_copy(update={"task": task, **changes})
    carry(small, tmp_path)
    folder = read_study(tmp_path)
    assert len(small.arms) == arms and not folder.missing()
    results = [folder.runs[arm, 0].result for arm in small.axes[0].arms]
    if "steps" in axis:
        assert [result.steps for result in results] == [2, 3, 5]
        assert all("gap/accuracy" in result.metrics and "train/loss" in result.metrics for result in results)
    else:
        parameters = [result.metrics["cost/parameters"] for result in results]
        assert parameters[2] - parameters[1] == parameters[1] - parameters[0] > 0
    claimed = {test.outcome for claim in study.claims for test in claim.tests}
    assert all(claimed <= result.metrics.keys() for result in results)


def test_gains_move_further_in_the_arm_that_learns_ten_times_as_fast(tmp_path):
    task = type(neutreno_length.STUDY.task)(**neutreno_length.STUDY.task.model_dump() | TINY)
    arms = ("FeatScale() | steps=5", neutreno_length.at(neutreno_length.FAST, 5))
    changes = {"methods": arms, "sweeps": (), "seeds": 1, "claims": (), "premises": ()}
    carry(neutreno_length.STUDY.model_copy(update={"task": task, **changes}), tmp_path)
    folder = read_study(tmp_path)
    plain, fast = (folder.runs[arm, 0].metric("methods/moved") for arm in folder.arms[1:])
    assert [folder.runs[arm, 0].result.steps for arm in folder.arms[1:]] == [5, 5]
    assert fast > 3 * plain > 0


def test_incremental_learning_sees_each_class_in_one_task_alone():
    seen = []
    for task in range(5):
        images, places = Incremental().data(f"train {task}")
        assert set(places.tolist()) == set(range(20 * task, 20 * task + 20)) and len(images) == 600
        seen.append(images)
    assert len(Incremental().data("test")[0]) == 3000
    # an answer among the classes of another task counts for nothing
    output = torch.zeros(1, 100)
    output[0, 3], output[0, 25] = 9.0, 1.0
    counted = Incremental().count(output, torch.tensor([25]))
    assert int(counted["accuracy"]) == 1
    assert float(counted["loss"]) == pytest.approx(float(torch.logsumexp(output[0, 20:40], 0) - 1))


def test_forgetting_is_the_mean_fall_from_the_best_of_earlier_phases():
    matrix = torch.tensor(
        [
            [0.9, 0, 0, 0, 0],
            [0.5, 0.8, 0, 0, 0],
            [0.7, 0.6, 0.5, 0, 0],
            [0.4, 0.9, 0.5, 0.6, 0],
            [0.3, 0.7, 0.6, 0.2, 0.8],
        ]
    )
    outcomes = {f"after {k}/task {i}/accuracy": float(matrix[k, i]) for k in range(5) for i in range(5)}
    # 0.9 − 0.3, 0.9 − 0.7, 0.5 − 0.6, 0.6 − 0.2
    assert Incremental().summary(outcomes)["final/forgetting"] == pytest.approx((0.6 + 0.2 - 0.1 + 0.4) / 4)


@pytest.mark.grid
def test_incremental_learning_runs_to_its_accuracy_matrix(tmp_path):
    study = at_least_size(neutreno_incremental.STUDY, test_size=None, test_each=40).model_copy(update={"seeds": 1})
    carry(study, tmp_path)
    folder = read_study(tmp_path)
    run = folder.runs["baseline", 0]
    matrix = [[run.metric(f"after {k}/task {i}/accuracy") for i in range(5)] for k in range(5)]
    assert all(0 <= entry <= 1 for row in matrix for entry in row)
    # as many test images of each task: the mean over tasks is that over images
    assert run.metric("final/accuracy") == pytest.approx(sum(matrix[-1]) / 5, abs=1e-6)
    assert run.metric("final/forgetting") == pytest.approx(
        sum(max(matrix[k][i] for k in range(i, 4)) - matrix[4][i] for i in range(4)) / 4
    )
    assert len(judged_claims(folder)) == 2
