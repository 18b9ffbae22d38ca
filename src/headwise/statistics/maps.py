"""Whole maps of attention, for a picture: the one place where the T×N matrix is made."""

import torch
from torch import Tensor

from headwise.statistics.queries import Queries
from headwise.statistics.reading import Reading
from headwise.statistics.scan import Logits, precise_dtype
from headwise.statistics.softmax_block import Memory, SoftmaxBlock


@torch.no_grad()
def first_map(reading: Reading) -> Tensor:
    """Return the weights (H,T,N) of the first sample as the softmax gives them; rows of padding are 0."""
    queries, dtype = Queries.of(reading), precise_dtype(reading)
    memory = Memory(reading.heads * reading.queries * reading.keys, dtype, reading.q.device)
    rows = slice(0, reading.queries)
    with torch.autocast(reading.q.device.type, enabled=False):
        block = SoftmaxBlock.of(Logits(reading, queries, dtype), slice(0, 1), rows, memory)
        weights = block.weights(queries.valid[:1].to(dtype))
    return weights[0].float()
