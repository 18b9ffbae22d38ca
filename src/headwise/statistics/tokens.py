"""Figures of a set of tokens, wherever in the model they are read."""

import torch
from torch import Tensor

from headwise.statistics.reading import Reading
from headwise.statistics.tally import Tally

NO_STREAM = "the host does not show the residual stream"


def cosine(reading: Reading, tokens: Tensor) -> Tally:
    """Averages the cosine between all pairs of different real tokens (B,T,C): (‖Σ x̂_i‖² − T) / (T(T − 1)), in O(T·C)."""
    unit = torch.nn.functional.normalize(reading.without_padding(tokens), dim=-1, eps=1e-30)
    together = unit.sum(1).square().sum(-1)
    # A token of zeros has no direction: it adds nothing to either sum.
    alone = torch.linalg.vector_norm(unit, dim=(1, 2)).square()
    count = reading.real_of(tokens).sum(-1)
    found = (together - alone) / (count * (count - 1))
    return Tally.over_samples(torch.where(count > 1, found, torch.nan)[:, None])


def share_about_the_mean(reading: Reading, tokens: Tensor) -> Tally:
    """Divides ‖x − mean of tokens‖_F by ‖x‖_F for the real tokens (B,T,C)."""
    x, real = reading.without_padding(tokens), reading.real_of(tokens)
    mean = x.sum(1, keepdim=True) / real.sum(-1).clamp_min(1)[:, None, None]
    whole = torch.linalg.vector_norm(x, dim=(1, 2))
    about = x - mean
    if reading.real_queries is not None:
        about = about * real[..., None]
    about = torch.linalg.vector_norm(about, dim=(1, 2))
    return Tally.over_samples(torch.where(whole > 0, about / whole, torch.nan)[:, None])
