from pathlib import Path

from torch import cat, nn, tensor

from headwise.study import Task


class CharLM(Task):  # headwise compare --task char_lm_task.py:CharLM
    text: str = "input.txt"  # settings: everything that changes a number is a field
    context: int = 64
    dim: int = 64
    batch_size: int = 32

    def files(self):  # their content becomes part of every run's identity
        return [Path(self.text)]

    def model(self):
        return CharModel(len(set(Path(self.text).read_text())), self.context, self.dim)

    def data(self, split):
        text = Path(self.text).read_text()
        code = {character: number for number, character in enumerate(sorted(set(text)))}
        tenths = tensor([code[c] for c in text]).unfold(0, self.context + 1, self.context).tensor_split(10)
        part = cat({"train": tenths[:8], "validation": tenths[8:9], "test": tenths[9:]}[split])
        return part[:, :-1], part[:, 1:]

    def loss(self, output, targets):  # (B, T, characters) and (B, T); nats per character
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


class CharModel(nn.Module):
    def __init__(self, characters, context, dim):
        super().__init__()
        self.letters, self.places = nn.Embedding(characters, dim), nn.Embedding(context, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(dim, characters)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.letters(ids) + self.places.weight, mask=mask, is_causal=True))
