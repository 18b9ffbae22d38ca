"""A small watched model and made-up figures, for the tests of records, logs and alerts."""

import torch
from small_models import HOSTS, fresh

import headwise

VECTORS = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))
NAMES = ["entropy_share", "max_logit", "token_cosine", "output_norm"]


def figure(statistic, value, step=0, head=2, site="blocks.3.attn"):
    return {"site": site, "depth": 3, "head": head, "step": step, "statistic": statistic, "value": value}


def watched(**settings):
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, **{"every": 1, "on_alert": None, "statistics": NAMES, **settings})
    return model, watch


def sharpen(model, factor):
    """Makes the keys of every head large, as a training that runs away does."""
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight[32:64] *= factor
            block.attn.qkv.bias[32:64] *= factor


def read(model, watch):
    model(VECTORS)
    watch.step()
