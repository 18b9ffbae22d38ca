"""Example run: one run of the model on an example, that tells heads and shapes and changes nothing."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.attention.fitted_layer import FittedLayer
from headwise.core.shared_state import SharedState
from headwise.hosts.layers.candidate import Candidate
from headwise.hosts.sdpa.samples import run_and_learn


def run(model: nn.Module, example: Any) -> Any:
    """Run the model once in eval mode without gradients; modes, buffers and random state are as before afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    # Some models write buffers in evaluation too: caches, step counts.
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        # Evaluation: no dropout, and no running mean of a batch norm that an example should not move.
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            if isinstance(example, dict) or hasattr(example, "keys"):
                return model(**{k: example[k] for k in example})
            if isinstance(example, tuple | list):
                return model(*example)
            return model(example)
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def learn_from_example(model: nn.Module, found: list[Candidate], example: Any) -> None:
    """Run the model on `example` and write what each site's call showed onto the sites.

    Raises:
        ValueError: where the model does not run on the example.
    """
    standing = []
    with ExitStack() as stack:
        for f in found:
            if f.adapter is not None:
                look = FittedLayer(f.site, [], SharedState(bare=True), f.adapter)
                look.attach()
                stack.callback(look.detach)
                standing.append((f.site, look, (f.site.heads, f.site.windowed)))
                f.site.heads, f.site.windowed = None, False
        try:
            run_and_learn(found, example, partial(run, model))
        except Exception as error:
            for site, _, (heads, windowed) in standing:
                site.heads, site.windowed = heads, windowed
            raise ValueError(f"the model did not run on example ({type(error).__name__}: {error})") from error
    for site, look, (heads, windowed) in standing:
        site.heads, site.windowed = heads, windowed
        for name, value in look.seen.items():
            setattr(site, name, value)
