"""Count how far one call goes: the files of the house whose functions it enters.

python docs/flow.py

Runs each way at toy size, on the CPU, and writes docs/flow.csv, from which docs/draw_house.py takes its table.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType

import draw_house

# Methods of three kinds: of logits, of weights and of values.
METHODS = "Temperature() + DropHead(p=0.2) + NeuTRENO(strength=0.6)"


@dataclass
class Trace:
    """The modules of the house in the order in which calls enter them."""

    house: draw_house.House
    entered: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Return the modules entered, each once."""
        return list(dict.fromkeys(self.entered))

    def parts(self) -> list[str]:
        """Return the parts with doors that were entered, each once."""
        return list(dict.fromkeys(part for one in self.files if (part := self.house.part(one)) in draw_house.DOORS))

    def rooms(self) -> list[str]:
        """Return the rooms entered, each once."""
        return list(dict.fromkeys(map(self.house.room, self.files)))


@contextmanager
def traced(house: draw_house.House) -> Iterator[Trace]:
    """Note each module of the house whose functions are called in this thread, none for being imported."""
    for module in house.files:
        # some need libraries that are not installed
        with suppress(ImportError):
            import_module(module)
    modules = {str(path): module for module, path in house.files.items()}
    trace = Trace(house)

    def enter(frame: FrameType, event: str, argument: object) -> None:
        module = modules.get(frame.f_code.co_filename) if event == "call" else None
        if module and trace.entered[-1:] != [module]:
            trace.entered.append(module)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        yield trace
    finally:
        sys.setprofile(before)


def forward(house: draw_house.House) -> Trace:
    """Trace a training forward of a Llama of two layers with three methods, after a first one that sets up."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import headwise
    from headwise.attend import parse

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    headwise.regularize(model, *parse(METHODS))
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens)
    with traced(house) as trace:
        model(tokens)
    return trace


def compare(house: draw_house.House) -> Trace:
    """Trace a study of the digits from `compare` to its page: two arms, two seeds, one epoch."""
    import headwise
    from headwise.lab.studies.digits import Digits

    task = Digits(epochs=1, train_size=50, test_size=50)
    with tempfile.TemporaryDirectory() as folder, traced(house) as trace:
        headwise.compare(task, methods=["DropHead(p=0.2)"], seeds=2, out=f"{folder}/study", silent=True)
    return trace


WAYS: dict[str, Callable[[draw_house.House], Trace]] = {
    "a Llama's forward with three methods": forward,
    "a study, from `compare` to its page": compare,
}


def counted(way: str) -> dict[str, str]:
    """Return the row of a way: the rooms with a door, the number of files, and of the folders that they are in."""
    trace = WAYS[way](draw_house.House())
    return {
        "way": way,
        "rooms": " ".join(trace.parts()),
        "files": str(len(trace.files)),
        "folders": str(len(trace.rooms())),
    }


def main() -> None:
    """Print the counts and write them."""
    rows = [counted(way) for way in WAYS]
    for row in rows:
        print(f"{row['way']}: {row['files']} files in {row['folders']} folders of {row['rooms']}")
    with draw_house.FLOW.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
