"""Single attention layers of transformers: what their calls may look like, and which function is their own."""

from __future__ import annotations

import copy

import pytest
import torch
from rounding import assert_same_to_rounding
from tiny_models import FAMILIES
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headwise import RelaxedAttention
from headwise.attend.hosts.layers.declared import is_cross
from headwise.attend.hosts.transformers.adapter import describe, eager_function
from headwise.attend.hosts.transformers.call import routed
from headwise.attend.regularizing.regularize import regularize


def routed_layer(name: str, implementation: str) -> nn.Module:
    model = FAMILIES[name].build(implementation)
    regularize(model, RelaxedAttention(gamma=0.3, matched_inference=True))
    return next(m for m in model.modules() if "_headwise" in m.__dict__)


@pytest.mark.bits
def test_the_eager_functions_drop_nothing_in_evaluation() -> None:
    layer = routed_layer("BERT", "eager")
    q, k, v = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(routed(layer, q, k, v, None, dropout=0.5)[0], routed(layer, q, k, v, None)[0])
    assert not torch.equal(routed(layer.train(), q, k, v, None, dropout=0.5)[0], routed(layer, q, k, v, None)[0])


@pytest.mark.bits
def test_learned_queries_may_come_once_for_the_batch() -> None:
    layer = routed_layer("BERT", "sdpa")
    k, v = torch.randn(2, 3, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 4, 2, 8)
    assert_same_to_rounding(routed(layer, q, k, v, None)[0], routed(layer, q.expand(3, -1, -1, -1), k, v, None)[0])


@pytest.mark.bits
def test_keys_may_come_in_fewer_heads_than_values() -> None:
    layer = routed_layer("BERT", "sdpa")
    q, k, v = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    whole = k[:, :2].repeat_interleave(2, dim=1)
    assert_same_to_rounding(routed(layer, q, k[:, :2], v, None)[0], routed(layer, q, whole, v, None)[0])


def test_each_class_falls_back_to_its_own_eager_function() -> None:
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4VisionAttention

    assert eager_function(Llama4VisionAttention).__name__ == "vision_eager_attention_forward"
    assert eager_function(Llama4TextAttention).__name__ == "eager_attention_forward"


class ChoosingAttention(nn.Module):
    """Prepares its mask by asking which implementation runs, as the sparse attention of DeepSeek V3.2 does."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config, self.is_causal = config, False
        self.num_heads, self.head_dim = 4, 8
        self.q_proj = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q = self.q_proj(hidden_states).unflatten(-1, (4, 8)).transpose(1, 2)
        mask = indices = torch.ones(q.shape[2], q.shape[2]).tril().bool()[None, None]
        if self.config._attn_implementation in ("eager", "sdpa"):
            indices = None
        else:
            mask = None
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return interface(self, q, q, q, mask, indices=indices)[0].flatten(2)


@pytest.mark.bits
def test_a_layer_that_prepares_its_mask_by_the_implementation_prepares_the_hosts() -> None:
    config = FAMILIES["Llama"].make(0.0)[1]
    config._attn_implementation = "sdpa"
    model, x = nn.Sequential(ChoosingAttention(config)), torch.randn(2, 5, 32)
    plain = model(x)
    handle = regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True))
    assert (model(x) - plain).abs().max() <= 1e-6
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    handle.remove()
    assert torch.equal(model(x), plain)


def test_grouped_heads_are_read_off_the_keys_matrix() -> None:
    layer = ChoosingAttention(FAMILIES["Llama"].make(0.0)[1])
    layer.k_proj = nn.Linear(32, 16)
    assert (
        describe(
            "layers.0.attn", layer, {"layers.0.attn": layer, "layers.0": layer, "layers": layer, "": layer}
        ).kv_heads
        == 2
    )


def test_cross_attention_is_told_by_the_module_around_it_in_its_layer() -> None:
    layer = nn.Linear(1, 1)
    assert is_cross("encoder.layer.0.crossattention.attention", layer)
    assert is_cross("model.decoder.layers.3.encoder_attn", layer)
    assert not is_cross("cross_encoder.layer.0.attention.self", layer)
