"""Translation with torch's own transformer: byte-pair encoding, batches by length, greedy decoding, BLEU.

headwise compare --task translation_task.py:Translation --data multi30k --method "baseline | norm=pre"

The folder of --data contains train, val and test in both languages, one sentence per line: train.de, train.en ...
"""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import nn

from headwise.study import Batch, Evaluation, Metric, Task

PAD, BEGIN, END = 0, 1, 2
FILES = {"train": "train", "validation": "val", "test": "test"}


class Translation(Task):
    languages: tuple[str, str] = ("de", "en")
    vocabulary: int = 2000
    depth: int = 2  # layers per side
    norm: Literal["post", "pre"] = "post"
    dim: int = 64
    longest: int = 100  # tokens per sentence
    tokens_per_batch: int | None = 4000
    warmup: float = 200
    schedule: str = "inverse_sqrt"
    clip: float | None = 1.0
    metrics = (Metric("bleu", "BLEU", unit="%", failure=0.0), Metric("loss", "nats per token", higher_is_better=False))
    decides_on = "test/greedy"

    def files(self):
        return [path for name in FILES.values() for path in self.pair(name)]

    def pair(self, name):
        return [(self.folder or Path()) / f"{name}.{language}" for language in self.languages]

    def model(self):
        return Translator(self.vocabulary, self.dim, self.depth, self.norm == "pre", self.longest)

    def data(self, split):
        sides, found = [path.read_text("utf-8").splitlines() for path in self.pair(FILES[split])], {}
        if len(sides[0]) != len(sides[1]):
            raise ValueError(f"{split} has {len(sides[0])} and {len(sides[1])} lines")
        for name, lines in zip(("source", "target"), sides, strict=True):
            coded = [[*code.ids, END] for code in self.coder().encode_batch(lines)]
            if (most := max(map(len, coded))) > self.longest:
                raise ValueError(f"a sentence of {split} has {most} tokens; set longest={most}")
            found[name] = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in coded], True, PAD)
        return found

    def coder(self):
        return train_coder(tuple(map(str, self.pair("train"))), self.vocabulary)

    def lengths(self, examples):
        return torch.stack([(side != PAD).sum(1) for side in examples.values()]).amax(0)

    def batch(self, examples, generator):  # padding is cut to the longest sentence of each side
        source, target = (side[:, : int((side != PAD).sum(1).max())] for side in examples.values())
        return Batch({"source": source, "target": nn.functional.pad(target[:, :-1], (1, 0), value=BEGIN)}, target)

    def loss(self, output, targets):
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=PAD)

    def weight(self, targets):  # the weight of a batch's mean loss: its real tokens
        return (targets != PAD).sum()

    def evaluations(self):
        return [Evaluation("test/greedy", "test", output=self.decode, count=self.count_ngrams, finish=finish_bleu)]

    def decode(self, model, inputs):
        written = torch.full_like(inputs["source"][:, :1], BEGIN)
        for _ in range(min(2 * inputs["source"].shape[1] + 5, self.longest)):
            word, ended = model(inputs["source"], written)[:, -1:].argmax(-1), (written == END).any(1, keepdim=True)
            written = torch.cat([written, word.masked_fill(ended, PAD)], 1)
        return written[:, 1:]

    def count_ngrams(self, output, targets):
        ours, theirs = ([x.split() for x in self.coder().decode_batch(ids.tolist())] for ids in (output, targets))
        found = {"words": torch.tensor([sum(map(len, ours)), sum(map(len, theirs))])}
        for n in range(1, 5):
            hits = sum((ngrams(a, n) & ngrams(b, n)).total() for a, b in zip(ours, theirs, strict=True))
            found[f"{n}-grams"] = torch.tensor([hits, sum(ngrams(a, n).total() for a in ours)])
        return found


def ngrams(words, n):
    return Counter(zip(*(words[at:] for at in range(n)), strict=False))


def finish_bleu(sums):  # Papineni et al. 2002: over the whole split, without smoothing
    shares = torch.stack([sums[f"{n}-grams"][0] / sums[f"{n}-grams"][1].clamp(min=1) for n in range(1, 5)]).double()
    ours, theirs = sums["words"].double()
    return {"bleu": shares.log().mean().exp() * (1 - theirs / ours.clamp(min=1)).clamp(max=0).exp()}


@cache
def train_coder(paths, vocabulary):
    made, special = ByteLevelBPETokenizer(), ["[PAD]", "[BEGIN]", "[END]"]
    made.train(list(paths), vocab_size=vocabulary, special_tokens=special, show_progress=False)
    return made


class Translator(nn.Module):
    def __init__(self, vocabulary, dim, depth, pre, longest):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(longest, dim)
        self.body = nn.Transformer(dim, 4, depth, depth, 2 * dim, 0.1, batch_first=True, norm_first=pre)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, source, target):
        hidden = [self.words(x) + self.places.weight[: x.shape[1]] for x in (source, target)]
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device).isinf()
        masks = {"src_key_padding_mask": source == PAD, "memory_key_padding_mask": source == PAD, "tgt_mask": causal}
        return self.head(self.body(*hidden, tgt_key_padding_mask=(target == PAD) | (target == END), **masks))
