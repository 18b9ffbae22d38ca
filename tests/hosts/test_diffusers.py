"""Layers of diffusers: reached by their processors, neutral where a method is, and equal to an explicit computation
where it acts."""

from __future__ import annotations

import gc
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from grids import part_of_grid
from hosts.tiny_diffusers import MODELS, output

import headwise
from headwise import (
    DropHead,
    EntropyPenalty,
    InputNoise,
    NeuTRENO,
    NuclearDecay,
    QKClip,
    RelaxedAttention,
    SigmaReparam,
)
from headwise.attend import hosts, projections
from headwise.attend.core.method import REGISTRY
from headwise.attend.projections import capture
from headwise.health.statistics.weights import read_weights, weight_reading

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::headwise.health.watching.alerts.HealthWarning"
)
EACH = pytest.mark.parametrize("name", part_of_grid(MODELS, ("SD3", "DiT")))


@pytest.fixture(autouse=True)
def _no_model_of_another_test_is_left():
    gc.collect()
    yield
    gc.collect()


def run(model, batch):
    with torch.no_grad():
        return output(model, batch)


def explicit(edit=lambda a: a):
    """Return a stand-in for fused attention that makes the matrix and edits it."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert attn_mask is None and not is_causal and not enable_gqa
        s = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        return edit(s.softmax(-1)) @ value

    return attention


@EACH
def test_every_layer_is_found_with_its_kind_and_weights(name):
    tiny = MODELS[name]
    sites = headwise.sites(tiny.build())
    assert (sum(not s.is_cross for s in sites), sum(s.is_cross for s in sites)) == tiny.sites
    assert sum(s.joint for s in sites) == tiny.joint
    assert all(s.host == "diffusers" and s.heads == 2 for s in sites)
    for site in sites:
        found = projections.of(site)
        assert all(block is not None for one in found.streams() for block in (one.q, one.k, one.v))
        assert (found.context is not None) == site.joint


@EACH
def test_a_strong_method_gives_what_the_explicit_computation_gives(name, monkeypatch):
    tiny = MODELS[name]
    model, batch = tiny.build(), tiny.batch()
    plain = run(model, batch)
    method = RelaxedAttention(gamma=0.7, matched_inference=True)
    handle = headwise.regularize(model, method)
    got = run(model, batch)
    assert all(f.kernels for f in handle.fitted)
    handle.remove()
    assert torch.equal(run(model, batch), plain)
    monkeypatch.setattr(F, "scaled_dot_product_attention", explicit(lambda a: 0.3 * a + 0.7 / a.shape[-1]))
    want = run(model, batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - plain).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name", ["SD3", "DiT", *(pytest.param(name, marks=pytest.mark.grid) for name in ("Flux", "Wan", "UNet"))]
)
def test_every_method_is_neutral_and_acts_or_is_refused_by_name(name):
    tiny = MODELS[name]
    model, batch = tiny.build(), tiny.batch()
    plain, stood = run(model, batch), 0
    keys = list(model.state_dict())
    for kind in REGISTRY.values():
        if not kind.__module__.startswith("headwise.attend.methods.") or kind.neutral is None:
            continue
        try:
            handle = headwise.regularize(model, kind(**kind.neutral))
        except ValueError as refused:
            assert kind.__name__ in str(refused) or "no attention layer is left" in str(refused)
            continue
        stood += 1
        torch.testing.assert_close(
            run(model, batch), plain, rtol=1e-4, atol=2e-5, msg=lambda m, k=kind: f"{k.__name__}: {m}"
        )
        handle.remove()
        assert torch.equal(run(model, batch), plain), kind.__name__
    assert stood >= 20
    assert list(model.state_dict()) == keys


@EACH
def test_training_takes_draws_penalties_and_a_watch(name):
    tiny = MODELS[name]
    model, batch = tiny.build().train(), tiny.batch()
    handle = headwise.regularize(model, DropHead(p=0.3), EntropyPenalty(strength=0.1))
    watch = headwise.watch(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = output(model, batch).square().mean()
        penalty = handle.loss()
        assert penalty.item() != 0
        (loss + penalty).backward()
        optimizer.step()
        handle.after_step()
        watch.step()
        optimizer.zero_grad()
    records = watch.records()
    watched = {r["site"] for r in records if r["statistic"] == "attention_entropy"}
    assert watched == {f.site.name for f in handle.fitted}
    watch.remove()


def captured(model, batch, site):
    with capture.untouched(model), capture.seen(site.module) as calls:
        run(model, batch)
    return calls[0]


@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_the_mass_between_text_and_image_is_that_of_the_matrix(name):
    tiny = MODELS[name]
    model, batch = tiny.build().train(), tiny.batch()
    watch = headwise.watch(model, every=1, statistics=["text_to_image_mass", "image_to_text_mass"])
    output(model, batch).square().mean().backward()
    watch.step()
    found = {(r["site"], r["statistic"], r["head"]): r["value"] for r in watch.records()}
    watch.remove()
    count, tokens, first = tiny.text
    text = torch.zeros(tokens, dtype=torch.bool)
    text[slice(0, count) if first else slice(tokens - count, tokens)] = True
    sites = headwise.sites(model)
    assert len(found) == 2 * 2 * len(sites)
    for site in sites:
        seen = captured(model, batch, site)
        if seen.q.shape[1] == tokens:
            q, k = (x.transpose(1, 2) for x in (seen.q, seen.k))
        else:
            q, k = seen.q, seen.k
        a = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        for head in range(2):
            there = a[:, head, text][..., ~text].sum(-1).mean()
            back = a[:, head, ~text][..., text].sum(-1).mean()
            assert found[site.name, "text_to_image_mass", head] == pytest.approx(float(there), rel=1e-4)
            assert found[site.name, "image_to_text_mass", head] == pytest.approx(float(back), rel=1e-4)


@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_the_text_stands_where_it_is_said_to_stand(name):
    tiny = MODELS[name]
    model, batch = tiny.build(), tiny.batch()
    site = next(s for s in headwise.sites(model) if s.joint)
    own = []
    handle = site.module.add_v_proj.register_forward_hook(lambda module, args, out: own.append(out))
    seen = captured(model, batch, site)
    handle.remove()
    count, tokens, first = tiny.text
    v = seen.v.transpose(1, 2) if seen.v.shape[1] != tokens else seen.v
    text = v[:, :count] if first else v[:, tokens - count :]
    torch.testing.assert_close(text.flatten(2), own[0])


def test_methods_on_what_enters_and_leaves_a_layer_are_refused_where_image_and_text_do_so_apart():
    model = MODELS["SD3"].build()
    for method in (InputNoise(scale=0.1), headwise.LayerScale(), headwise.GatedOutput()):
        with pytest.raises(ValueError, match=r"image and text tokens (enter|do so) separately"):
            headwise.regularize(model, method)


def test_a_layer_that_is_called_with_other_tokens_than_it_declares_is_refused_in_the_call():
    tiny = MODELS["DiT"]
    model = tiny.build()
    headwise.regularize(model, NeuTRENO(strength=0.5))
    layer, x = model.transformer_blocks[0].attn1, torch.randn(2, 16, 16)
    with torch.no_grad():
        layer(x)
        with pytest.raises(RuntimeError, match="other tokens for its keys"):
            layer(x, encoder_hidden_states=torch.randn(2, 16, 16))


def heads(weight, size=8):
    return weight.unflatten(0, (-1, size))


def joint_products(layer):
    """Return of each head the dense product of queries and keys, and of output and values, of (image, text) tokens."""
    q, k, v = (
        torch.cat([heads(getattr(layer, a).weight), heads(getattr(layer, b).weight)], -1)
        for a, b in (("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj"))
    )
    out = [layer.to_out[0].weight, *([] if layer.to_add_out is None else [layer.to_add_out.weight])]
    o = heads(torch.cat([w.T for w in out], -1))
    return q.mT @ k, o.mT @ v


def test_weights_of_both_kinds_of_tokens_make_the_products():
    model = MODELS["SD3"].build()
    sites = headwise.sites(model)
    dense = [joint_products(site.module) for site in sites]
    handle = headwise.regularize(model, NuclearDecay(strength=0.1))
    run(model.train(), MODELS["SD3"].batch())
    want = sum(torch.linalg.matrix_norm(m, ord="nuc").sum() for pair in dense for m in pair) * 0.1
    handle.shared.fresh = True
    torch.testing.assert_close(handle.loss(), want, rtol=1e-4, atol=1e-4)
    handle.remove(discard=True)
    figures = read_weights(weight_reading(sites[1]))
    for kind, m in zip(("qk", "vo"), dense[1], strict=True):
        torch.testing.assert_close(
            figures[f"spectral_norm_{kind}"], torch.linalg.matrix_norm(m.detach(), ord=2), rtol=1e-4, atol=1e-4
        )


def test_qk_clip_scales_the_weights_of_both_kinds_of_tokens():
    tiny = MODELS["SD3"]
    model, batch = tiny.build().train(), tiny.batch()
    site = headwise.sites(model)[0]

    def tallest():
        seen = captured(model, batch, site)
        return (seen.q @ seen.k.mT / math.sqrt(8)).amax((0, 2, 3))

    tall = tallest()
    threshold = float(tall.min()) / 2
    handle = headwise.regularize(model, QKClip(threshold=threshold), where=[site.name])
    before = {n: p.detach().clone() for n, p in site.module.named_parameters()}
    output(model, batch).square().mean().backward()
    handle.after_step()
    torch.testing.assert_close(tallest(), torch.full_like(tall, threshold), rtol=1e-3, atol=1e-4)
    changed = {n.split(".")[0] for n, p in site.module.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"to_q", "to_k", "add_q_proj", "add_k_proj"}


def test_sigma_reparam_takes_the_matrices_of_both_and_gives_them_back():
    tiny = MODELS["SD3"]
    model, batch = tiny.build(), tiny.batch()
    plain = run(model, batch)
    handle = headwise.regularize(model, SigmaReparam(init="one"), where=["transformer_blocks.0.attn"])
    layer = model.transformer_blocks[0].attn
    for matrix in (layer.to_q, layer.add_q_proj, layer.to_add_out, layer.to_out[0]):
        assert float(torch.linalg.matrix_norm(matrix.weight.detach(), ord=2)) == pytest.approx(1, rel=1e-4)
    assert (run(model, batch) - plain).abs().max() > 1e-3
    handle.remove(discard=True)
    assert torch.equal(run(model, batch), plain)


def reference_backend(monkeypatch):
    """Put a backend that calls no function of torch's under the name of xformers."""
    from diffusers.models import attention_dispatch as library

    calls = []

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        calls.append(attn_mask)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if attn_mask is None else s.masked_fill(~attn_mask[:, None, None], -torch.inf)
        return (s.softmax(-1) @ v).transpose(1, 2)

    name, registry = library.AttentionBackendName.XFORMERS, library._AttentionBackendRegistry
    monkeypatch.setitem(registry._backends, name, attention)
    monkeypatch.setitem(registry._supported_arg_names, name, {"query", "key", "value", "attn_mask", "scale"})
    monkeypatch.setitem(registry._constraints, name, [])
    return name, calls


