"""neutreno-robust at its least size, end to end, and its figures counted by hand."""

import pytest
import tiny_cifar
import torch
from headwise_papers.data import frost
from headwise_papers.data.corruptions.table import CORRUPTIONS, SEVERITIES, corrupt
from headwise_papers.neutreno_robust import STUDY
from headwise_papers.tasks import corrupted_cifar
from headwise_papers.tasks.corrupted_cifar import CorruptedCifar
from small_studies import carry, orders

from headwise.lab.training.checkpoint import load_checkpoint

LEAST = {
    "steps": 3,
    "batch_size": 8,
    "dim": 8,
    "depth": 2,
    "heads": 2,
    "head_dim": 4,
    "mlp_dim": 8,
    "patch": 16,
    "warmup": 0,
}


@pytest.fixture
def data(tmp_path, monkeypatch):
    corrupted_cifar.corrupted_images.cache_clear()
    yield tiny_cifar.put(tmp_path / "data", monkeypatch, train=40, test=6)
    corrupted_cifar.corrupted_images.cache_clear()


def least(data, **settings):
    task = CorruptedCifar(**(STUDY.task.model_dump() | LEAST | {"images_each": 4, "clean_images": 5} | settings))
    return STUDY.model_copy(update={"task": task.located(data), "seeds": 2, "claims": ()})


def test_the_study_ends_and_its_errors_are_those_counted_by_hand(data, tmp_path):
    study = least(data)
    study.task.prepare(pytest.fail)
    results = carry(study, tmp_path / "out", data=data)
    assert {(result["arm"], result["seed"]) for result in results} == {
        (arm, seed) for arm in study.arms for seed in (0, 1)
    }
    order = next(o for o in orders(study, tmp_path / "out", data=data) if o.configuration.arm == "baseline")
    (result,) = [r["metrics"] for r in results if r["hash"] == order.identity]
    model = study.task.model()
    kept = load_checkpoint(order.folder, pytest.fail).tensors
    model.load_state_dict({name.removeprefix("model."): t for name, t in kept.items() if name.startswith("model.")})
    images, classes = study.task.data("test")
    pixels, photographs = images[:4].permute(0, 2, 3, 1).numpy(), frost.read(data)
    errors = torch.zeros(15, 5, dtype=torch.float64)
    for row, name in enumerate(CORRUPTIONS):
        for column, severity in enumerate(SEVERITIES):
            made = torch.from_numpy(corrupt(pixels, name, severity, seed=0, photographs=photographs)).permute(
                0, 3, 1, 2
            )
            with torch.no_grad():
                guesses = model.eval()(made.float() / 127.5 - 1).argmax(1)
            errors[row, column] = (guesses != classes[:4]).double().mean()
    assert result["corrupted/error"] == pytest.approx(errors.mean().item())
    reference = torch.tensor([corrupted_cifar.REFERENCE[name] for name in CORRUPTIONS])
    assert result["corrupted/mce"] == pytest.approx((errors.mean(1) / reference).mean().item())
    assert [result[f"corrupted/{name}"] for name in CORRUPTIONS] == pytest.approx(errors.mean(1).tolist())
    assert [result[f"corrupted/severity {severity}"] for severity in SEVERITIES] == pytest.approx(
        errors.mean(0).tolist()
    )
    # clean images are others: the first five, and the loss is of them alone
    with torch.no_grad():
        clean = model(images[:5].float() / 127.5 - 1)
    assert result["test/error"] == pytest.approx((clean.argmax(1) != classes[:5]).double().mean().item())
    assert "corrupted/loss" not in result and "train/error" not in result


def test_corrupted_images_stand_corruption_by_corruption_and_are_made_once(data):
    task = least(data).task
    images, targets = task.data("corrupted")
    clean, classes = task.data("test")
    assert images.shape == (300, 3, 32, 32) and images.dtype == torch.uint8
    assert targets[:, 1].tolist() == [kind for kind in range(75) for _ in range(4)]
    assert (targets[:, 0].view(75, 4) == classes[:4]).all()
    # contrast is the twelfth; nothing of it is drawn
    want = corrupt(clean[:4].permute(0, 2, 3, 1).numpy(), "contrast", 5, seed=9)
    assert (images[59 * 4 : 60 * 4].permute(0, 2, 3, 1).numpy() == want).all()
    assert least(data).task.data("corrupted")[0] is images
    assert not (least(data, corruption_seed=1).task.data("corrupted")[0] == images).all()


def test_the_mean_corruption_error_of_the_reference_is_one():
    kinds = torch.arange(75)
    task = CorruptedCifar()
    images = torch.full((75,), 10_000)
    wrong = (
        images.view(15, 5) * torch.tensor([corrupted_cifar.REFERENCE[name] for name in CORRUPTIONS])[:, None]
    ).round()
    found = task.finish_corrupted({"wrong": wrong.flatten(), "images": images})
    assert found["mce"] == pytest.approx(1.0, abs=1e-3)
    # of logits for class 0, everything of another class is wrong
    counted = task.count_corrupted(torch.eye(10)[:1].expand(75, 10), torch.stack([kinds % 5, kinds], 1))
    assert (
        counted["wrong"].tolist() == [int(kind % 5 != 0) for kind in range(75)]
        and counted["images"].tolist() == [1] * 75
    )


def test_a_diverged_run_counts_as_chance():
    failures = {metric.name: metric.failure for metric in CorruptedCifar().all_metrics()}
    assert failures["error"] == failures["fog"] == failures["severity 3"] == 0.9


def test_the_frost_of_another_folder_is_refused_by_name(data):
    (data / "cifar_c_frost" / "frost2.png").write_bytes(b"torn")
    with pytest.raises(Exception, match=r"corrupt: .*frost2.png"):
        least(data).task.prepare(pytest.fail)


def test_the_small_scale_is_what_the_study_is_written_at():
    assert len(STUDY.arms) == 3 and STUDY.seeds == 10
    assert STUDY.task.model_dump() == STUDY.task.model_dump() | STUDY.scales["small"].settings
    model = STUDY.task.model()
    assert len(model.blocks) == 12 and model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
