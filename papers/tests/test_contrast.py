"""SimCLR: NT-Xent against its formula, views against what each must do, the frozen layer, and a run with its probe."""

import math
from dataclasses import replace

import pytest
import torch
from headwise_papers.tasks import contrast
from headwise_papers.tasks.contrast import Contrast
from headwise_papers.tasks.image_views import (
    RGB,
    YIQ,
    crop,
    crops,
    draw_views,
    flip,
    hues,
    luma,
    recolour,
    turn_hue,
    view,
)
from headwise_papers.tasks.nt_xent import found, nt_xent
from small_studies import carry

from headwise.lab.experiments.arm import read_arm
from headwise.lab.training.batches import make_batch
from headwise.study import Study

PLACE = "headwise_papers.tasks.contrast:Contrast"
VIEWS = {"least_area": 0.2, "colour": 0.5, "grey": 0.2}
TINY = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "batch_size": 32, "projection": 8}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_nt_xent_is_the_papers_formula():
    one, other = torch.randn(3, 4, generator=seeded()), torch.randn(3, 4, generator=seeded(1))
    # Chen et al. 2020, equation 1, view by view
    views, temperature, losses = [*one, *other], 0.5, []
    cosine = torch.nn.CosineSimilarity(0)
    for i in range(6):
        partner = (i + 3) % 6
        others = sum(math.exp(float(cosine(views[i], views[k])) / temperature) for k in range(6) if k != i)
        losses.append(-math.log(math.exp(float(cosine(views[i], views[partner])) / temperature) / others))
    assert float(nt_xent(one, other, temperature)) == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert float(nt_xent(5 * one, other, temperature)) == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert float(found(torch.eye(4), torch.eye(4))) == 1.0
    assert float(found(torch.eye(4), torch.eye(4).roll(1, 0))) == 0.0


def test_a_crop_of_the_whole_image_is_the_image_and_a_smaller_one_lies_inside():
    images = torch.rand(4, 3, 32, 32, generator=seeded())
    torch.testing.assert_close(crop(images, crops(torch.full((4, 4), 0.5), 1.0)), images, atol=1e-5, rtol=0)
    ramp = torch.linspace(0, 1, 32).expand(200, 3, 32, 32)
    parts = crop(ramp, crops(torch.rand(4, 200, generator=seeded()), 0.2))
    spans = parts[:, 0, 16, -1] - parts[:, 0, 16, 0]
    assert float(parts.min()) >= 0 and float(parts.max()) <= 1 and bool((spans > 0).all())
    # the sides of 0.2 to 1 of the area, by shapes of 3:4 to 4:3
    assert float(spans.min()) >= math.sqrt(0.2 * 3 / 4) * 0.9 and float(spans.max()) <= 1.0
    assert 0.6 < float(spans.mean()) < 0.9
    starts = parts[:, 0, 16, 0]
    assert float(starts.std()) > 0.05


def test_half_of_the_images_are_mirrored_whole():
    images = torch.rand(400, 3, 4, 4, generator=seeded())
    turned = flip(images, draw_views(400, seeded(), **VIEWS).mirrored)
    mirrored = (turned == images.flip(-1)).flatten(1).all(1)
    assert bool((mirrored | (turned == images).flatten(1).all(1)).all())
    assert 160 < int(mirrored.sum()) < 240


def test_turning_the_hue_keeps_the_luma_and_a_whole_turn_the_image():
    torch.testing.assert_close(YIQ @ RGB, torch.eye(3), atol=1e-5, rtol=0)
    # colours near grey, which no turn takes out of range
    images = 0.5 + 0.1 * torch.rand(8, 3, 4, 4, generator=seeded())
    turned = turn_hue(images, hues(torch.full((8,), 0.3)))
    torch.testing.assert_close(luma(turned), luma(images), atol=1e-5, rtol=0)
    assert float((turned - images).abs().max()) > 0.01
    torch.testing.assert_close(turn_hue(images, hues(torch.ones(8))), images, atol=1e-5, rtol=0)
    grey = luma(images).expand_as(images)
    torch.testing.assert_close(turn_hue(grey, hues(torch.full((8,), 0.3))), grey, atol=1e-5, rtol=0)


