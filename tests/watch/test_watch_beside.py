"""Linear attention and routers are listed with what can be read of them, and that is read."""

import torch
from small_models import HOSTS, fresh
from torch import nn
from transformers import MixtralConfig, MixtralModel, Qwen3NextConfig, Qwen3NextModel

import headwise

NAMES = ["gradient_norm", "update_ratio", "matrix_norm", "max_logit"]


def watched(model, run):
    watch = headwise.watch(model.train(), every=1, statistics=NAMES, on_alert=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(model).sum().backward()
    optimizer.step()
    watch.step()
    records, reasons = watch.records(), watch.reasons()
    watch.remove()
    listed = {name: why["statistics of heads"] for name, why in reasons.items() if "statistics of heads" in why}
    return records, listed


def test_a_model_that_alternates_linear_attention_and_experts_lists_both():
    torch.manual_seed(0)
    model = Qwen3NextModel(
        Qwen3NextConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=8, intermediate_size=16, layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
            num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        )
    )  # fmt: skip
    records, listed = watched(model, lambda m: m(input_ids=torch.arange(16).view(2, 8)).last_hidden_state)
    assert set(listed) == {"layers.0.linear_attn", "layers.0.mlp.gate", "layers.1.mlp.gate"}
    linear = listed["layers.0.linear_attn"]
    assert linear.startswith("Qwen3NextGatedDeltaNet mixes tokens without a softmax over keys; gradient_norm and ")
    assert "the parameters outside all blocks and matrix_norm reads" in linear and "out_proj" in linear
    assert "sends tokens to experts, and has no heads; gradient_norm" in listed["layers.1.mlp.gate"]
    assert "read it with layers.1" in listed["layers.1.mlp.gate"]
    # what is said to be read is read
    read = {(r["statistic"], r["site"]) for r in records}
    assert {("gradient_norm", "outside"), ("update_ratio", "layers.1"), ("max_logit", "layers.1.self_attn")} <= read
    assert ("matrix_norm", "layers.0.linear_attn.out_proj") in read


def test_routers_are_told_by_their_class_or_by_the_experts_beside_them():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = MixtralModel(MixtralConfig(vocab_size=30, num_key_value_heads=2, num_local_experts=3, **sizes))
    _, listed = watched(model, lambda m: m(input_ids=torch.arange(16).view(2, 8)).last_hidden_state)
    assert [name.rpartition(".")[2] for name in listed] == ["gate"]

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            return sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))

    own = nn.Sequential(fresh(HOSTS["own"]).blocks, Experts())
    own.forward = lambda x: own[1](own[0][1](own[0][0](x)))
    records, listed = watched(own, lambda m: m(torch.randn(2, 5, 32)))
    assert list(listed) == ["1.gate"] and "matrix_norm reads 1.gate" in listed["1.gate"]
    assert ("matrix_norm", "1.gate") in {(r["statistic"], r["site"]) for r in records}


def test_a_model_of_softmax_attention_lists_nothing_else():
    assert watched(fresh(HOSTS["own"]), lambda m: HOSTS["own"].run(m))[1] == {}
