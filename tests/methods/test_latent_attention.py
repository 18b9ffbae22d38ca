"""Latent attention (DeepSeek): methods and figures of weights against the formulas, written head by head on dense
matrices."""

from __future__ import annotations

import warnings

import pytest
import torch
from methods.weight_hosts import loss_of as plain_loss

import headwise
from headwise import NuclearDecay, ProductDecay, QKClip, QKRates, SigmaReparam, SpectralCap
from headwise.attend import projections
from headwise.attend.projections import capture
from headwise.health.statistics.weights import read_weights, weight_reading, weight_reasons

transformers = pytest.importorskip("transformers")
HEADS, PLAIN, ROTARY, VALUES, LATENT = 4, 8, 4, 6, 10
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "vocab_size": 50, "kv_lora_rank": LATENT, "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": VALUES, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "initializer_range": 0.2, "attn_implementation": "sdpa",
}  # fmt: skip
RANKS = pytest.mark.parametrize("rank", [None, 12])


def deepseek(rank, version="V3", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"Deepseek{version}Config")(**{**SIZES, "q_lora_rank": rank, **changes})
    net = getattr(transformers, f"Deepseek{version}ForCausalLM")(config).train()
    # DeepSeek-V2's experts are left without numbers where none were loaded
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return net


def batch():
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))


def loss_of(net):
    return plain_loss(lambda ids: net(ids).logits, batch())


def layer_of(net, at=0):
    return net.model.layers[at].self_attn


def heads_of(net, at=0):
    """Return of each head W_UQ, W_QR, W_UK, W_UV and its part of W_O, and the W_KR of all."""
    layer = layer_of(net, at)
    query = layer.q_proj if layer.q_lora_rank is None else layer.q_b_proj
    made = []
    for h in range(HEADS):
        q = query.weight[h * (PLAIN + ROTARY) : (h + 1) * (PLAIN + ROTARY)]
        kv = layer.kv_b_proj.weight[h * (PLAIN + VALUES) : (h + 1) * (PLAIN + VALUES)]
        o = layer.o_proj.weight[:, h * VALUES : (h + 1) * VALUES]
        made.append((q[:PLAIN], q[PLAIN:], kv[:PLAIN], kv[PLAIN:], o))
    return made, layer.kv_a_proj_with_mqa.weight[LATENT:]


def dense_products(net, at=0):
    """Return of each head the matrix of c_Q and (c_KV, x) that makes its logits at one position, and W_O·W_UV."""
    heads, shared = heads_of(net, at)
    scores = [torch.cat([uq.T @ uk, qr.T @ shared], 1) for uq, qr, uk, _, _ in heads]
    return scores, [o @ uv for _, _, _, uv, o in heads]


def largest_logits(net, at=0):
    """Return each head's largest logit that causality allows, from the captured queries and keys."""
    with capture.untouched(net), capture.seen(layer_of(net, at)) as calls:
        net(batch())
    s = calls[0].q @ calls[0].k.mT * layer_of(net, at).scaling
    return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), float("-inf")).amax((0, 2, 3))


@RANKS
@pytest.mark.parametrize("version", ["V2", "V3"])
def test_qk_clip_scales_the_parts_of_a_head_as_kimi_k2_does(rank, version):
    net = deepseek(rank, version)
    tall = largest_logits(net)
    threshold = float(tall.sort().values[1]) * 0.99
    handle = headwise.regularize(net, QKClip(threshold=threshold), where=["model.layers.0.self_attn"])
    (before, shared), others = heads_of(net), {n: p.detach().clone() for n, p in net.named_parameters()}
    before = [[part.detach().clone() for part in head] for head in before]
    loss_of(net).backward()
    handle.after_step()
    for (uq, qr, uk, uv, o), was, s in zip(heads_of(net)[0], before, tall.tolist(), strict=True):
        gamma = min(1.0, threshold / s)
        torch.testing.assert_close(uq, was[0] * gamma**0.5)
        torch.testing.assert_close(uk, was[2] * gamma**0.5)
        torch.testing.assert_close(qr, was[1] * gamma)
        assert torch.equal(uv, was[3]) and torch.equal(o, was[4])
    assert torch.equal(heads_of(net)[1], shared)
    torch.testing.assert_close(largest_logits(net), tall.clamp(max=threshold), rtol=1e-4, atol=1e-5)
    changed = {name for name, p in net.named_parameters() if not torch.equal(p, others[name])}
    assert changed == {
        f"model.layers.0.self_attn.{'q_proj' if rank is None else 'q_b_proj'}.weight",
        "model.layers.0.self_attn.kv_b_proj.weight",
    }