def test_colours_change_by_their_strength_and_stay_in_range():
    images = torch.rand(300, 3, 4, 4, generator=seeded())

    def recoloured(strength):
        drawn = draw_views(300, seeded(), **(VIEWS | {"colour": strength}))
        return turn_hue(recolour(images, drawn.factors), drawn.hues)

    torch.testing.assert_close(recoloured(0.0), images, atol=1e-5, rtol=0)
    changes = [(recoloured(strength) - images).abs().mean() for strength in (0.1, 0.5, 1.0)]
    assert changes == sorted(changes) and changes[0] > 0
    strong = recoloured(1.0)
    assert float(strong.min()) >= 0 and float(strong.max()) <= 1


def test_views_of_an_image_differ_repeat_by_seed_and_are_grey_at_their_share():
    images = torch.rand(500, 3, 8, 8, generator=seeded())
    generator = seeded()
    one, other = (view(images, draw_views(500, generator, **VIEWS)) for _ in range(2))
    assert not torch.equal(one, other) and torch.equal(one, view(images, draw_views(500, seeded(), **VIEWS)))
    both = view(images.repeat(2, 1, 1, 1), draw_views(500, seeded(), views=2, **VIEWS))
    assert torch.equal(both, torch.cat([one, other]))
    colourless = (one - luma(one)).abs().flatten(1).amax(1) < 1e-5
    assert 60 < int(colourless.sum()) < 140
    drawn = draw_views(500, seeded(), least_area=1.0, colour=0.5, grey=0.0, jitter=0.0)
    plain = view(images, drawn)
    assert float((plain - images).abs().mean()) < float((one - images).abs().mean())


def test_the_probe_sees_the_images_themselves_and_evaluation_the_same_views():
    images = torch.randint(256, (6, 3, 32, 32), generator=seeded(), dtype=torch.uint8)
    examples = (images, torch.arange(6))
    probe = make_batch(Contrast(**TINY, stage="probe"), examples, seeded())
    torch.testing.assert_close(probe.inputs[0], images.float() / 127.5 - 1)
    task = Contrast(**TINY)
    drawn, again, other = (make_batch(task, examples, drawn) for drawn in (None, None, seeded(3)))
    assert torch.equal(drawn.inputs[0], again.inputs[0]) and not torch.equal(drawn.inputs[0], drawn.inputs[1])
    assert not torch.equal(drawn.inputs[0], other.inputs[0])
    assert float(drawn.inputs[0].min()) >= -1 and float(drawn.inputs[0].max()) <= 1


def test_both_views_pass_the_model_as_they_would_alone():
    torch.manual_seed(0)
    model = Contrast(**TINY).model().eval()
    one, other = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)
    together = model(one, other)
    for alone, both in zip((model(one), model(other)), together, strict=True):
        torch.testing.assert_close(alone, both, atol=1e-5, rtol=1e-5)
    assert not Contrast(**TINY, frozen_patch=True).model().encoder.patch.weight.requires_grad
    assert model.encoder.patch.weight.requires_grad


@pytest.fixture
def images(monkeypatch):
    """Return images of four colours in the place of CIFAR's: a class is its colour and place."""

    def data(self, split):
        if split == "validation":
            return None
        generator = seeded(len(split))
        labels = torch.randint(4, (256 if split == "train" else 100,), generator=generator)
        made = torch.randint(0, 90, (len(labels), 3, 32, 32), generator=generator, dtype=torch.uint8)
        for label in range(4):
            made[labels == label, label % 3, 16 * (label // 2) : 16 * (label // 2) + 16] += 150
        return made, labels

    monkeypatch.setattr(Contrast, "data", data)
    monkeypatch.setattr(Contrast, "files", lambda self: [])
    monkeypatch.setattr(contrast, "SOURCE", replace(contrast.SOURCE, classes=4))


@pytest.mark.grid
def test_contrast_then_probe_tells_the_classes(images, tmp_path):
    task = Contrast(**TINY, epochs=3, learning_rate=3e-3, probe_epochs=6, probe_learning_rate=3e-2)
    arms = ("baseline | frozen_patch=true", 'SigmaReparam(init="one", layers="all") | norm=none')
    arms = tuple(read_arm(text, task).text for text in arms)
    study = Study(name="c", title="T", question="Q?", task=task, task_place=PLACE, methods=arms, seeds=1)
    for result in carry(study, tmp_path / "out"):
        metrics = result["metrics"]
        assert result["phases"] == ["contrast", "probe"]
        # chance is 0.25
        assert metrics["test/accuracy"] > 0.6, result["arm"]
        assert 0 < metrics["contrast/views/accuracy"] <= 1
        assert metrics["contrast/views/loss"] < math.log(199)