@pytest.mark.parametrize("name", ["Flux", "Wan"])
def test_a_backend_that_is_none_of_torchs_is_taken_at_the_dispatcher(name, monkeypatch):
    tiny = MODELS[name]
    model, batch = tiny.build(), tiny.batch()
    plain = run(model, batch)
    backend, calls = reference_backend(monkeypatch)
    for module in model.modules():
        if hooks_of(module):
            module.processor._attention_backend = backend
    torch.testing.assert_close(run(model, batch), plain, rtol=1e-4, atol=1e-4)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True), DropHead(p=0.5))
    calls.clear()
    torch.testing.assert_close(run(model, batch), plain, rtol=1e-4, atol=1e-4)
    handle.remove()
    calls.clear()
    handle = headwise.regularize(model, DropHead(p=0.5))
    torch.testing.assert_close(run(model, batch), plain, rtol=1e-4, atol=1e-4)
    # nothing acts in evaluation: the backend ran
    assert len(calls) == len(handle.fitted)
    calls.clear()
    moved = run(model.train(), batch)
    assert not calls and (moved - plain).abs().max() > 1e-2
    handle.remove(discard=True)
    own = sys.modules[type(model).__module__]
    assert own.dispatch_attention_fn is sys.modules["diffusers.models.attention_dispatch"].dispatch_attention_fn
    run(model.eval(), batch)
    assert calls


