"""The league's small worlds: three unlike ones for each symptom, that take every contestant or say why not."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from headwise_papers.league import small_tasks
from headwise_papers.league.brief_run import run_once
from headwise_papers.league.contest_files import SYMPTOMS, read_contestants, read_small_worlds, why_refused

from headwise.study import Metric

FOLDER = Path(str(resources.files("headwise_papers"))) / "league"
CONTESTANTS, WORLDS = read_contestants([FOLDER]), read_small_worlds([FOLDER])
# tasks whose data come with scikit-learn or are generated
AT_HAND = ("SmallDigits", "Cells", "Pairs")


def test_every_symptom_has_three_worlds_unlike_in_data_and_in_architecture():
    for symptom in SYMPTOMS:
        of_it = [world for world in WORLDS.values() if world.symptom == symptom]
        assert len(of_it) >= 3
        assert len({world.field for world in of_it}) == len({world.architecture for world in of_it}) == len(of_it)
    assert max(world.seconds for world in WORLDS.values()) <= 6


def test_all_controls_and_about_twelve_methods_are_searched():
    kinds = [one.kind for one in CONTESTANTS.values()]
    assert kinds.count("plain") == 1 and 10 <= kinds.count("method") <= 14
    assert {name for name, one in CONTESTANTS.items() if one.kind == "control"} == {
        *("residual-dropout", "attention-dropout", "branch-drop", "weight-decay", "label-smoothing"),
        *("early-stopping", "augmentation", "smaller-model", "warmup", "clipping"),
    }


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_takes_every_contestant_but_augmentation_where_it_has_none(name):
    task = WORLDS[name].built()
    refused = {one: why for one, contestant in CONTESTANTS.items() if (why := why_refused(contestant, task))}
    has_augmentation = not isinstance(task, small_tasks.Pairs)
    assert set(refused) == (set() if has_augmentation else {"augmentation"})
    assert all("no augmentation" in why for why in refused.values())


@pytest.mark.parametrize("name", AT_HAND)
def test_an_augmentation_changes_training_batches_alone_and_keeps_labels(name):
    task = getattr(small_tasks, name)()
    if name == "Pairs":
        with pytest.raises(ValueError, match="Pairs has no augmentation"):
            small_tasks.Pairs(augmentation=0.5)
        return
    changed = type(task)(augmentation=1.0)
    examples = tuple(part[:32] for part in task.data("train"))
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (lambda batch: (batch.inputs, batch.targets))(changed.batch(examples, generator))
    assert inputs.shape == examples[0].shape and not torch.equal(inputs, examples[0])
    assert torch.equal(targets, examples[1])
    assert torch.equal(changed.batch(examples, None).inputs, examples[0])
    assert torch.equal(task.batch(examples, torch.Generator()).inputs, examples[0])


def test_shifted_digits_keep_their_ink_except_at_the_edge():
    task = small_tasks.SmallDigits(augmentation=1.0)
    image = torch.full((64, 1, 8, 8), -1.0)
    image[:, :, 3, 4] = 1.0
    shifted = task.augmented(image, torch.Generator().manual_seed(0))
    assert torch.equal(shifted.sum((1, 2, 3)), image.sum((1, 2, 3)))
    places = {tuple(one.nonzero()[0].tolist()) for one in (shifted[:, 0] > 0)}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}


def test_splits_share_no_cell_and_no_sequence():
    cells = [small_tasks.Cells().data(split)[0] for split in ("train", "validation", "test")]
    assert sum(map(len, cells)) == 569 == len(torch.cat(cells).unique(dim=0))
    tokens, values = small_tasks.Pairs().data("test")
    keys, listed = tokens[:, :8:2], tokens[:, 1:8:2] - small_tasks.KEYS
    asked = (keys[:, None] == tokens[:, 8:, None]).long().argmax(-1)
    assert torch.equal(listed.gather(1, asked), values)


@pytest.mark.parametrize("name", ["short-pairs", "unstable-cells"])
def test_every_arm_of_every_contestant_changes_the_training(name):
    # an arm that changes nothing would be the plain model under another name
    # steps enough for a warm-up of a tenth to differ from none
    settings = WORLDS[name].settings | {"steps": 20}
    task = WORLDS[name].model_copy(update={"settings": settings}).built()
    seen = {}
    for one in CONTESTANTS.values():
        if not why_refused(one, task):
            for arm in one.arms:
                seen[arm] = _parameters(task, arm)
    same = [arm for arm in seen if arm != "baseline" and seen[arm] == seen["baseline"]]
    # a limit of 1 acts on no gradient of the first steps of pairs; that of 0.3 does
    assert set(same) <= {"baseline | clip=1.0"}


def _parameters(task, arm):
    """Return the training and validation losses of four steps; a task that decides on its loss shows every change."""

    class ByLoss(type(task)):
        metrics = (Metric("loss", higher_is_better=False, failure=10.0),)

    found = run_once(ByLoss(**task.model_dump()), arm, 0.003, 7, reads_test=False)
    return found.train, found.validation


@pytest.mark.parametrize("name", ["short-pairs", "short-digits"])
def test_a_world_trains_in_a_second_and_repeats_to_the_bit(name):
    world = WORLDS[name].model_copy(update={"settings": WORLDS[name].settings | {"steps": 3}})
    one, other = (run_once(world.built(), "DropHead(p=0.2)", 1e-3, 5, reads_test=True) for _ in range(2))
    assert (one.train, one.validation, one.test) == (other.train, other.validation, other.test)
    assert None not in (one.train, one.validation, one.test)
