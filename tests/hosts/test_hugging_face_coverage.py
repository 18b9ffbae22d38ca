"""Windowed layers draw per sample, and every attention-like module is listed: regularized, or unreachable and why."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from hugging_face_calls import calls_of
from tiny_explicit import UNREACHABLE, plain_model
from tiny_models import FAMILIES
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise
from headwise import DropColumn, DropHead, NeuTRENO, RelaxedAttention, ValueResidual
from headwise.attend.hosts.finding import sites
from headwise.attend.regularizing.regularize import regularize

# Windows


def windows_of(model: nn.Module, method: headwise.Method, layer: int) -> Tensor:
    """Return which heads stay in each window of a layer, (samples, windows, heads)."""
    family = FAMILIES["Swin"]
    site = sites(model)[layer]
    seen: list[Tensor] = []
    hook = site.module.o_proj.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    handle = regularize(model, method)
    model.train()(**family.batch())
    handle.remove()
    hook.remove()
    heads = seen[0].unflatten(-1, (site.heads, -1)).abs().sum((1, 3)) > 0
    return heads.unflatten(0, (3, -1))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_all_windows_of_a_sample_share_its_draw(layer: int) -> None:
    kept = windows_of(FAMILIES["Swin"].build(), DropHead(p=0.5), layer)
    assert kept.shape[1] > 1
    assert (kept == kept[:, :1]).all()
    assert len({tuple(sample[0].tolist()) for sample in kept}) > 1, "all samples drew the same"


@pytest.mark.parametrize("method", [NeuTRENO(strength=0.6), ValueResidual(mix=0.5)], ids=lambda m: type(m).__name__)
def test_methods_that_carry_tokens_refuse_windows(method: headwise.Method) -> None:
    with pytest.raises(ValueError, match=rf"(?s){type(method).__name__}.*windows"):
        regularize(FAMILIES["Swin"].build(), method, where=["encoder.layers.0.blocks.1.attention"])


def test_cells_of_other_regions_are_no_allowed_keys_in_shifted_windows() -> None:
    allowed = {call.site.name: call.allowed() for call in calls_of(FAMILIES["Swin"], RelaxedAttention(gamma=0.5))}
    plain, shifted = (allowed[f"encoder.layers.0.blocks.{i}.attention"] for i in (0, 1))
    assert plain is None or plain.all()
    assert not shifted.all()
    assert shifted.any(-1).all()


def test_a_part_of_a_windowed_model_cannot_be_called_alone() -> None:
    model = FAMILIES["Swin"].build().train()
    regularize(model, DropHead(p=0.5))
    embedded = model.embeddings(FAMILIES["Swin"].batch()["pixel_values"])[0]
    with pytest.raises(RuntimeError, match="attends in windows"):
        model.encoder(embedded, (8, 8))


# Coverage


@pytest.mark.parametrize("name", UNREACHABLE)
def test_families_with_an_attention_of_their_own_are_refused_by_name(name: str) -> None:
    make, modules = UNREACHABLE[name]
    model = make()
    with pytest.raises(ValueError, match="none of the attention layers") as caught:
        regularize(model, DropColumn())
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(" ")[0] for line in lines] == list(modules)
    assert all("cannot be reached: it computes its own attention" in line and "F.scaled_dot" in line for line in lines)


def test_a_model_with_both_kinds_reports_both() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    pictures = {**sizes, "image_size": 16, "patch_size": 4}
    model = plain_model(
        "GitModel", vocab_size=61, **sizes, vision_config=pictures, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )()
    report = regularize(model, DropColumn()).report()
    names = [row.name for row in report.rows]
    assert len(names) == len(set(names)) == 4
    assert {row.name: row.status for row in report.rows} == {
        name: "unreachable" if name.startswith("encoder") else "regularized" for name in names
    }


def test_esm_is_on_the_interface() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = plain_model(
        "EsmModel", vocab_size=33, mask_token_id=32, pad_token_id=1, position_embedding_type="rotary", **sizes
    )()
    ids = torch.randint(4, 30, (2, 9), generator=torch.Generator().manual_seed(0))
    plain = model(input_ids=ids).last_hidden_state
    handle = regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True))
    assert (model(input_ids=ids).last_hidden_state - plain).abs().max() <= 1e-6
    handle.set(RelaxedAttention, gamma=0.9)
    assert (model(input_ids=ids).last_hidden_state - plain).abs().max() > 1e-4
    assert [site.rope for site in sites(model)] == [True, True]


def test_an_interface_without_a_config_is_named() -> None:
    class LooseAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return ALL_ATTENTION_FUNCTIONS["sdpa"](self, x, x, x, None)[0]

    with pytest.raises(
        ValueError, match=r"LooseAttention\) cannot be reached.*keeps no config to route by: set module.config"
    ):
        regularize(nn.Sequential(LooseAttention()), DropColumn())


def test_a_layer_without_rotary_positions_among_rotary_ones_is_told():
    config = tf.SmolLM3Config(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = tf.SmolLM3ForCausalLM(config)
    assert [site.rope for site in sites(model)] == [bool(layer.self_attn.use_rope) for layer in model.model.layers]
    assert [site.rope for site in sites(model)] == [True, True, True, False]