def hooks_of(module):
    return getattr(module, "processor", None) is not None


def test_a_mask_of_keys_is_honoured_at_the_dispatcher(monkeypatch):
    model = MODELS["Flux"].build()
    backend, calls = reference_backend(monkeypatch)
    layer = model.transformer_blocks[0].attn
    layer.processor._attention_backend = backend
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, :3] = False
    inputs = {
        "hidden_states": torch.randn(2, 9, 32),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "attention_mask": mask,
    }
    with torch.no_grad():
        plain = layer(**inputs)
        assert calls[-1] is mask
        handle = headwise.regularize(model, RelaxedAttention(gamma=0.0, matched_inference=True))
        got = layer(**inputs)
        handle.remove()
        handle = headwise.regularize(model, headwise.SoftCap(cap=1e6))
        capped = layer(**inputs)
        handle.remove()
    for a, b, c in zip(plain, got, capped, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(c, a, rtol=1e-4, atol=1e-4)


def test_tokens_that_are_split_over_processes_are_refused_in_the_call():
    tiny = MODELS["Wan"]
    model = tiny.build().train()
    handle = headwise.regularize(model, DropHead(p=0.5))
    # what enable_parallelism() leaves on each processor
    for module in model.modules():
        if hooks_of(module):
            module.processor._parallel_config = object()
    with pytest.raises(RuntimeError, match=r"tokens are split over processes .* train without enable_parallelism\(\)"):
        output(model, tiny.batch())
    handle.remove(discard=True)


def reasons(model):
    return {f.site.name: f.reason for f in hosts.find(model)}


def test_processors_that_cannot_be_followed_are_named_with_what_to_do():
    from diffusers.models import attention_processor as known

    model = MODELS["DiT"].build()
    model.transformer_blocks[0].attn1.set_processor(known.AttnProcessor())
    told = reasons(model)
    assert "AttnProcessor computes an explicit softmax" in told["transformer_blocks.0.attn1"]
    assert "AttnProcessor2_0" in told["transformer_blocks.0.attn1"] and not told["transformer_blocks.1.attn1"]
    model.transformer_blocks[0].attn1.set_processor(known.IPAdapterAttnProcessor2_0(16, 12))
    assert "holds weights and attends to additional tokens" in reasons(model)["transformer_blocks.0.attn1"]
    model.transformer_blocks[0].attn1.set_processor(known.AttnProcessor2_0())
    assert not any(reasons(model).values())


@pytest.mark.parametrize("name", ["Flux", "SD3"])
def test_projections_that_were_joined_are_refused_with_a_way_back_that_works(name):
    model, method = MODELS[name].build(), NuclearDecay(strength=0.1)
    handle = headwise.regularize(model, method)
    applied = len(handle.fitted)
    handle.remove()
    model.fuse_qkv_projections()
    with pytest.raises(ValueError, match=r"unfuse_qkv_projections\(\)"):
        headwise.regularize(model, method)
    handle = headwise.regularize(model, DropHead(p=0.1))
    assert len(handle.fitted) == len(headwise.sites(model))
    handle.remove()
    model.unfuse_qkv_projections()
    assert len(headwise.regularize(model, method).fitted) == applied


@pytest.mark.parametrize("method", [QKClip(threshold=0.1), NuclearDecay(strength=0.1), SigmaReparam()], ids=repr)
def test_projections_that_are_joined_later_are_told_in_the_step(method):
    model, batch = MODELS["SD3"].build().train(), MODELS["SD3"].batch()
    handle = headwise.regularize(model, method)

    def step():
        (output(model, batch).square().mean() + handle.loss()).backward()
        handle.after_step()

    step()
    model.fuse_qkv_projections()
    message = r"transformer_blocks\.0\.attn: .* can no longer act: .*unfuse_qkv_projections\(\)"
    with pytest.raises(RuntimeError, match=message):
        step()
    handle.drop_penalties()
    model.unfuse_qkv_projections()
    step()


def test_a_watch_leaves_out_the_weights_of_projections_that_are_joined_later():
    model, batch = MODELS["UNet"].build().train(), MODELS["UNet"].batch()
    names = ["max_logit", "spectral_norm_qk", "update_entropy"]
    watch, read = headwise.watch(model, every=1, statistics=names), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for joined in (False, True):
        if joined:
            model.fuse_qkv_projections()
        output(model, batch).square().mean().backward()
        optimizer.step()
        watch.step()
        read.append({r["statistic"] for r in watch.records() if r["step"] == joined and r["value"] is not None})
    watch.remove()
    assert read == [set(names), {"max_logit"}]


def test_a_run_with_lora_trains_the_adapters_alone():
    peft = pytest.importorskip("peft")
    tiny = MODELS["SD3"]
    model, batch = tiny.build().train(), tiny.batch()
    model.requires_grad_(False)
    model.add_adapter(
        peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    )
    plain = run(model.eval(), batch)
    handle = headwise.regularize(model, RelaxedAttention(gamma=0.1), EntropyPenalty(strength=0.01))
    assert torch.equal(run(model, batch), plain)
    watch = headwise.watch(model, every=1, statistics=["attention_entropy", "spectral_norm_qk"])
    learned = [p for p in model.parameters() if p.requires_grad]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(learned, lr=1e-2)
    for _ in range(2):
        (output(model.train(), batch).square().mean() + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
        watch.step()
        optimizer.zero_grad()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if "lora_" in n}
    found = {r["statistic"] for r in watch.records()}
    assert {"attention_entropy", "spectral_norm_qk"} <= found
    watch.remove()
    handle.remove(discard=True)
    with pytest.raises(ValueError, match="is frozen"):
        headwise.regularize(model, QKClip(threshold=1.0))


def test_the_audit_reads_a_model_of_diffusers_from_a_factory(tmp_path):
    file = tmp_path / "made.py"
    file.write_text("from hosts.tiny_diffusers import MODELS\n\n\ndef make():\n    return MODELS['SD3'].build()\n")
    found = headwise.audit(f"{file}:make")
    dense = [m.detach() for m in joint_products(MODELS["SD3"].build().transformer_blocks[0].attn)]
    for kind, m in zip(("qk", "vo"), dense, strict=True):
        own = [r["value"] for r in found.records if r["statistic"] == f"spectral_norm_{kind}" and r["depth"] == 0]
        assert own == pytest.approx(torch.linalg.matrix_norm(m, ord=2).tolist(), rel=1e-4)
    assert any("joint attention" in note for note in found.layers[0]["notes"])
