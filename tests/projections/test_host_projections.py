"""Projections of real host layers: what a block holds is what the layer computes with."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers as tf
from grids import part_of_grid
from torch import nn

from headwise.attend import hosts, projections
from headwise.attend.core.site import Site
from headwise.attend.projections import Projections, capture

BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PATCH = {"image_size": 16, "patch_size": 8}
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**BASE, num_key_value_heads=2),
    "gpt2": lambda: tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
    "neox": lambda: tf.GPTNeoXConfig(**BASE, bos_token_id=1, eos_token_id=2),
    "phi3": lambda: tf.Phi3Config(**BASE, **IDS, num_key_value_heads=2),
    "modernbert": lambda: tf.ModernBertConfig(**BASE, **IDS, cls_token_id=1, sep_token_id=2),
    "bert": lambda: tf.BertConfig(**BASE),
    "distilbert": lambda: tf.DistilBertConfig(dim=32, hidden_dim=48, n_layers=1, n_heads=4, vocab_size=64),
    "bigcode": lambda: tf.GPTBigCodeConfig(
        n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2
    ),
    "vit": lambda: tf.ViTConfig(**BASE, **PATCH),
    "t5": lambda: tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64),
    "opt": lambda: tf.OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64),
}
LAYOUTS = {
    "neox": "interleaved by head (H, 3, d) as q, k, v",
    "gpt2": "stacked (3, H, d) as q, k, v, transposed",
    "phi3": "stacked, unequal blocks as q, k, v",
    "modernbert": "stacked (3, H, d) as q, k, v",
    "bigcode": "stacked, unequal blocks as q, k, v",
}


def found_in(model: nn.Module) -> list[Site]:
    return [f.site for f in hosts.find(model) if f.adapter is not None and not f.site.is_cross]


def assert_blocks_compute_what_attention_receives(
    site: Site, found: Projections, model: nn.Module, run, kinds: str
) -> None:
    inputs: list[torch.Tensor] = []

    def keep(_, args, kwargs):
        inputs.append(args[0] if args else kwargs["hidden_states"])

    handle = site.module.register_forward_pre_hook(keep, with_kwargs=True)
    with capture.untouched(model), capture.seen(site.module) as calls:
        run()
    handle.remove()
    for kind in kinds:
        block, got = getattr(found, kind), getattr(calls[0], kind)
        want = inputs[0] @ block.weight().t() + (0 if block.bias() is None else block.bias())
        want = want.unflatten(-1, (block.heads, block.head_dim)).transpose(1, 2)
        torch.testing.assert_close(got[:, :: got.shape[1] // block.heads], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_layers_compute_with_their_blocks(name):
    torch.manual_seed(0)
    model = tf.AutoModel.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    batch = (
        {"pixel_values": torch.randn(1, 3, 16, 16)}
        if name == "vit"
        else {"input_ids": torch.tensor([[5, 9, 3, 7, 11]])}
    )
    if name == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    site = found_in(model)[0]
    found = projections.find(site, model)
    assert not found.missing
    assert found.layout == LAYOUTS.get(name, "separate")
    # Rotary models turn q and k after the projection; OPT scales q.
    kinds = "v" if name in ("llama", "neox", "phi3", "modernbert") else "kv" if name == "opt" else "qkv"
    assert_blocks_compute_what_attention_receives(site, found, model, lambda: model(**batch), kinds)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224", "beit_base_patch16_224"])
def test_timm_layers_compute_with_their_blocks(name):
    torch.manual_seed(0)
    model = timm.create_model(name, depth=1, embed_dim=48, num_heads=3, img_size=28 if "14" in name else 32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    site = Site("blocks.0.attn", model.blocks[0].attn)
    image = torch.randn(1, 3, *model.patch_embed.img_size)
    found = projections.find(site, model, image)
    assert found.layout == "stacked (3, H, d) as q, k, v"
    if "vit" not in name:
        assert found.q.bias_name == "q_bias"
        assert found.k.bias() is None
        assert found.v.bias() is site.module.v_bias
    assert_blocks_compute_what_attention_receives(
        site, found, model, lambda: model(image), "v" if "eva" in name else "qkv"
    )


@pytest.mark.parametrize("name", part_of_grid(["twins_svt_small", "hiera_tiny_224"], ["twins_svt_small"]))
def test_windowed_timm_layers_are_seen_through_an_example(name):
    model = timm.create_model(name)
    sites = found_in(model)
    for site in sites[:2]:
        found = projections.find(site, model, torch.randn(1, 3, 224, 224))
        assert found.verified
        assert not found.missing
        assert found.heads == site.module.num_heads if name.startswith("twins") else site.module.heads


@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 12, "vdim": 20}, {"bias": False}, {"add_bias_kv": True}],
    ids=["plain", "kdim and vdim", "no bias", "bias_k"],
)
def test_multihead_attention_is_known_by_definition(options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=True, **options)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    found = projections.find(Site("attn", module))
    x, y, z = (
        torch.randn(2, 5, 16),
        torch.randn(2, 6, options.get("kdim", 16)),
        torch.randn(2, 6, options.get("vdim", 16)),
    )
    split = lambda t, b: (
        (t @ b.weight().t() + (0 if b.bias() is None else b.bias())).unflatten(-1, (4, 4)).transpose(1, 2)
    )
    q, k, v = split(x, found.q), split(y, found.k), split(z, found.v)
    if "add_bias_kv" in options:
        more = [t.view(1, 1, 4, 4).expand(2, 1, 4, 4).transpose(1, 2) for t in (module.bias_k, module.bias_v)]
        k, v = torch.cat([k, more[0]], 2), torch.cat([v, more[1]], 2)
    o = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    want = o @ found.o.weight() + (0 if found.o.bias() is None else found.o.bias())
    torch.testing.assert_close(module(x, y, z)[0], want, rtol=1e-5, atol=1e-5)


def test_scaling_keys_scales_the_learned_extra_key_along():
    module = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    before = module.bias_k.detach().clone()
    projections.find(Site("attn", module)).k.scale_(torch.tensor([0.5, 1.0]))
    assert torch.equal(module.bias_k[..., :4], before[..., :4] * 0.5)
    assert torch.equal(module.bias_k[..., 4:], before[..., 4:])
