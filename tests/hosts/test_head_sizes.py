"""Sizes of heads that a module does not declare: its weights tell them, with and without an example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise
from headwise.attend.methods import DifferentialAttention, GatedOutput, QKNorm

WIDTH, HEADS, GROUPS, SIZE = 32, 4, 2, 8


class Grouped(nn.Module):
    """Grouped queries under names that declare nothing but the number of heads."""

    def __init__(self, layout: str, repeats: bool = False, values: int = SIZE) -> None:
        super().__init__()
        self.num_heads, self.layout, self.repeats, self.values = HEADS, layout, repeats, values
        if layout == "separate":
            self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, GROUPS * SIZE)
            self.v_proj = nn.Linear(WIDTH, GROUPS * values)
        elif layout == "pairs":
            self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * GROUPS * SIZE)
        else:
            self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE)
        self.out_proj = nn.Linear(HEADS * values, WIDTH)

    def forward(self, x):
        if self.layout == "separate":
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        elif self.layout == "pairs":
            q, (k, v) = self.to_q(x), self.to_kv(x).chunk(2, -1)
        else:
            q, k, v = self.qkv(x).split((WIDTH, GROUPS * SIZE, GROUPS * SIZE), -1)
        q, k, v = (y.unflatten(-1, (-1, d)).transpose(1, 2) for y, d in ((q, SIZE), (k, SIZE), (v, self.values)))
        if self.repeats:
            k, v = (y.repeat_interleave(HEADS // GROUPS, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=not self.repeats)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def shapes(model):
    return {name: tuple(p.shape) for name, p in model.named_parameters() if "headwise" in name}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("layout", ["separate", "pairs", "fused"])
def test_grouped_queries_have_the_same_parameters_with_and_without_an_example(layout, repeats):
    x = torch.randn(2, 5, WIDTH)
    found = []
    for example in (None, x):
        model = nn.Sequential(Grouped(layout, repeats))
        assert headwise.sites(model)[0].kv_heads == GROUPS
        handle = headwise.regularize(model, QKNorm(), example=example)
        model(x)
        found.append((shapes(model), handle.fitted[0].site.kv_heads))
    assert found[0] == found[1] == ({"0.headwise.QKNorm.query_gain": (HEADS,), "0.headwise.QKNorm.key_gain": (2,)}, 2)


class Unclear(Grouped):
    """Two more matrices, so that the one for keys and values is not the only one left."""

    def __init__(self, repeats: bool) -> None:
        super().__init__("pairs", repeats)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.after(super().forward(self.before(x)))


def test_a_layout_that_cannot_be_read_asks_for_an_example_instead_of_a_guess():
    x = torch.randn(2, 5, WIDTH)
    model = nn.Sequential(Unclear(repeats=False))
    with pytest.raises(ValueError, match=r"kv_heads.*pass example=batch"):
        headwise.regularize(model, QKNorm())
    headwise.regularize(model, QKNorm(), example=x)
    assert shapes(model)["0.headwise.QKNorm.key_gain"] == (GROUPS,)


def test_pairs_of_heads_under_grouped_queries_compute_the_same_with_and_without_an_example():
    x, outs = torch.randn(2, 5, WIDTH), []
    for example in (None, x):
        torch.manual_seed(0)
        model = nn.Sequential(Grouped("separate"))
        headwise.regularize(model, DifferentialAttention(), example=example)
        outs.append(model(x))
    assert torch.equal(*outs)


def latent(values):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=values,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.parametrize("values", [6, 16])
@pytest.mark.parametrize("given", [False, True])
def test_values_of_another_size_than_queries_fit_methods_that_learn_per_channel(values, given):
    batch = {"input_ids": torch.randint(0, 50, (1, 5), generator=torch.Generator().manual_seed(0))}
    for method, name, size in (
        (GatedOutput(per="element"), "weight", HEADS * values),
        (DifferentialAttention(), "gain", 2 * values),
    ):
        model = latent(values)
        headwise.regularize(model, method, example=batch if given else None)
        assert [site.value_dim for site in headwise.sites(model)] == [values] * 2
        parameter = dict(model.named_parameters())[f"model.layers.0.self_attn.headwise.{type(method).__name__}.{name}"]
        assert len(parameter) == size
        model(**batch, labels=batch["input_ids"]).loss.backward()
        assert parameter.grad.abs().max() > 0


def test_a_gate_at_the_start_of_one_leaves_latent_attention_as_it_is():
    batch = {"input_ids": torch.arange(5)[None]}
    model = latent(6).eval()
    plain = model(**batch).logits
    headwise.regularize(model, GatedOutput(per="element", start="one"))
    torch.testing.assert_close(model(**batch).logits, plain)


def test_own_modules_with_wider_values_are_read_off_their_weights():
    x = torch.randn(2, 5, WIDTH)
    for example in (None, x):
        model = nn.Sequential(Grouped("separate", values=12))
        headwise.regularize(model, DifferentialAttention(), example=example)
        assert shapes(model)["0.headwise.DifferentialAttention.gain"] == (24,)
        assert model(x).shape == x.shape