def test_qk_clip_with_a_balance_of_1_leaves_keys_alone():
    net = deepseek(12)
    tall = largest_logits(net)
    handle = headwise.regularize(
        net, QKClip(threshold=float(tall.min()) / 2, balance=1.0), where=["model.layers.0.self_attn"]
    )
    keys = layer_of(net).kv_b_proj.weight.detach().clone()
    loss_of(net).backward()
    handle.after_step()
    assert torch.equal(layer_of(net).kv_b_proj.weight, keys)
    torch.testing.assert_close(largest_logits(net), (tall.min() / 2).expand(HEADS), rtol=1e-4, atol=1e-5)


def test_qk_clip_says_which_factor_is_frozen():
    net = deepseek(12)
    layer_of(net).kv_b_proj.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"kv_b_proj.weight, which is frozen"):
        headwise.regularize(net, QKClip(threshold=1.0), where=["model.layers.0.self_attn"])


@RANKS
def test_the_penalties_are_those_of_the_dense_products(rank):
    net = deepseek(rank)
    scores, values = dense_products(net)
    norms = sum(torch.linalg.matrix_norm(m, ord="nuc") for m in [*scores, *values])
    squares = sum(m.square().sum() for m in [*scores, *values])
    # only the first layer: the other one's products are left out of both
    for method, want in ((NuclearDecay(strength=0.3), 0.3 * norms), (ProductDecay(strength=0.3), 0.15 * squares)):
        weights = [p for n, p in net.named_parameters() if n.startswith("model.layers.0.self_attn") and "proj" in n]
        wanted = torch.autograd.grad(want, weights, allow_unused=True, retain_graph=True)
        handle = headwise.regularize(net, method, where=["model.layers.0.self_attn"])
        net(batch())
        got = handle.loss()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        for a, b in zip(torch.autograd.grad(got, weights, allow_unused=True), wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        handle.remove(discard=True)


@RANKS
def test_sigma_reparam_divides_each_matrix_of_the_paper_by_its_own_norm(rank):
    net = deepseek(rank)
    names = [n for n, _ in net.named_parameters()]
    layer, (heads, shared) = layer_of(net), heads_of(net)
    groups = {
        "W_UQ": [h[0] for h in heads], "W_QR": [h[1] for h in heads], "W_UK": [h[2] for h in heads],
        "W_UV": [h[3] for h in heads],
        "W_KR": [shared], "W_DKV": [layer.kv_a_proj_with_mqa.weight[:LATENT]], "W_O": [layer.o_proj.weight],
        **({} if rank is None else {"W_DQ": [layer.q_a_proj.weight]}),
    }  # fmt: skip
    want = {name: torch.cat(list(parts)).detach() for name, parts in groups.items()}
    want = {name: w / torch.linalg.matrix_norm(w, ord=2) for name, w in want.items()}
    kept = {n: p.detach().clone() for n, p in net.named_parameters()}
    handle = headwise.regularize(net, SigmaReparam(init="one"), where=["model.layers.0.self_attn"])
    heads, shared = heads_of(net)
    got = {
        "W_UQ": [h[0] for h in heads], "W_QR": [h[1] for h in heads], "W_UK": [h[2] for h in heads],
        "W_UV": [h[3] for h in heads],
        "W_KR": [shared], "W_DKV": [layer.kv_a_proj_with_mqa.weight[:LATENT]], "W_O": [layer.o_proj.weight],
        **({} if rank is None else {"W_DQ": [layer.q_a_proj.weight]}),
    }  # fmt: skip
    for name, w in want.items():
        torch.testing.assert_close(torch.cat(got[name]), w, rtol=1e-4, atol=1e-5)
    handle.remove(discard=True)
    assert [n for n, _ in net.named_parameters()] == names
    assert all(torch.equal(p, kept[n]) for n, p in net.named_parameters())


def test_sigma_reparam_starts_from_the_current_norms_and_trains_beside_qk_clip():
    net = deepseek(12)
    with torch.no_grad():
        before = net(batch()).logits
    handle = headwise.regularize(net, SigmaReparam(), QKClip(threshold=0.5))
    torch.testing.assert_close(net(batch()).logits, before, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        (loss_of(net) + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
        optimizer.zero_grad()
    # a step comes between the logits that were seen and those of now
    assert float(largest_logits(net).max()) <= 0.55
    assert all(p.isfinite().all() for p in net.parameters())


def test_spectral_cap_cuts_the_factors_that_make_what_it_is_told():
    net = deepseek(12)
    before = {n: p.detach().clone() for n, p in layer_of(net).named_parameters()}
    handle = headwise.regularize(net, SpectralCap(limit=0.1, of="v"), where=["model.layers.0.self_attn"])
    loss_of(net).backward()
    handle.after_step()
    (heads, shared), layer = heads_of(net), layer_of(net)
    for matrix in (torch.cat([h[3] for h in heads]), layer.kv_a_proj_with_mqa.weight[:LATENT]):
        assert float(torch.linalg.matrix_norm(matrix.detach(), ord=2)) == pytest.approx(0.1, rel=1e-4)
    assert torch.equal(shared, before["kv_a_proj_with_mqa.weight"][LATENT:])
    assert torch.equal(layer.q_b_proj.weight, before["q_b_proj.weight"]) and torch.equal(
        layer.o_proj.weight, before["o_proj.weight"]
    )


@RANKS
def test_figures_of_weights_are_those_of_the_dense_products(rank):
    net = deepseek(rank).eval()
    site = headwise.sites(net)[0]
    reading = weight_reading(site)
    figures = read_weights(reading)
    for kind, dense in zip(("qk", "vo"), dense_products(net), strict=True):
        spectra = torch.stack([torch.linalg.svdvals(m.detach()) for m in dense])
        torch.testing.assert_close(figures[f"spectral_norm_{kind}"], spectra[:, 0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            figures[f"frobenius_norm_{kind}"], spectra.square().sum(1).sqrt(), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(figures[f"nuclear_norm_{kind}"], spectra.sum(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            figures[f"stable_rank_{kind}"], spectra.square().sum(1) / spectra[:, 0] ** 2, rtol=1e-4, atol=1e-5
        )
    assert "share rows of the keys" in weight_reasons(reading)["imbalance_qk"]
    assert "imbalance_vo" in figures and any("latent" in note for note in reading.notes)


def test_the_audit_reads_a_folder_of_latent_attention(tmp_path):
    net = deepseek(12)
    net.save_pretrained(tmp_path)
    found = headwise.audit(tmp_path)
    scores, values = dense_products(net, at=1)
    for kind, dense in (("qk", scores), ("vo", values)):
        own = {
            r["head"]: r["value"]
            for r in found.records
            if r["statistic"] == f"spectral_norm_{kind}" and r["depth"] == 1
        }
        assert own == pytest.approx(
            {h: float(torch.linalg.matrix_norm(m.detach(), ord=2)) for h, m in enumerate(dense)}, rel=1e-4
        )
    assert all(layer["layout"] == "latent" and not layer["missing"] for layer in found.layers)


def test_methods_that_need_plain_projections_name_the_factors():
    net = deepseek(12)
    with pytest.raises(
        projections.ProjectionError, match=r"makes its q by factors, model.layers.0.self_attn.q_a_proj and .*q_b_proj"
    ):
        projections.of(headwise.sites(net)[0]).need("q", "InputNoise")


def test_qk_clip_on_adapters_scales_them_along():
    peft = pytest.importorskip("peft")
    net = deepseek(12)
    config = peft.LoraConfig(r=2, target_modules=["q_b_proj", "kv_b_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(net, config)
    for name, parameter in wrapped.named_parameters():
        parameter.requires_grad_("self_attn" in name)
    handle = headwise.regularize(wrapped, QKClip(threshold=0.3))
    loss_of(net).backward()
    tall = largest_logits(net)
    assert float(tall.max()) > 0.3
    handle.after_step()
    torch.testing.assert_close(largest_logits(net), tall.clamp(max=0.3), rtol=1e-4, atol=1e-5)


def hybrid(kind):
    torch.manual_seed(0)
    shared = {n: x for n, x in SIZES.items() if n not in ("n_routed_experts", "first_k_dense_replace")}
    own = {
        "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2, "num_local_experts": 4,
        "mlp_layer_types": ["dense"] * 2},
        "qwen3_next": {
            "head_dim": 8, "num_experts": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        },
    }[kind]  # fmt: skip
    layers = {
        "layer_types": ["linear_attention", "full_attention"],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(kind, **{**shared, **own, **layers})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def test_a_hybrid_has_its_latent_layers_clipped_and_the_others_listed():
    net = hybrid("kimi_linear")
    handle = headwise.regularize(net, QKClip(threshold=1e-3))
    states = {row.name: (row.status, row.detail) for row in handle.report().rows}
    assert states["model.layers.1.self_attn"][0] == "regularized"
    status, reason = states["model.layers.0.self_attn"]
    assert status == "unreachable" and "instead of a softmax" in reason
    net(batch(), use_cache=False).logits.square().mean().backward()
    before = largest_hybrid(net)
    handle.after_step()
    torch.testing.assert_close(largest_hybrid(net), before.clamp(max=1e-3), rtol=1e-3, atol=1e-6)
    # a step in which no forward came asks nothing of anybody
    net(batch(), use_cache=False).logits.square().mean().backward()
    handle.after_step()
    assert all(p.isfinite().all() for p in net.parameters())


def largest_hybrid(net):
    layer = net.model.layers[1].self_attn
    with capture.untouched(net), capture.seen(layer) as calls:
        net(batch(), use_cache=False)
    s = calls[0].q @ calls[0].k.mT * layer.scaling
    return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), float("-inf")).amax((0, 2, 3))


def test_a_hybrid_that_normalises_queries_refuses_qk_clip_and_takes_other_methods_on_its_full_layers():
    net = hybrid("qwen3_next")
    with pytest.raises(ValueError, match="normalises queries and keys itself"):
        headwise.regularize(net, QKClip())
    handle = headwise.regularize(net, headwise.DropHead(p=0.2))
    assert [f.site.name for f in handle.fitted] == ["model.layers.1.self_attn"]
    assert net(batch(), use_cache=False).logits.isfinite().all()


def without_positions():
    """Return GLM-5's text model: a linear layer, and latent attention whose heads have no rotary part."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("first_k_dense_replace", "attn_implementation")}
    own = {
        "qk_rope_head_dim": 0, "q_lora_rank": 12, "linear_head_dim": 8, "linear_num_heads": 2, "index_topk": 16,
        "index_kpool": 1, "index_head_dim": 8, "index_n_heads": 2, "n_shared_experts": 1, "pad_token_id": 0,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"], "mlp_layer_types": ["dense"] * 2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("glm5_next_text", **{**sizes, **own})
    net = transformers.AutoModel.from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():
        for name, parameter in net.layers[1].self_attn.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    return net


def test_latent_attention_without_a_rotary_part_is_taken_too():
    net = without_positions()
    layer = net.layers[1].self_attn

    def tall():
        with capture.untouched(net), capture.seen(layer) as calls:
            net(batch(), use_cache=False)
        s = calls[0].q @ calls[0].k.mT * layer.scaling
        return s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), float("-inf")).amax((0, 2, 3))

    before = tall()
    threshold = float(before.sort().values[1]) * 0.99
    handle = headwise.regularize(net, QKClip(threshold=threshold))
    assert [one.site.name for one in handle.fitted] == ["layers.1.self_attn"]
    net(batch(), use_cache=False)[0].square().mean().backward()
    handle.after_step()
    torch.testing.assert_close(tall(), before.clamp(max=threshold), rtol=1e-4, atol=1e-5)
    handle.remove()
    # the penalty and the figures are those of each head's dense product
    q, kv = layer.q_b_proj.weight, layer.kv_b_proj.weight
    q, kv = q.view(HEADS, PLAIN, -1), kv.view(HEADS, PLAIN + VALUES, -1)
    o = layer.o_proj.weight.view(-1, HEADS, VALUES).movedim(1, 0)
    dense = q.mT @ kv[:, :PLAIN], o @ kv[:, PLAIN:]
    handle = headwise.regularize(net, ProductDecay(strength=0.3))
    net(batch(), use_cache=False)
    torch.testing.assert_close(handle.loss(), 0.15 * sum(m.square().sum() for m in dense), rtol=1e-4, atol=1e-5)
    handle.remove()
    figures = read_weights(weight_reading(next(s for s in headwise.sites(net) if s.name == "layers.1.self_attn")))
    for kind, products in zip(("qk", "vo"), dense, strict=True):
        spectra = torch.linalg.svdvals(products.detach())
        torch.testing.assert_close(figures[f"nuclear_norm_{kind}"], spectra.sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "method", [SigmaReparam(), NuclearDecay(strength=0.1), QKRates(rate=0.1), SpectralCap(limit=0.5)]
)
def test_methods_on_weights_train_latent_attention_without_a_rotary_part(method):
    net = without_positions()
    handle = headwise.regularize(net, method, where=["layers.1.self_attn"])
    before = net(batch(), use_cache=False)[0]
    (before.square().mean() + handle.loss()).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    handle.after_step()
    after = net(batch(), use_cache=False)[0]
    assert after.isfinite().all() and not torch.equal(after, before)
