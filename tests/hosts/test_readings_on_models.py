"""A penalty that reads logits, on models with sinks, soft-caps and learned biases of positions."""

import pytest
import torch
from tiny_models import FAMILIES
from tiny_timm import WHOLE, images, made

import headwise
from headwise import AttentionSink, ZLoss

LOADED = [(name, how) for name in ("GptOss", "Gemma2", "T5", "Llama") for how in FAMILIES[name].implementations]


@pytest.mark.parametrize(("name", "implementation"), LOADED)
def test_a_tiny_z_loss_moves_no_logits(name, implementation):
    family = FAMILIES[name]
    model, batch = family.build(implementation).train(), family.batch()
    plain = family.logits(model, batch)
    headwise.regularize(model, ZLoss(strength=1e-8))
    torch.testing.assert_close(family.logits(model, batch), plain, rtol=1e-5, atol=2e-5)


def test_a_tiny_z_loss_leaves_a_sink_where_it_is():
    family = FAMILIES["Llama"]
    model, batch = family.build().train(), family.batch()
    handle = headwise.regularize(model, AttentionSink(logit=2.0))
    plain = family.logits(model, batch)
    handle.remove()
    headwise.regularize(model, AttentionSink(logit=2.0), ZLoss(strength=1e-8))
    torch.testing.assert_close(family.logits(model, batch), plain, rtol=1e-5, atol=2e-5)


def t5():
    model, batch = FAMILIES["T5"].build(), FAMILIES["T5"].batch()
    return model, lambda: model(**batch), "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"


def swin():
    model, batch = FAMILIES["Swin"].build(), FAMILIES["Swin"].batch()
    batch = {key: x.double() for key, x in batch.items()}
    tables = [name for name, _ in model.named_parameters() if "relative_position_bias_table" in name]
    return model, lambda: model(**batch), tables[0]


def beit():
    model = made(WHOLE["BEiT"])
    return model, lambda: model(images().double()), "blocks.1.attn.relative_position_bias_table"


@pytest.mark.parametrize("make", [t5, swin, beit], ids=lambda make: make.__name__)
def test_a_learned_bias_gets_the_gradient_of_what_is_read(make):
    model, forward, name = make()
    model.double().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # One layer that makes the bias itself: T5's norms are fp32, which differences through layers show.
    layer = name.rpartition(".")[0].removesuffix(".relative_attention_bias")
    handle = headwise.regularize(model, ZLoss(strength=1.0), where=lambda site: layer.startswith(site.name))
    bias = model.get_parameter(name)

    def penalty():
        forward()
        return handle.loss()

    (gradient,) = torch.autograd.grad(penalty(), bias)
    direction, step = torch.randn(bias.shape, generator=torch.Generator().manual_seed(0), dtype=bias.dtype), 1e-3
    found = []
    for sign in (1, -1):
        with torch.no_grad():
            bias += sign * step * direction
        found.append(penalty().item())
        with torch.no_grad():
            bias -= sign * step * direction
    # Learned strengths are fp32, and so is the penalty's factor.
    assert (gradient * direction).sum().item() == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-3)
