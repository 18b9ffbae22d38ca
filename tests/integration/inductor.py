"""A step under inductor held against the same step in eager."""

import torch
from small_models import Attention
from torch import nn

import headwise
from headwise.attend.core.method import REGISTRY


def steps(run, handle, model):
    """Return the loss and all gradients of two steps, with the draws of a run that just began."""
    handle.load_state({**handle.state(), "step": 0, "counters": {f.site.name: 0 for f in handle.fitted}})
    found = []
    for _ in range(2):
        model.zero_grad()
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(5))
        loss = run(x).square().mean() + handle.loss()
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    return found


def assert_inductor_gives_the_numbers_of_eager(name):
    """Compile one graph of a bare attention layer with the method on it, forward and backward."""
    torch._dynamo.reset()
    cls = REGISTRY[name]
    torch.manual_seed(0)
    # Nothing but attention: every further operation is C++ to be compiled. A carried value needs a second layer.
    model = nn.Sequential(*(Attention(8, 2) for _ in range(2 if cls.carries else 1))).train()
    method = cls() if cls.penalizes else cls(**cls.strong)
    handle = headwise.regularize(model, method, example=torch.randn(2, 5, 8))
    eager = steps(model, handle, model)
    compiled = steps(torch.compile(model, fullgraph=True), handle, model)
    torch._dynamo.reset()
    for (loss, grads), (wanted, wanted_grads) in zip(compiled, eager, strict=True):
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-5)
        assert grads.keys() == wanted_grads.keys()
        for key, grad in wanted_grads.items():
            torch.testing.assert_close(grads[key], grad, rtol=1e-3, atol=1e-4, msg=key)
