"""timm models whose attention is reached everywhere: neutral is neutral, strong acts, removal leaves no trace."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_timm import DROPPING, WHOLE, images, made, run

import headwise
from headwise import AttnScale, DropColumn, DropHead, DropKey, InputNoise, NeuTRENO, RelaxedAttention
from headwise.attend.attention import softmax

NEUTRAL = (
    DropHead(p=0.0),
    DropKey(p=0.0, unit="column"),
    RelaxedAttention(gamma=0.0),
    InputNoise(scale=0.0, unit="std"),
)
OUTSIDE = (DropHead(p=0.0), InputNoise(scale=0.0, unit="std"))
BOTH = [(name, {}) for name in WHOLE] + [(name, {"attn_drop_rate": 0.1}) for name in DROPPING]
# Calls with windows in a dimension of their own are made with four dimensions, for which torch may pick another kernel.
WITH_WINDOWS = ("Hiera", "Twins")


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.bits
@pytest.mark.parametrize(("name", "settings"), BOTH)
@pytest.mark.parametrize("training", [True, False])
def test_a_neutral_setting_changes_no_bit(name, settings, training):
    model, x = made(WHOLE[name], **settings), images()
    before = state(model)
    plain = run(model, x, training=training)
    if settings and training:
        assert not torch.equal(run(model, x, training=True, seed=4), plain), "the dropout does nothing here"
    model.load_state_dict(before)
    # Under dropout, what edits the weights runs on the matrix: another kernel, and the same dropout.
    handle = headwise.regularize(model, *(OUTSIDE if settings else NEUTRAL))
    out = run(model, x, training=training)
    handle.remove()
    model.load_state_dict(before)
    handle = headwise.regularize(model, *NEUTRAL)
    close = run(model, x, training=training)
    handle.remove()
    # Each layer is within 1e-6; these weights are large, and the layers above make more of it.
    torch.testing.assert_close(close, plain, rtol=0, atol=1e-5)
    if name in WITH_WINDOWS:
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-5)
    else:
        assert torch.equal(out, plain)


@pytest.mark.parametrize("name", WHOLE)
def test_every_layer_is_reached_and_a_strong_setting_acts_on_each(name):
    model, x = made(WHOLE[name]), images()
    sites = headwise.sites(model)
    assert len(sites) == len([m for m in model.modules() if hasattr(m, "fused_attn")])
    before = state(model)
    plain = run(model, x, training=True).detach()
    for site in sites:
        model.load_state_dict(before)
        handle = headwise.regularize(model, DropColumn(p=0.9), where=[site.name])
        assert (run(model, x, training=True) - plain).abs().max() > 1e-5, site
        assert handle.report().status(site.name) == "regularized"
        handle.loss()
        handle.remove()


@pytest.mark.bits
@pytest.mark.parametrize("name", WHOLE)
def test_removal_gives_back_the_same_bits_keys_and_attributes(name):
    model, x = made(WHOLE[name]), images()
    before, attributes = state(model), [set(vars(m)) for m in model.modules()]
    plain = run(model, x, training=True)
    model.load_state_dict(before)
    handle = headwise.regularize(model, DropHead(p=0.5), AttnScale(), example=x)
    assert set(model.state_dict()) > set(before)
    handle.remove()
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(run(model, x, training=True), plain)
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert F.scaled_dot_product_attention is softmax.fused


@pytest.mark.bits
@pytest.mark.parametrize("name", WHOLE)
def test_a_deep_copy_is_a_regularized_model_of_its_own(name):
    model, x = made(WHOLE[name]), images()
    handle = headwise.regularize(model, DropHead(p=0.5), AttnScale(), example=x)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(run(model, x, training=True), run(twin, x, training=True))
    handle.remove()
    other = headwise.handle(twin)
    run(twin, x, training=True).sum().backward()
    other.loss()
    gains = [p for key, p in twin.named_parameters() if ".headwise." in key]
    assert len(gains) == len(other.fitted)
    assert all(p.grad is not None for p in gains)
    other.remove()
    assert F.scaled_dot_product_attention is softmax.fused


def test_a_plain_state_dict_is_explained_to_a_regularized_model():
    model, x = made(WHOLE["ViT"]), images()
    plain = state(model)
    handle = headwise.regularize(model, AttnScale(), example=x)
    with pytest.raises(RuntimeError, match="these weights come from a plain model"):
        model.load_state_dict(plain)
    handle.remove()


@pytest.mark.parametrize("name", ["ViT", "DeiT", "EVA-02", "BEiT", "SigLIP", "NaFlexViT"])
def test_values_are_carried_through_a_flat_transformer(name):
    model, x = made(WHOLE[name]), images()
    plain = run(model, x, training=False)
    handle = headwise.regularize(model, NeuTRENO(strength=0.9))
    assert (run(model, x, training=False) - plain).abs().max() > 1e-4
    assert {row.name: row.status for row in handle.report().rows}.get("attn_pool", "not applicable") == "not applicable"
    handle.remove()


def test_a_relative_position_bias_learns_through_every_method():
    model, x = made(WHOLE["BEiT"]), images()
    run(model, x, training=True).square().sum().backward()
    tables = {name: p.grad.clone() for name, p in model.named_parameters() if "relative_position_bias_table" in name}
    assert len(tables) == 2
    assert all(grad.abs().max() > 0 for grad in tables.values())
    handle = headwise.regularize(model, DropHead(p=0.0), RelaxedAttention(gamma=0.0))
    model.zero_grad()
    run(model, x, training=True).square().sum().backward()
    for name, p in model.named_parameters():
        if name in tables:
            torch.testing.assert_close(p.grad, tables[name])
    handle.set(RelaxedAttention, gamma=0.5)
    model.zero_grad()
    run(model, x, training=True).square().sum().backward()
    halved = dict(model.named_parameters())["blocks.1.attn.relative_position_bias_table"].grad
    assert halved.isfinite().all()
    assert not torch.allclose(halved, tables["blocks.1.attn.relative_position_bias_table"])
    handle.remove()


@pytest.mark.bits
def test_naflexvit_takes_padded_patches():
    model = made(WHOLE["NaFlexViT"])
    patches = torch.randn(2, 16, 192, generator=torch.Generator().manual_seed(0))
    coordinates = (
        torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), dim=-1)
        .view(1, 16, 2)
        .repeat(2, 1, 1)
    )
    valid = torch.arange(16) < torch.tensor([[16], [9]])
    batch = {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}
    plain = run(model, batch, training=True)
    handle = headwise.regularize(model, DropHead(p=0.0), RelaxedAttention(gamma=0.0), example=(batch,))
    assert torch.equal(run(model, batch, training=True), plain)
    handle.set(RelaxedAttention, gamma=1.0)
    relaxed = run(model, batch, training=True)
    # Uniform over real patches: what stands in the padding must not matter.
    batch["patches"] = patches.masked_fill(~valid[..., None], 7.0)
    torch.testing.assert_close(run(model, batch, training=True)[1], relaxed[1])
    assert not torch.allclose(relaxed, plain)
    handle.remove()


@pytest.mark.parametrize("name", ["ViT", "BEiT", "Hiera", "MaxViT"])
def test_timms_own_gradient_checkpointing_gives_the_same_gradients_and_one_penalty(name):
    results = []
    for checkpoints in (False, True):
        model = made(WHOLE[name])
        model.set_grad_checkpointing(checkpoints)
        handle = headwise.regularize(
            model, *headwise.parse("DropHead(p=0.3) + DropKey(p=0.3) + Decorrelation(strength=1.0)")
        )
        loss = run(model, images(), training=True).square().sum() + handle.loss()
        loss.backward()
        results.append((loss, [p.grad for p in model.parameters() if p.grad is not None]))
        handle.remove()
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.bits
def test_features_and_head_called_apart_train_as_the_whole_does():
    results = []
    for apart in (False, True):
        model, x = made(WHOLE["ViT"]).train(), images()
        handle = headwise.regularize(model, DropHead(p=0.3), NeuTRENO())
        out = model.forward_head(model.forward_features(x)) if apart else model(x)
        out.sum().backward()
        handle.loss()
        handle.after_step()
        results.append(out)
        handle.remove()
    assert torch.equal(*results)


def test_autocast_trains_a_windowed_model():
    model = made(WHOLE["Twins"])
    handle = headwise.regularize(
        model, *headwise.parse("DropHead(p=0.3) + RelaxedAttention(gamma=0.3) + EntropyPenalty(strength=0.1)")
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = run(model, images(), training=True).float().square().mean() + handle.loss()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    handle.remove()
