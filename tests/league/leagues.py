"""Small leagues for the tests: folders of entries and worlds, and finished worlds made of numbers."""

from headwise_papers.league.world_folder import FILE

from headwise_verdict.files.durable import write_json
from headwise_verdict.results.digests import sealed
from headwise_verdict.results.folder import ledger_of
from headwise_verdict.results.records import RunEntry

ENTRY = 'arm = {arm!r}\nkind = "{kind}"\nreason = "a test"\n[search]\nlearning_rate = [0.5, 2.0]\n{more}'
TASK = '''
import torch
from torch import nn

from headwise.study import Task, VisionTransformer


class Dots(Task):
    """Classify 4×4 images by their brightest quarter."""

    epochs: int = 2
    batch_size: int = 16
    dim: int = 8
    heads: int = 2
    fails: bool = False

    def model(self):
        return VisionTransformer(
            classes=4, image_size=4, channels=1, patch=2, dim=self.dim, depth=1, heads=self.heads,
            head_dim=4, mlp_dim=8,
        )

    def data(self, split):
        sizes = {"train": 32, "validation": 24, "test": 24}
        images = torch.randn(sizes[split], 1, 4, 4, generator=torch.Generator().manual_seed(len(split)))
        return images, nn.functional.avg_pool2d(images, 2).flatten(1).argmax(1)

    def batch(self, inputs, generator):
        if self.fails and generator is not None:
            raise RuntimeError("this entry breaks")
        return inputs
'''
ENTRIES = {
    "plain": ("baseline", "plain", ""),
    "smaller": ("baseline | dim=4", "control", ""),
    "drop_head": ("DropHead(p=0.2)", "method", "p = [0.1, 0.5]\n"),
}


def write_source(folder, entries=ENTRIES, worlds=("dots",), settings=""):
    """Write a folder with entries/ and worlds/, and the task of the worlds beside them."""
    for part in ("entries", "worlds"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "dots.py").write_text(TASK)
    for name, (arm, kind, more) in entries.items():
        (folder / "entries" / f"{name}.toml").write_text(ENTRY.format(arm=arm, kind=kind, more=more))
    for world in worlds:
        text = (
            f'title = "{world.title()}"\nsymptom = "a test"\ntask = "{folder / "dots.py"}:Dots"\nseconds = '
            f'6.0\nreason = "a test"\n{settings}'
        )
        (folder / "worlds" / f"{world}.toml").write_text(text)
    return folder


def finished_world(folder, name, figures, *, kinds, validation=None, higher=True, cost=None):
    """Write a finished world: the accuracy of every seed by entry, "plain" first; None as figures is an entry that
    failed."""
    folder.mkdir(parents=True)
    ready = {entry: values for entry, values in figures.items() if values is not None}
    arms = {entry: "baseline" if entry == "plain" else f"arm of {entry}" for entry in figures}
    seeds, runs = len(ready["plain"]), []
    for entry, values in ready.items():
        for seed, value in enumerate(values):
            if value is None:
                continue
            identity = f"{entry}-{seed}"
            metrics = {
                "test/accuracy": value,
                "test/calibration": 0.1,
                "cost/seconds_per_step": (cost or {}).get(entry, 1.0),
            }
            run = folder / "runs" / identity
            run.mkdir(parents=True)
            result = {
                "format": 2,
                "status": "finished",
                "arm": arms[entry],
                "seed": seed,
                "hash": identity,
                "metrics": metrics,
                "digests": {},
            }
            write_json(run / "config.json", {"arm": arms[entry], "seed": seed, "purpose": "final"})
            write_json(run / "result.json", sealed(result))
            runs.append(RunEntry(hash=identity, arm=arms[entry], seed=seed))
    metric = {"name": "accuracy", "label": "accuracy", "higher_is_better": higher, "unit": "%", "failure": 0.1}
    other = {"name": "calibration", "label": "calibration error", "higher_is_better": False}
    write_json(
        folder / "study.json",
        {
            "format": 2,
            "name": f"league-{name}",
            "title": name,
            "arms": [arms[entry] for entry in ready],
            "baseline": "baseline",
            "seeds": list(range(seeds)),
            "primary": "test/accuracy",
            "metrics": [metric, other],
            "settings": {},
            "runs": [run.model_dump() for run in runs],
            "ledger": ledger_of(runs),
        },
    )
    entries = {
        entry: {
            "kind": kinds.get(entry, "method"),
            "arm": arms[entry],
            "digest": "d",
            "status": "failed" if values is None else "chosen",
            "chosen": "" if values is None else arms[entry],
            "rate": None if values is None else 0.001,
            "validation": (validation or {}).get(entry),
            "tried": [],
            "why": "it broke" if values is None else "",
        }
        for entry, values in figures.items()
    }
    write_json(
        folder / FILE,
        {
            "world": name,
            "title": name.title(),
            "symptom": "a test",
            "task": "t",
            "settings": {},
            "trials": 6,
            "entries": entries,
        },
    )
    return folder
