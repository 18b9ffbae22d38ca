"""Models under torch's default dtype of another model: nothing that headwise counts, draws or keeps follows it."""

import pytest
import torch
from grids import part_of_grid
from methods.weight_hosts import ids, loss_of, model

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY

# a causal layer with three heads takes these not
NAMES = [name for name in shelf.__all__ if name not in ("LSA", "FeatScale", "DifferentialAttention")]
SOME = ["DropHead", "EntropyPenalty", "RelaxedAttention", "ReAttention", "QKClip", "QKRates", "SSMax", "Decorrelation"]


@pytest.fixture
def default():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", part_of_grid(NAMES, SOME))
def test_two_steps_are_those_under_single_precision(name, default):
    # more keys than bfloat16 can count
    batches = [ids(length=259, seed=seed) for seed in range(2)]
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        default(torch.float32)
        net = model()
        net.layers[0].c_attn.weight.data.mul_(3)
        default(dtype)
        handle = headwise.regularize(net, REGISTRY[name](), example=ids())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for batch in batches:
            loss = loss_of(net, batch) + handle.loss()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            handle.after_step()
            losses.append(loss.detach())
        kept = [*net.parameters(), *net.buffers()]
        assert {x.dtype for x in kept if x.is_floating_point()} == {torch.float32}
        found.append(torch.stack(losses))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-6)
