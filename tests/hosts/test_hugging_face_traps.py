"""What goes wrong silently with transformers: keywords, masks, shared configs, other kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from hugging_face_calls import calls_of
from rounding import assert_same_to_rounding
from tiny_models import FAMILIES
from torch import Tensor, nn

import headwise
from headwise import DropColumn, DropHead, RelaxedAttention
from headwise.attend.hosts.transformers.call import routed
from headwise.attend.regularizing.regularize import regularize

LLAMA = FAMILIES["Llama"]
BOTH = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


def logits(model: nn.Module, batch: dict[str, Tensor], **more) -> Tensor:
    return model(**batch, **more).logits


# Keywords


@BOTH
def test_an_unknown_keyword_raises_by_name(implementation: str) -> None:
    model = LLAMA.build(implementation)
    handle = regularize(model, DropColumn())
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.self_attn passes the keyword.*relative_bias.*will not drop silently"
    ):
        model(**LLAMA.batch(), relative_bias=torch.zeros(1))
    handle.remove()
    model(**LLAMA.batch(), relative_bias=torch.zeros(1))


def test_bookkeeping_keywords_pass() -> None:
    model = LLAMA.build().train()
    batch = LLAMA.batch()
    plain = logits(model, batch)
    regularize(model, DropColumn(p=0.0))
    kept = {
        "num_items_in_batch": torch.tensor(30),
        "output_router_logits": True,
        "seq_idx": torch.zeros(3, 10),
        "max_length_q": 10,
    }
    assert torch.allclose(logits(model, batch, **kept), plain, atol=1e-5)


def test_softcap_sinks_and_position_bias_reach_the_methods() -> None:
    gemma, sinks, t5 = (calls_of(FAMILIES[name], RelaxedAttention()) for name in ("Gemma2", "GptOss", "T5"))
    assert [call.softcap for call in gemma] == [1.0] * 3
    assert all(call.sinks is call.site.module.sinks for call in sinks)
    own = [call for call in t5 if not call.site.is_cross]
    assert len({float(call.mask[0, 0, 0, 0].detach()) for call in own if "encoder" in call.site.name}) == 1
    assert all(call.mask.is_floating_point() and call.mask.shape[1] == 4 and call.mask.requires_grad for call in own)


def test_an_eager_function_that_does_more_than_its_keywords_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    own = modeling_llama.eager_attention_forward

    def sharper(module, query, key, value, mask, scaling, dropout=0.0, **kwargs):
        return own(module, query, key, value, mask, 2 * scaling, dropout, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", sharper)
    model = LLAMA.build("eager").train()
    regularize(model, DropColumn(p=0.1))
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.self_attn \(LlamaAttention\) has its own eager attention that does more"
    ):
        model(**LLAMA.batch())


# Configs


@pytest.mark.bits
def test_a_model_of_the_same_config_object_is_not_routed() -> None:
    cls, config = LLAMA.make(0.0)
    config._attn_implementation = "sdpa"
    first, second = cls(config).train(), cls(config).train()
    second.load_state_dict(first.state_dict())
    batch = LLAMA.batch("left")
    plain, before = logits(second, batch), copy.deepcopy(config.to_dict())
    regularize(first, RelaxedAttention(gamma=0.9))
    assert not torch.equal(logits(first, batch), plain)
    assert torch.equal(logits(second, batch), plain)
    assert first.config is second.config is config
    assert config.to_dict() == before
    assert config._attn_implementation == "sdpa"


@pytest.mark.bits
def test_saving_writes_the_plain_model(tmp_path) -> None:
    model = LLAMA.build()
    batch = LLAMA.batch("right")
    model.save_pretrained(tmp_path / "plain")
    plain = logits(model, batch)
    regularize(model, DropHead(p=0.5), RelaxedAttention(gamma=0.5))
    model.save_pretrained(tmp_path / "regularized")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "regularized" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    again = type(model).from_pretrained(tmp_path / "regularized", attn_implementation="sdpa")
    # The same kernel, on weights that may stand unaligned in the file they were read from.
    assert_same_to_rounding(logits(again.eval(), batch), plain)


def test_loading_a_plain_checkpoint_into_a_regularized_model_explains() -> None:
    model = LLAMA.build()
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    handle = regularize(model, DropHead(p=0.5))
    assert model.state_dict().keys() == plain.keys()
    model.load_state_dict(plain)
    handle.remove()
    regularize(model, headwise.AttnScale())
    with pytest.raises(RuntimeError, match=r"weights come from a plain model.*AttnScale\(\).*before regularize\(\)"):
        model.load_state_dict(plain)


# Implementations


def test_naming_our_implementation_by_hand_is_answered_with_the_call_to_make() -> None:
    model = LLAMA.build("sdpa")
    layer, q = model.model.layers[0].self_attn, torch.zeros(1, 4, 2, 8)
    with pytest.raises(
        RuntimeError, match=r"headwise\.regularize\(model, \.\.\.\) instead of .*attn_implementation='headwise'"
    ):
        routed(layer, q, q, q, None)


def test_the_implementation_may_change_later() -> None:
    model = LLAMA.build("sdpa").train()
    batch = LLAMA.batch("left")
    handle = regularize(model, RelaxedAttention(gamma=0.5))
    before = logits(model, batch)
    model.set_attn_implementation("eager")
    assert torch.allclose(
        logits(model, batch)[batch["attention_mask"].bool()], before[batch["attention_mask"].bool()], atol=1e-5
    )
    handle.remove()
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_the_key_alone_explains_itself() -> None:
    model = LLAMA.build()
    regularize(model, DropColumn()).remove()
    model.set_attn_implementation("headwise")
    with pytest.raises(
        RuntimeError, match=r"LlamaAttention asks for.*'headwise' but no method is fitted.*headwise\.regularize"
    ):
        model(**LLAMA.batch())
    with pytest.raises(
        ValueError, match=r"is 'headwise', which regularize\(\) alone sets.*set_attn_implementation\('sdpa'\)"
    ):
        regularize(model, DropColumn())


def test_a_mask_made_under_the_key_is_the_same_as_the_hosts() -> None:
    from transformers.masking_utils import create_causal_mask

    model = LLAMA.build()
    regularize(model, DropColumn())
    batch = LLAMA.batch("left")
    embedded = model.get_input_embeddings()(batch["input_ids"])
    own = model.model.layers[0].self_attn.config
    assert own._attn_implementation == "headwise"
    masks = [
        create_causal_mask(
            config=c, inputs_embeds=embedded, attention_mask=batch["attention_mask"], past_key_values=None
        )
        for c in (own, model.config)
    ]
    assert masks[0].dtype == torch.bool and not masks[0].all()
    assert torch.equal(*masks)


def test_a_mask_that_is_no_matrix_raises() -> None:
    model = LLAMA.build().train()
    regularize(model, DropColumn())
    layer = model.model.layers[0].self_attn
    x = torch.randn(3, 10, 32)
    positions = model.model.rotary_emb(x, torch.arange(10)[None])
    with pytest.raises(
        RuntimeError, match=r"passes a mask that is torch.int64 of shape \(3, 10\); supported are bool and float"
    ):
        layer(x, positions, torch.ones(3, 10, dtype=torch.long))


@BOTH
def test_attentions_are_given_where_they_are_asked_for(implementation: str) -> None:
    model = LLAMA.build(implementation)
    batch = LLAMA.batch("right")
    plain = LLAMA.build("eager")(**batch, output_attentions=True).attentions
    regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True))
    given = model(**batch, output_attentions=True).attentions
    assert len(given) == len(plain) == 3
    for ours, theirs in zip(given, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert model(**batch).get("attentions") is None
    if implementation == "eager":
        model.config.output_attentions = True
        assert len(model(**batch).attentions) == 3
