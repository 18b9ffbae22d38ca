"""A small world for the tests of contests, its contestants, and a ledger filled with invented figures."""

from headwise_papers.league.brief_run import Figures
from headwise_papers.league.contest import Contest
from headwise_papers.league.contest_files import Contestant, SmallWorld
from headwise_papers.league.run_ledger import Ledger

TASK = '''
import torch

from headwise.study import Task, VisionTransformer

SIZES = {"train": 64, "validation": 48, "test": 48}


def brightest(images):
    return torch.nn.functional.avg_pool2d(images, 2).flatten(1).argmax(1)


def unused():
    return 1


class Dots(Task):
    """Classify 4×4 images by their brightest quarter."""

    failure = 0.25

    steps: int = 3
    batch_size: int = 16
    dim: int = 8

    def model(self):
        return VisionTransformer(
            classes=4, image_size=4, channels=1, patch=2, dim=self.dim, depth=1, heads=2, head_dim=4, mlp_dim=8
        )

    def data(self, split):
        images = torch.randn(SIZES[split], 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return images, brightest(images)


class Nowhere(Dots):
    """The same with targets that make every loss NaN."""

    def loss(self, output, targets):
        return super().loss(output, targets) * float("nan")
'''
CONTESTANTS = {
    "plain": Contestant(name="plain", kind="plain", arms=("baseline",), reason="r"),
    "decay": Contestant(
        name="decay", kind="control", arms=("baseline | weight_decay=0.1", "baseline | weight_decay=0.3"), reason="r"
    ),
    "drop-head": Contestant(name="drop-head", kind="method", arms=("DropHead(p=0.2)",), reason="r"),
}
FACTS = {"failure": 0.25, "higher": 1.0, "constant": 0.75, "simple": 0.7}


def small_world(folder, *, name="dots", task="Dots", symptom="too little training", **changes):
    """Return a world whose task's file is in the folder."""
    file = folder / "dots.py"
    if not file.exists():
        file.write_text(TASK)
    fields = {"eased": {"steps": 6}} | changes
    return SmallWorld(
        name=name,
        title=name.title(),
        symptom=symptom,
        field="images",
        architecture="vision transformer",
        task=f"{file}:{task}",
        seconds=0.1,
        reason="r",
        **fields,
    )


def filled(folder, world, accuracy, contestants=None):
    """Return a contest that is carried out with invented figures: accuracy(run, split) for each run."""
    ledger = Ledger(folder, "0")
    ledger.facts = dict(FACTS)
    contest = Contest(world, contestants or CONTESTANTS, ledger, dict(FACTS))
    for run in contest.left():
        values = [accuracy(run, split) for split in ("train", "validation", "test")]
        ledger.add(run, Figures(*values, seconds=0.1))
    return contest
