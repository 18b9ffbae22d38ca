"""Parameter groups: attention's weights apart, vectors undecayed, every trainable parameter once."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers as tf
from torch import nn

import headwise
from headwise import GatedOutput, QKNorm, SigmaReparam

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}


def grouped(model: nn.Module, **options) -> dict[str, set[str]]:
    """Return the names in each group, after checking that each trainable parameter stands in one group once."""
    decay = {"attention": 0.02, "mlp": 0.3, "other": 0.1, "undecayed": 0.0}
    options = {"mlp_weight_decay": 0.3} | options
    if options["mlp_weight_decay"] is None:
        decay["mlp"] = 0.1
    groups = headwise.parameter_groups(model, lr=0.1, weight_decay=0.1, attention_weight_decay=0.02, **options)
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(group["weight_decay"] == decay[group["name"]] and group["lr"] == 0.1 for group in groups)
    torch.optim.AdamW(groups)
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}


def test_attention_of_a_transformers_model_is_found_by_its_sites():
    model = tf.AutoModelForCausalLM.from_config(
        tf.GptOssConfig(**BASE, num_key_value_heads=2, head_dim=8, num_local_experts=2, pad_token_id=0, eos_token_id=1)
    )
    groups = grouped(model)
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert groups["attention"] == {f"model.layers.{i}.self_attn.{k}.weight" for i in range(2) for k in kinds}
    assert "model.layers.0.self_attn.sinks" in groups["undecayed"]
    assert "model.layers.0.self_attn.q_proj.bias" in groups["undecayed"]
    assert "model.norm.weight" in groups["undecayed"]
    assert "model.embed_tokens.weight" in groups["other"]
    experts = {f"model.layers.{i}.mlp.experts.{k}_proj" for i in range(2) for k in ("gate_up", "down")}
    assert groups["mlp"] == experts | {f"model.layers.{i}.mlp.router.weight" for i in range(2)}


def test_the_output_beside_a_bert_layer_is_attention():
    groups = grouped(tf.AutoModel.from_config(tf.BertConfig(**BASE)))
    assert "encoder.layer.0.attention.output.dense.weight" in groups["attention"]
    kinds = ("intermediate", "output")
    assert groups["mlp"] == {f"encoder.layer.{i}.{kind}.dense.weight" for i in range(2) for kind in kinds}
    assert "pooler.dense.weight" in groups["other"]
    assert "encoder.layer.0.attention.output.LayerNorm.weight" in groups["undecayed"]


def test_fused_and_unreachable_layers_count_as_attention():
    model = timm.create_model("swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), embed_dim=12, num_heads=(1, 1, 2, 2))
    groups = grouped(model)
    assert {"layers.0.blocks.0.attn.qkv.weight", "layers.0.blocks.0.attn.proj.weight"} <= groups["attention"]
    assert "layers.0.blocks.0.attn.relative_position_bias_table" in groups["undecayed"]
    assert groups["mlp"] == {f"layers.{i}.blocks.0.mlp.fc{k}.weight" for i in range(4) for k in (1, 2)}
    assert {"layers.1.downsample.reduction.weight", "patch_embed.proj.weight", "head.fc.weight"} <= groups["other"]


def test_logit_scales_and_class_tokens_do_not_decay():
    model = timm.create_model("swinv2_tiny_window8_256", depths=(1, 1, 1, 1), embed_dim=12, num_heads=(1, 1, 2, 2))
    assert "layers.0.blocks.0.attn.logit_scale" in grouped(model)["undecayed"]
    part = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = tf.CLIPModel(
        tf.CLIPConfig(
            text_config={**part, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2},
            vision_config={**part, "image_size": 16, "patch_size": 8},
            projection_dim=8,
        )
    )
    undecayed = grouped(model)["undecayed"]
    assert {"logit_scale", "vision_model.embeddings.class_embedding"} <= undecayed


def test_methods_parameters_are_in_the_groups_of_a_regularized_model():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3, img_size=32)
    headwise.regularize(model, SigmaReparam(), QKNorm(), GatedOutput(per="element"), example=torch.randn(1, 3, 32, 32))
    groups = grouped(model)
    home = "blocks.0.attn"
    assert f"{home}.qkv.parametrizations.weight.original" in groups["attention"]
    assert f"{home}.proj.parametrizations.weight.original" in groups["attention"]
    assert f"{home}.qkv.parametrizations.weight.0.gamma" in groups["undecayed"]
    assert f"{home}.headwise.QKNorm.query_gain" in groups["undecayed"]
    gate = [name for name in groups["other"] if ".headwise.GatedOutput." in name]
    assert gate and groups["mlp"] == {"blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"}


def test_a_shared_parameter_stands_once_and_a_frozen_one_nowhere():
    model = tf.AutoModelForMaskedLM.from_config(tf.BertConfig(**BASE))
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    groups = grouped(model)
    assert "bert.embeddings.word_embeddings.weight" in groups["other"]
    assert "bert.embeddings.position_embeddings.weight" not in set().union(*groups.values())


def test_a_linear_with_one_output_still_decays_and_multihead_attention_is_known():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Linear(16, 1))
    groups = grouped(model)
    assert groups["attention"] == {"0.self_attn.in_proj_weight", "0.self_attn.out_proj.weight"}
    assert groups["mlp"] == {"0.linear1.weight", "0.linear2.weight"}
    assert "1.weight" in groups["other"]


class Block(nn.Module):
    """A whole block that calls fused attention itself: its MLP is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.qkv, self.out, self.mlp = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, offset):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x + offset).chunk(3, -1))
        o = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.mlp(self.out(o))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x, 1.0)


