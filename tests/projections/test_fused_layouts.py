"""The layout of a fused projection is seen on the site, and nothing is left changed by looking."""

from __future__ import annotations

import pytest
import torch
from projections import fused_toys as toys
from projections.fused_toys import HEADS, SIZE, WIDTH, FusedToy
from torch import nn

from headwise.attend import projections
from headwise.attend.core.site import Site
from headwise.attend.projections import ProjectionError

ORDERS = [toys.stacked, toys.reversed_stack, toys.interleaved, toys.entries_first, toys.heads_then_entries]


@pytest.mark.parametrize("past", [False, True], ids=["called", "read past the module"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_blocks_hold_the_weights_the_layer_was_made_of(order, past):
    toy = FusedToy(order)
    toy.past = past
    found = projections.find(Site("layer", toy))
    for block, weight, bias in zip((found.q, found.k, found.v), toy.parts, toy.biases, strict=True):
        assert torch.equal(block.by_head(), weight)
        assert torch.equal(block.bias(), bias.flatten())
    assert found.verified
    assert torch.equal(found.o.by_head().flatten(0, 1), toy.after.weight.t())


@pytest.mark.parametrize("order", [toys.stacked, toys.interleaved], ids=lambda order: order.__name__)
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_keys_and_values_are_told_apart(order, groups):
    toy = FusedToy(order, groups=groups, bias=False)
    found = projections.find(Site("layer", toy))
    assert (found.heads, found.kv_heads) == (HEADS, groups)
    for block, weight in zip((found.q, found.k, found.v), toy.parts, strict=True):
        assert torch.equal(block.by_head(), weight)
        assert block.bias() is None


def test_rows_in_no_known_order_are_refused_by_name():
    with pytest.raises(ProjectionError, match=r"layer has one layer\.mix with 96 rows for q, k, v in no known order"):
        projections.find(Site("layer", FusedToy(toys.shuffled)))


@pytest.mark.parametrize("past", [False, True])
def test_looking_leaves_no_trace(past):
    toy = FusedToy(toys.interleaved).train()
    toy.past = past
    before = {name: value.clone() for name, value in toy.state_dict().items()}
    plain = nn.functional.scaled_dot_product_attention
    state = torch.get_rng_state()
    projections.find(Site("layer", toy))
    assert all(torch.equal(value, before[name]) for name, value in toy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert toy.training
    assert nn.functional.scaled_dot_product_attention is plain
    assert not toy._forward_hooks
    assert not toy._forward_pre_hooks
    assert not toy.mix._forward_hooks
    assert all(p.grad is None for p in toy.parameters())


class TwoInputs(nn.Module):
    """A layer that cannot be run on one tensor alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FusedToy(toys.interleaved)

    def forward(self, x, positions):
        return self.inner(x + positions)


def test_a_layer_that_needs_more_inputs_asks_for_an_example_and_takes_it():
    layer = TwoInputs()
    model = nn.ModuleDict({"layer": layer})
    model.forward = lambda x: layer(x, torch.ones(WIDTH))
    with pytest.raises(ProjectionError, match=r"layer could not be run \(TypeError.*pass example= with a batch"):
        projections.find(Site("layer", layer))
    found = projections.find(Site("layer", layer), model, example=torch.randn(5, 6, WIDTH))
    assert torch.equal(found.k.by_head(), layer.inner.parts[1])


class Explicit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).softmax(-1) @ v


def test_a_layer_that_computes_attention_itself_is_refused_with_the_reason():
    with pytest.raises(ProjectionError, match="computes attention itself: neither F"):
        projections.find(Site("layer", Explicit()))


class LowRank(FusedToy):
    """Queries through two factors."""

    def __init__(self) -> None:
        super().__init__(toys.stacked)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return super().forward(x + self.up(self.down(x)))


def test_factors_in_a_row_are_refused_with_the_remedy():
    with pytest.raises(
        ProjectionError, match=r"makes its q by layer\.mix and layer\.down and layer\.up; merge adapters"
    ):
        projections.find(Site("layer", LowRank()))


class Convolved(nn.Module):
    """Queries, keys and values by a convolution."""

    def __init__(self, groups: int, kernel: int) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, kernel, groups=groups, padding=kernel // 2)

    def forward(self, x):
        q, k, v = (y.unflatten(1, (3, -1)).mT for y in self.qkv(x.mT).chunk(3, 1))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_pointwise_convolution_is_a_projection_and_a_grouped_one_is_refused_by_name():
    layer = Convolved(1, 1)
    found = projections.find(Site("layer", layer))
    assert torch.equal(found.v.weight(), layer.qkv.weight[2 * WIDTH :, :, 0])
    assert found.v.heads == 3
    assert found.o is None
    with pytest.raises(
        ProjectionError, match=r"layer\.qkv, a grouped convolution \(groups=3\), in which heads share no matrix"
    ):
        projections.find(Site("layer", Convolved(3, 1)))
    with pytest.raises(ProjectionError, match=r"a convolution over \(3,\), which is not a single matrix"):
        projections.find(Site("layer", Convolved(1, 3)))


def test_a_missing_block_is_named_with_the_method_that_needs_it():
    found = projections.find(Site("layer", Convolved(1, 1)))
    with pytest.raises(
        ProjectionError, match="NuclearDecay needs the output projection; layer has no output projection"
    ):
        found.need("qkvo", "NuclearDecay")


def test_scaling_a_head_of_an_interleaved_block_touches_its_rows_and_bias_alone():
    toy = FusedToy(toys.interleaved)
    found = projections.find(Site("layer", toy))
    found.k.scale_(torch.tensor([1.0, 0.5, 1.0, 3.0]))
    scale = torch.tensor([1.0, 0.5, 1.0, 3.0])[:, None]
    assert torch.equal(found.k.by_head(), toy.parts[1] * scale[..., None])
    assert torch.equal(found.k.bias(), (toy.biases[1] * scale).flatten())
    assert torch.equal(found.q.by_head(), toy.parts[0])
    assert torch.equal(found.v.by_head(), toy.parts[2])
    assert found.k.weight().shape[0] == SIZE * HEADS


def test_a_fused_matrix_is_multiplied_a_few_times_only():
    toy = FusedToy(toys.stacked)
    ran = []
    forward = nn.functional.linear

    def counted(x, weight, bias=None):
        ran.append(tuple(weight.shape))
        return forward(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", counted)
        projections.find(Site("layer", toy))
    # Dozens of perturbations are tried; only those that look for the maker of q, k and v compute it again.
    assert ran and len(ran) <= 12
    assert all("forward" not in module.__dict__ for module in toy.modules())
