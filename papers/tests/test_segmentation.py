"""The study of segmentation: mean IoU against scikit-learn's, windows, scales, and the study end to end at its least
size."""

import pytest
import torch
from headwise_papers.data import camvid, cifar
from headwise_papers.neutreno_segmentation import STUDY
from headwise_papers.neutreno_segmentation_pretrained import STUDY as PRETRAINED
from headwise_papers.tasks.mean_iou import confusion, mean_iou
from headwise_papers.tasks.multi_scale import at_pixels, multi_scale, through_windows, window_starts
from headwise_papers.tasks.segmenter import Segmenter
from headwise_papers.tasks.street_scenes import StreetScenes
from sklearn.metrics import jaccard_score
from small_studies import carry
from torch.nn import functional as F

from headwise.lab.training.batches import make_batch

VOID = 11


def test_mean_iou_from_sums_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(12, (6, 20, 10), generator=generator)
    guess = torch.where(
        torch.rand(labels.shape, generator=generator) < 0.6,
        labels,
        torch.randint(11, labels.shape, generator=generator),
    )
    guess = guess.where(guess != VOID, 3)
    # one class is neither there nor predicted, one is predicted alone
    labels, guess = labels.where((labels != 7) & (labels != 2), 0), guess.where(guess != 7, 0)
    sums = sum(confusion(guess[at], labels[at], 11, VOID) for at in range(6))
    real = labels != VOID
    present = [at for at in range(11) if at != 7]
    want = jaccard_score(labels[real], guess[real], labels=present, average="macro", zero_division=0)
    assert mean_iou(sums).item() == pytest.approx(want)
    assert sums.sum() == real.sum()


@pytest.mark.parametrize(
    ("guess", "label", "said"),
    [
        (11, 3, "predictions from 11 to 11, but classes are 0 to 10"),
        (0, 12, "labels from 12 to 12"),
        (0, -1, "labels from -1"),
    ],
)
def test_a_class_that_is_none_is_counted_as_no_other(guess, label, said):
    with pytest.raises(ValueError, match=said):
        confusion(torch.tensor([guess]), torch.tensor([label]), 11, VOID)


def model_of_means(patch):
    """Return each patch its mean colour as logits of three classes: what it sees does not depend on its place."""
    return lambda images: F.avg_pool2d(images, patch)


def test_windows_and_mirrors_of_a_model_without_places_change_nothing():
    images = torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    model = model_of_means(2)
    whole = through_windows(model, images, (8, 12), 2)
    torch.testing.assert_close(through_windows(model, images, (4, 6), 2), whole)
    shares = multi_scale(model, images, (1.0,), 2, (8, 12))
    torch.testing.assert_close(shares, at_pixels(whole, (8, 12)).softmax(1))


def test_windows_cover_a_side_evenly_and_overlap_by_half():
    assert window_starts(9, 9) == [0] and window_starts(5, 9) == [0]
    assert window_starts(12, 9) == [0, 3] and window_starts(18, 9) == [0, 4, 9]


def test_a_place_that_only_some_windows_see_counts_their_mean():
    # the first column of every window is told to be 1, all else 0
    model = lambda images: torch.zeros(len(images), 1, 4, 4).index_fill(3, torch.tensor([0]), 1.0)
    found = through_windows(model, torch.zeros(1, 3, 4, 6), (4, 4), 1)
    assert found[0, 0, 0].tolist() == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]


def test_several_scales_see_more_than_one():
    task = StreetScenes(dim=8, depth=1, scales=(0.5, 1.0, 1.5))
    torch.manual_seed(0)
    model, images = task.model().eval(), torch.rand(2, 3, 180, 240)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(args[0].shape[2:])))
    with torch.no_grad():
        shares = task._at_all_scales(model, images)
    assert shares.shape == (2, 11, 45, 60)
    torch.testing.assert_close(shares.sum(1), torch.ones(2, 45, 60))
    # 4 × 6 patches of 20 pixels twice; the whole twice; 14 × 18 patches through windows of 9 × 12, twice
    assert seen == [(80, 120)] * 2 + [(180, 240)] * (2 + 2 * 3 * 2)


def test_the_mask_decoder_multiplies_patches_and_classes():
    torch.manual_seed(0)
    model = Segmenter(classes=5, size=(8, 12), patch=4, dim=8, depth=1, heads=2, decoder_depth=1).eval()
    with torch.no_grad():
        masks = model(torch.randn(2, 3, 8, 12))
        assert masks.shape == (2, 5, 2, 3)
        # two equal class tokens make equal masks before the norm over classes, and so behind it
        model.decoder.class_tokens[:, 1] = model.decoder.class_tokens[:, 3]
        masks = model(torch.randn(2, 3, 8, 12))
    torch.testing.assert_close(masks[:, 1], masks[:, 3])
    with pytest.raises(ValueError, match="patch 5 does not divide"):
        Segmenter(classes=5, size=(8, 12), patch=5)


