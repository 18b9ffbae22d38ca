"""Which rows a rotary position turns into each other: what is said of a model is what its own attention gets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision_stub  # noqa: F401  (before timm)
import transformers as tf

from headwise import sites
from headwise.attend import projections
from headwise.health.statistics.weights.weight_reading import rotary_pairs

FLAT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


def timm_model(name, **settings):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, **FLAT, **settings), {"x": torch.randn(2, 3, 32, 32)}


def language_model(cls, **settings):
    torch.manual_seed(0)
    config = cls.config_class(**{**SIZES, **settings}, pad_token_id=1)
    return cls._from_config(config, attn_implementation="sdpa"), {"input_ids": torch.randint(4, 50, (2, 9))}


ROTARY = {
    "EVA-02": lambda: timm_model("eva02_tiny_patch14_224"),
    "EVA-02, halves": lambda: timm_model("eva02_tiny_patch14_224", rope_rotate_half=True),
    "rope ViT": lambda: timm_model("vit_small_patch16_rope_224"),
    "mixed rope ViT": lambda: timm_model("vit_small_patch16_rope_mixed_224"),
    "DINOv3": lambda: timm_model("vit_small_patch16_dinov3"),
    "Llama": lambda: language_model(tf.LlamaModel),
    "Cohere": lambda: language_model(tf.CohereModel),
    "Phi": lambda: language_model(tf.PhiModel, partial_rotary_factor=0.5),
    "Falcon": lambda: language_model(tf.FalconModel, alibi=False),
    "ESM": lambda: language_model(tf.EsmModel, position_embedding_type="rotary", mask_token_id=2),
}
OTHERS = {
    "EVA without": lambda: timm_model("eva_giant_patch14_224"),
    "NaFlexViT without": lambda: timm_model("naflexvit_base_patch16_gap"),
    "Falcon with ALiBi": lambda: language_model(tf.FalconModel, alibi=True),
    "ESM with absolute positions": lambda: language_model(
        tf.EsmModel, position_embedding_type="absolute", mask_token_id=2
    ),
}


def moved_together(model, batch, site, monkeypatch):
    """Gives the sets of rows of head 0's queries that move when one row of the projection does, as fused attention sees
    them."""
    # Finding the projections runs the layer too.
    q, seen = projections.of(site).q, []
    fused = F.scaled_dot_product_attention

    def look(q, *args, **kwargs):
        seen.append(q.detach()[:, 0])
        return fused(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", look)
    found = set()
    with torch.no_grad():
        model(**batch)
        plain = seen[0]
        for row in range(8):
            weight = getattr(q.module, q.name)
            place = weight[torch.arange(len(weight))[q.rows][row]]
            kept = place.clone()
            seen.clear()
            place.add_(torch.randn_like(place))
            model(**batch)
            place.copy_(kept)
            far = (seen[0] - plain).abs().amax((0, 1)) > 1e-5
            found.add(tuple(far.nonzero().flatten().tolist()))
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("name", ROTARY)
def test_the_pairs_are_those_that_the_models_own_queries_show(name, monkeypatch):
    model, batch = ROTARY[name]()
    site = sites(model.eval())[0]
    assert site.rope
    said = {tuple(sorted(set(pair))) for pair in rotary_pairs(site, 8).tolist()}
    assert said == moved_together(model, batch, site, monkeypatch)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_turn_is_not_taken_as_rotary(name, monkeypatch):
    model, batch = OTHERS[name]()
    site = sites(model.eval())[0]
    assert {len(rows) for rows in moved_together(model, batch, site, monkeypatch)} == {1}
    assert not site.rope
