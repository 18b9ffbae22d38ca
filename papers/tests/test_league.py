"""The league of the literature: every entry can be searched in every world, and controls do what they say."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from headwise_papers.league import tasks
from headwise_papers.league.files import read_entries, read_worlds
from headwise_papers.league.space import Declared
from headwise_papers.tasks.eight_bits import in_8_bits, rounded
from torch import nn
from torch.nn import functional as F

import headwise
from headwise.lab.studies.vision_transformer import VisionTransformer
from headwise.lab.training.phases import part_of
from headwise_verdict.files.errors import StudyError

FOLDER = Path(str(resources.files("headwise_papers"))) / "league"
CONTROLS = {
    *("residual-dropout", "attention-dropout", "branch-drop", "weight-decay"),
    *("label-smoothing", "early-stopping", "augmentation", "smaller-model"),
}
ENTRIES, WORLDS = read_entries([FOLDER]), read_worlds([FOLDER])


def test_the_league_has_its_worlds_controls_and_methods():
    kinds = [entry.kind for entry in ENTRIES.values()]
    assert {name for name, entry in ENTRIES.items() if entry.kind == "control"} == CONTROLS
    assert kinds.count("plain") == 1 and kinds.count("method") >= 28
    assert set(WORLDS) == {"images", "words", "sentences", "speech", "deep-post-norm", "characters", "recall"}
    # what the files say that a run takes; no clock is read here
    stated = [world.seconds for world in WORLDS.values()]
    assert max(stated) <= 12
    assert all(set(entry.worlds) <= set(WORLDS) for entry in ENTRIES.values())


@pytest.mark.parametrize("world", WORLDS)
def test_every_entry_can_be_searched_in_every_world(world):
    task = WORLDS[world].built()
    for entry in ENTRIES.values():
        if entry.worlds and world not in entry.worlds:
            continue
        # refuses, among others, a point at which the entry is the plain model
        found = Declared(entry, task)
        assert (found.choice(found.first()).label == "baseline") == (entry.kind == "plain")


def test_augmentation_is_of_images_alone():
    with pytest.raises(StudyError, match="shift"):
        Declared(ENTRIES["augmentation"], WORLDS["recall"].built())


@pytest.mark.parametrize("world", WORLDS)
def test_residual_dropout_stands_behind_every_branch_and_changes_no_weight(world):
    task = WORLDS[world].built()
    torch.manual_seed(0)
    plain = task.model()
    torch.manual_seed(0)
    dropped = type(task)(**task.model_dump() | {"residual_dropout": 0.5}).model()
    assert list(plain.state_dict()) == list(dropped.state_dict())
    assert all(map(torch.equal, plain.state_dict().values(), dropped.state_dict().values()))
    branches = tasks.branches(dropped)
    attention = [
        name for name, _ in dropped.named_modules() if name.rpartition(".")[2] in ("attn", "self_attn")
    ] or branches
    assert len(branches) >= len(attention) >= 2 and not any(branch._forward_hooks for branch in tasks.branches(plain))


def test_dropped_branches_are_scaled_so_that_their_mean_stays():
    branch, given = nn.Identity(), torch.ones(200, 200)
    branch.register_forward_hook(tasks.Dropped(0.25))
    found = branch(given)
    assert found.mean().item() == pytest.approx(1, abs=0.02) and found.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(branch.eval()(given), given)


def test_a_model_without_known_branches_is_refused():
    with pytest.raises(ValueError, match="finds no branch in Linear"):
        tasks.branches(nn.Linear(2, 2))


def test_label_smoothing_is_torchs_and_only_in_training():
    task = tasks.Recall(label_smoothing=0.2)
    output, targets = torch.randn(3, 4, 16, requires_grad=True), torch.randint(16, (3, 4))
    expected = F.cross_entropy(output.flatten(0, 1), targets.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(task.loss(output, targets), expected)
    with torch.no_grad():
        torch.testing.assert_close(task.loss(output, targets), F.cross_entropy(output.flatten(0, 1), targets.flatten()))


def test_label_smoothing_of_speech_leaves_padding_out():
    output = torch.randn(2, 5, 6).log_softmax(-1)
    targets = {"frames": torch.tensor([5, 2])}
    expected = -torch.cat([output[0], output[1, :2]]).mean()
    torch.testing.assert_close(tasks.Utterances().uniform_loss(output, targets), expected)


@pytest.mark.parametrize(("world", "what"), [("images", "epochs"), ("recall", "steps")])
def test_stopping_early_shortens_the_run_and_its_schedule_once(world, what):
    task = WORLDS[world].built()
    early = type(task)(**task.model_dump() | {"stop_at": 0.5})
    part = part_of(early, 0)
    assert getattr(part.task, what) == getattr(task, what) // 2 and part.total == 1
    # the task of the part is not cut again
    assert not part.task.phases()[0].changes and not part_of(task, 0).phase.changes


def test_calibration_is_the_mean_distance_of_confidence_and_accuracy():
    # 8 of 10 are right at a confidence of 0.6, and all at 0.99
    def logits(confidence):
        return torch.tensor([confidence, 1 - confidence]).log().expand(10, 2)

    output, targets = torch.cat([logits(0.6), logits(0.99)]), torch.tensor([0] * 8 + [1] * 2 + [0] * 10)
    sums = tasks.in_bins(output, targets) + tasks.in_bins(output, targets)
    found = tasks.Recall().finish(
        {"weight": torch.tensor(40.0), "loss": torch.tensor(0.0), "accuracy": torch.tensor(36.0), "bins": sums}
    )
    assert float(found["calibration"]) == pytest.approx((0.2 + 0.01) / 2, abs=1e-6)


def test_shifted_images_are_moved_and_flipped_whole():
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.float32).view(2, 3, 8, 8) + 1
    found = tasks.shifted(images, 2, torch.Generator().manual_seed(0))
    padded = F.pad(images, (2, 2, 2, 2))
    for image, moved in zip(padded, found):
        crops = [image[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
        assert any(torch.equal(moved, crop) or torch.equal(moved, crop.flip(2)) for crop in crops)
    many = tasks.shifted(images[:1].expand(200, -1, -1, -1), 2, torch.Generator().manual_seed(1))
    # 25 places, flipped or not
    assert 40 <= len({tuple(one.flatten().tolist()) for one in many}) <= 50
    task = tasks.Images(name="cifar10", shift=2)
    assert torch.equal(task.batch(images.byte(), None), images.byte().float() / 127.5 - 1)


def test_controls_at_their_defaults_change_nothing():
    task = WORLDS["images"].built()
    assert (task.residual_dropout, task.label_smoothing, task.stop_at, task.shift) == (0, 0, 1, 0)
    assert isinstance(task.model(), VisionTransformer)


def test_weights_of_8_bits_reach_reparametrized_ones_and_torchs_attention_and_leave_no_trace():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    headwise.regularize(model, headwise.SigmaReparam())
    x = torch.randn(2, 5, 16)
    before, plain, kept = model(x), rounded(model.self_attn.in_proj_weight), dict(model.state_dict())
    kept = {name: tensor.clone() for name, tensor in kept.items()}
    with in_8_bits(model):
        assert torch.equal(model.self_attn.in_proj_weight, plain)
        assert torch.equal(model.linear1.weight, rounded(kept["linear1.weight"]))
        assert 0 < (model(x) - before).abs().max() < 0.2
    assert torch.equal(model(x), before)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_every_run_of_a_world_reads_its_heads_and_its_8_bits():
    for world in WORLDS.values():
        task = world.built()
        assert "head_redundancy" in task.head_statistics
        assert [one.split for one in task.evaluations() if one.name == "int8"] == ["test"]