def test_training_images_and_their_classes_are_cut_and_mirrored_together():
    task = StreetScenes(stride=1, zoom=2.0)
    labels = torch.arange(180 * 240).view(1, 180, 240) % 11
    images = (labels * 20).expand(3, -1, -1)[None].to(torch.uint8)
    found = task.batch((images, labels.to(torch.uint8)), torch.Generator().manual_seed(3))
    told = ((found.inputs[:, 0] + 1) * 127.5 / 20).round().long()
    # bilinear images and nearest classes agree inside of areas of one class: here, at most places, nowhere else by
    # chance
    assert (told == found.targets).float().mean() > 0.2 and not torch.equal(found.targets, labels)
    still = task.batch((images, labels.to(torch.uint8)), None)
    assert torch.equal(((still.inputs[:, 0] + 1) * 127.5 / 20).round().long(), still.targets)


@pytest.fixture
def scenes(monkeypatch):
    """Put drawn scenes in the place of CamVid: sky above road, a car where it is red, one void row."""

    def read(folder, split):
        generator = torch.Generator().manual_seed(len(split))
        labels = torch.full((12, 180, 240), 3, dtype=torch.uint8)
        labels[:, :90] = 0
        for at in range(12):
            left = int(torch.randint(0, 10, (1,), generator=generator)) * 20
            labels[at, 80:140, left : left + 60] = 8
        images = torch.stack([(labels == one) * 255 for one in (8, 3, 0)], dim=1).to(torch.uint8)
        labels[:, 40] = VOID
        return images, labels

    monkeypatch.setattr(camvid, "read", read)
    monkeypatch.setattr(camvid, "prepare", lambda folder, tell: None)
    monkeypatch.setattr(camvid, "files", lambda folder: [])


@pytest.mark.grid
def test_the_study_runs_end_to_end_to_scenes_that_are_learned(tmp_path, scenes):
    small = STUDY.task.model_copy(
        update={"steps": 20, "dim": 16, "depth": 2, "multi_scale_images": 2, "warmup": 3, "learning_rate": 5e-3}
    )
    study = STUDY.model_copy(
        update={"task": small, "methods": ("NeuTRENO(strength=0.6) @ encoder",), "sweeps": (), "claims": (), "seeds": 2}
    )
    found = carry(study, tmp_path)
    assert len(found) == 4
    for run in found:
        # all of one of the three classes that are there gives less than a fifth
        assert run["metrics"]["test/miou"] > 0.5 and run["metrics"]["multi-scale/miou"] > 0.3
        assert "heads/stream_cosine/layer 1" in run["metrics"]


@pytest.fixture
def images(monkeypatch):
    """Put 200 images in the place of CIFAR-100, whose class is the brightness of their left half."""

    def read(source, split, folder):
        classes = torch.arange(200) % source.classes
        left = (torch.arange(32) < 16).to(torch.uint8)
        return (2 * classes).to(torch.uint8)[:, None, None, None] * left.expand(3, 32, 32), classes

    monkeypatch.setattr(cifar, "read", read)
    monkeypatch.setattr(cifar, "prepare", lambda source, folder, tell: None)
    monkeypatch.setattr(cifar, "files", lambda source, folder: [])


TINY = {"steps": 4, "dim": 8, "depth": 1, "multi_scale_images": 2, "warmup": 2, "pretrain_steps": 3}


@pytest.mark.parametrize("hand_over", [True, False])
def test_the_encoder_and_nothing_else_is_handed_over(tmp_path, scenes, images, monkeypatch, hand_over):
    """What the second phase starts from is what the first one learned of the encoder, or else drawn anew."""
    import headwise.lab.training.execution as execution

    seen, prepare = [], execution.prepare

    def noted(*arguments, **options):
        training = prepare(*arguments, **options)
        seen.append((training.model, {name: weight.clone() for name, weight in training.model.state_dict().items()}))
        return training

    monkeypatch.setattr(execution, "prepare", noted)
    task = PRETRAINED.task.model_copy(update=TINY | {"hand_over": hand_over})
    update = {"task": task, "methods": (), "sweeps": (), "claims": (), "premises": (), "seeds": 1}
    (run,) = carry(PRETRAINED.model_copy(update=update), tmp_path)
    (first, before), (_, start) = seen
    for name, learned in first.state_dict().items():
        if name.startswith("encoder."):
            assert torch.equal(start[name], learned) == hand_over and not torch.equal(learned, before[name])
    assert not any(name.startswith("head.") for name in start) and any(name.startswith("decoder.") for name in start)
    assert "test/miou" in run["metrics"] and "heads/stream_cosine/mean" in run["metrics"]


def test_methods_act_in_both_phases_and_images_are_enlarged_and_mirrored(scenes, images):
    task = PRETRAINED.task
    assert [(phase.name, phase.methods) for phase in task.phases()] == [("pretrain", True), ("segment", True)]
    pretraining = task.model_copy(update=task.phases()[0].changes)
    found = make_batch(pretraining, pretraining.data("pretrain"), torch.Generator().manual_seed(0))
    assert found.inputs.shape == (200, 3, 80, 80) and pretraining.steps == task.pretrain_steps
    bright = 2 * found.targets / 127.5 - 1
    left, right = found.inputs[:, 0, 40, 10], found.inputs[:, 0, 40, 70]
    torch.testing.assert_close(torch.maximum(left, right), bright)
    mirrored = (right > left).sum()
    assert 70 < mirrored < 130
    still = pretraining.batch(pretraining.data("pretrain"), None)
    torch.testing.assert_close(still.inputs[:, 0, 40, 10], bright)
