"""Sentiment of sentences with a transformers model, which needs no wrapper; attention masks exclude the padding.

headwise compare --task sst2_task.py:SST2 --data sst2 --method "DropHead(p=0.1)"

The folder of --data contains train.tsv, dev.tsv and test.tsv (or test-labeled.tsv, because GLUE's own test.tsv has
no labels) of SST-2: a header, then a sentence, a tab and 0 or 1 in each line.
"""

import csv
from collections import Counter
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, BertConfig

from headwise.study import Batch, Task

PAD, UNKNOWN, CLASS = 0, 1, 2
FILES = {"train": ("train.tsv",), "validation": ("dev.tsv",), "test": ("test-labeled.tsv", "test.tsv")}


class SST2(Task):
    words: int = 8000  # the most frequent ones of the training sentences
    layers: int = 2
    dim: int = 64
    epochs: int = 3
    batch_size: int = 64
    warmup: float = 0.1
    schedule: str = "linear"
    clip: float | None = 1.0
    failure = 0.5  # chance

    def files(self):
        return [self.file(split) for split in FILES]

    def file(self, split):  # the first of its names that exists
        paths = [(self.folder or Path()) / name for name in FILES[split]]
        return next((path for path in paths if path.is_file()), paths[-1])

    def model(self):
        config = BertConfig(
            vocab_size=self.words + 3,
            hidden_size=self.dim,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            intermediate_size=2 * self.dim,
            max_position_embeddings=128,
            pad_token_id=PAD,
            num_labels=2,
        )
        return AutoModelForSequenceClassification.from_config(config)

    def data(self, split):  # a dict of tensors; "labels" are the targets
        rows = read(self.file(split))
        known = vocabulary(self.file("train"), self.words)
        coded = [[CLASS, *(known.get(word, UNKNOWN) for word in sentence.split())][:128] for sentence, _ in rows]
        ids = torch.full((len(rows), max(map(len, coded))), PAD)
        for row, codes in zip(ids, coded, strict=True):
            row[: len(codes)] = torch.tensor(codes)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor([y for _, y in rows])}

    def lengths(self, examples):  # sentences of similar length share a batch
        return examples["attention_mask"].sum(1)

    def batch(self, examples, generator):  # padding is cut to the longest of the batch
        longest = int(self.lengths(examples).max())
        inputs = {name: examples[name][:, :longest] for name in ("input_ids", "attention_mask")}
        return Batch(inputs, examples["labels"])


def read(path):
    with open(path, newline="", encoding="utf-8") as stream:
        return [(row["sentence"], int(row["label"])) for row in csv.DictReader(stream, delimiter="\t", quoting=3)]


@cache
def vocabulary(path, words):
    counts = Counter(word for sentence, _ in read(path) for word in sentence.split())
    return {word: number for number, (word, _) in enumerate(counts.most_common(words), 3)}