def test_what_cannot_be_told_asks_for_an_example_and_takes_it():
    with pytest.raises(
        ValueError, match=r"cannot tell attention's weights from others: block could not be run.*pass example="
    ):
        grouped(Stack())
    groups = grouped(Stack(), example=torch.randn(2, 3, 8))
    assert groups["attention"] == {"block.qkv.weight", "block.out.weight"}
    assert groups["mlp"] == {"block.mlp.weight"}


def test_the_mlp_of_an_encoder_decoder_is_found_in_both_halves():
    config = tf.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, vocab_size=32, decoder_start_token_id=0
    )
    groups = grouped(tf.T5ForConditionalGeneration(config))
    halves = {"encoder": 1, "decoder": 2}
    assert groups["mlp"] == {
        f"{half}.block.{i}.layer.{last}.DenseReluDense.{name}.weight"
        for half, last in halves.items()
        for i in range(2)
        for name in ("wi", "wo")
    }
    torch_groups = grouped(nn.Transformer(16, 2, 1, 1, 24, batch_first=True))
    assert torch_groups["mlp"] == {f"{half}.layers.0.linear{i}.weight" for half in halves for i in (1, 2)}


class AttentionOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))


def test_a_head_is_no_mlp_and_a_decay_for_what_is_not_there_is_refused():
    groups = grouped(AttentionOnly(), mlp_weight_decay=None)
    assert groups["other"] == {"embed.weight", "head.weight"} and "mlp" not in groups
    with pytest.raises(
        ValueError, match=r"mlp_weight_decay=0\.3: no attention layer of AttentionOnly has an MLP in its"
    ):
        headwise.parameter_groups(AttentionOnly(), 0.1, 0.1, mlp_weight_decay=0.3)
    with pytest.raises(ValueError, match=r"attention_weight_decay=0\.3: Linear has no attention layer"):
        headwise.parameter_groups(nn.Linear(2, 2), 0.1, 0.1, 0.3)


def test_a_negative_decay_is_refused():
    with pytest.raises(ValueError, match=r"attention_weight_decay must be at least 0, got -0\.1"):
        headwise.parameter_groups(nn.Linear(2, 2), 0.1, 0.1, -0.1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_regularized_model_inside_adapters_has_its_groups():
    peft = pytest.importorskip("peft")
    model = tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**BASE, pad_token_id=0))
    headwise.regularize(model, headwise.DropHead())
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    groups = grouped(adapted)
    assert len(groups["attention"]) == 4 and all("q_proj.lora_" in name for name in groups["attention"])
    assert len(groups["mlp"]) == 4 and all("up_proj.lora_" in name for name in groups["mlp"])


def test_layers_of_linear_attention_are_attention_and_whole_matrices():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=20, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config)
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.1)
    (attention,) = (group["params"] for group in groups if group["name"] == "attention")
    linear = model.model.layers[0].linear_attn
    assert {id(linear.in_proj_qkvz.weight), id(linear.out_proj.weight)} <= set(map(id, attention))
    with pytest.raises(ValueError, match=r'Muon\(per="head"\): model\.layers\.0\.linear_attn .*per="matrix" needs no'):
        headwise.Muon(groups)
    assert "linear_attn.in_proj_qkvz.weight: mlp 1 × (48, 16)" in headwise.Muon(groups, per="matrix").report()
