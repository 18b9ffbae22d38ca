"""QKRates: the paper's two algorithms as learning rates of their own for each head, and what it refuses."""

import copy

import pytest
import torch
from methods.weight_hosts import ids, model
from small_models import HOSTS, fresh

import headwise
from headwise import InterleavedHeads, QKRates, SpectralCap
from headwise.attend.core.site import Site
from headwise.attend.methods import qk_rates
from headwise.attend.projections import together

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=3.0, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
}


def heads_of(weight, heads):
    return weight.detach().clone().unflatten(0, (heads, -1))


def norms(weight, heads):
    return heads_of(weight, heads).flatten(1).norm(dim=1)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_heads_step_is_one_at_the_rate_of_the_paper(kind):
    net = fresh(HOSTS["llama"])
    handle = headwise.regularize(net, QKRates(rate=0.5))
    optimizer = OPTIMIZERS[kind](net.parameters())
    attention = net.model.layers[0].self_attn
    start_q, start_k = norms(attention.q_proj.weight, 4), norms(attention.k_proj.weight, 2)
    for step in range(3):
        optimizer.zero_grad()
        HOSTS["llama"].run(net).square().mean().backward()
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        # algorithm 1, prior to each step; two query heads share a key head, and the larger of them counts for it
        now_q, now_k = norms(attention.q_proj.weight, 4), norms(attention.k_proj.weight, 2)
        rate_q = 0.5 * (start_k / now_k).repeat_interleave(2)
        rate_k = 0.5 * start_q.view(2, 2).amax(1) / now_q.view(2, 2).amax(1)
        optimizer.step()
        stepped = {n: p.detach().clone() for n, p in net.named_parameters()}
        handle.after_step()
        for part, rates in (("q_proj", rate_q), ("k_proj", rate_k)):
            name = f"model.layers.0.self_attn.{part}.weight"
            was = heads_of(before[name], len(rates))
            wanted = was + rates[:, None, None] * (heads_of(stepped[name], len(rates)) - was)
            torch.testing.assert_close(heads_of(dict(net.named_parameters())[name], len(rates)), wanted)
        assert step == 0 or not torch.allclose(rate_q, torch.full((4,), 0.5), atol=1e-4)
        rest = [n for n in before if "q_proj" not in n and "k_proj" not in n]
        assert all(torch.equal(dict(net.named_parameters())[n], stepped[n]) for n in rest)


def test_the_first_step_at_rate_one_is_the_optimizers_own():
    net, plain = model(), model()
    handle = headwise.regularize(net, QKRates())
    for one in (net, plain):
        one(ids()).square().mean().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    handle.after_step()
    wanted = dict(plain.named_parameters())
    assert all(torch.equal(p, wanted[n]) for n, p in net.named_parameters())


def test_values_in_a_fused_weight_keep_their_rate_and_biases_follow_their_rows():
    net = model()
    handle = headwise.regularize(net, QKRates(rate=0.25))
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    net(ids()).square().mean().backward()
    torch.optim.SGD(net.parameters(), lr=0.5).step()
    stepped = {n: p.detach().clone() for n, p in net.named_parameters()}
    handle.after_step()
    for name in ("layers.1.c_attn.weight", "layers.1.c_attn.bias"):
        now, was, went = (x.detach() for x in (dict(net.named_parameters())[name], before[name], stepped[name]))
        torch.testing.assert_close(now[:48], was[:48] + 0.25 * (went[:48] - was[:48]))
        assert torch.equal(now[48:], went[48:]) and not torch.equal(went, was)


def deepseek(q_lora_rank):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=50,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=10,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            initializer_range=0.2,
        )
    ).train()


def algorithm_2(layer):
    """Write the paper's factors of latent attention, head by head."""
    factored = getattr(layer, "q_a_proj", None) is not None
    down_q = layer.q_a_proj.weight.norm() if factored else torch.ones(())
    q = (layer.q_b_proj if factored else layer.q_proj).weight.unflatten(0, (4, 12))
    kv = layer.kv_b_proj.weight.unflatten(0, (4, 14))
    latent, rotary = layer.kv_a_proj_with_mqa.weight.split([10, 4])
    uq, qr, uk = [h[:8].norm() for h in q], [h[8:].norm() for h in q], [h[:8].norm() for h in kv]
    dkv, kr = latent.norm(), rotary.norm()
    both, most = max(a * b for a, b in zip(uq, uk, strict=True)), max(qr)
    return {
        "uq": torch.stack([1 / (down_q * k * dkv) for k in uk]),
        "uk": torch.stack([1 / (a * down_q * dkv) for a in uq]),
        "qr": 1 / (down_q * kr),
        "dq": min(1 / (both * dkv), 1 / (most * kr)),
        "dkv": 1 / (both * down_q),
        "kr": 1 / (most * down_q),
    }


@pytest.mark.parametrize("q_lora_rank", [12, None])
def test_latent_attention_has_the_rates_of_the_second_algorithm(q_lora_rank):
    net = deepseek(q_lora_rank)
    layer = net.model.layers[0].self_attn
    handle = headwise.regularize(net, QKRates(rate=0.3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    tokens = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        start = algorithm_2(layer)
    for _ in range(2):
        optimizer.zero_grad()
        net(input_ids=tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            rate = {kind: 0.3 * factor / start[kind] for kind, factor in algorithm_2(layer).items()}
        before = {n: p.detach().clone() for n, p in layer.named_parameters()}
        optimizer.step()
        stepped = {n: p.detach().clone() for n, p in layer.named_parameters()}
        handle.after_step()
        now = {n: p.detach() for n, p in layer.named_parameters()}
        moved = {n: now[n] - before[n] for n in now}
        step = {n: stepped[n] - before[n] for n in now}

        def close(name, rows, factor, moved=moved, step=step):
            torch.testing.assert_close(rows(moved[name]), factor * rows(step[name]), rtol=1e-3, atol=1e-6)

        up_q = "q_b_proj.weight" if q_lora_rank else "q_proj.weight"
        close(up_q, lambda w: w.unflatten(0, (4, 12))[:, :8], rate["uq"][:, None, None])
        close(up_q, lambda w: w.unflatten(0, (4, 12))[:, 8:], rate["qr"])
        close("kv_b_proj.weight", lambda w: w.unflatten(0, (4, 14))[:, :8], rate["uk"][:, None, None])
        close("kv_b_proj.weight", lambda w: w.unflatten(0, (4, 14))[:, 8:], 1.0)
        close("kv_a_proj_with_mqa.weight", lambda w: w[:10], rate["dkv"])
        close("kv_a_proj_with_mqa.weight", lambda w: w[10:], rate["kr"])
        if q_lora_rank:
            close("q_a_proj.weight", lambda w: w, rate["dq"])
        assert torch.equal(now["o_proj.weight"], stepped["o_proj.weight"])


HALF = {"rtol": 2e-2, "atol": 1e-3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("host", ["llama", "fused", "a layer at a time"])
def test_stacked_layers_take_the_steps_of_each_alone(host, dtype, monkeypatch):
    made = []
    for where in (("cpu",), ()):
        monkeypatch.setattr(together, "TOGETHER_ON", where)
        monkeypatch.setattr(qk_rates, "STACKED", 1 if host == "a layer at a time" else 1 << 26)
        net = (fresh(HOSTS["llama"]) if host == "llama" else model()).to(dtype)
        stacks, scale = [], QKRates._scale_together
        monkeypatch.setattr(
            QKRates,
            "_scale_together",
            lambda self, states, scale=scale, all=stacks: all.append(states) or scale(self, states),
        )
        handle = headwise.regularize(net, QKRates(rate=0.5))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            (HOSTS["llama"].run(net) if host == "llama" else net(ids())).square().mean().backward()
            optimizer.step()
            handle.after_step()
        monkeypatch.setattr(QKRates, "_scale_together", scale)
        assert [len(states) for states in stacks] == (
            [] if not where else [1] * 6 if host == "a layer at a time" else [2] * 3
        )
        made.append({**dict(net.named_parameters()), **dict(net.named_buffers())})
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], **({} if dtype == torch.float32 else HALF))


def test_stacked_layers_at_rate_one_keep_the_bits_of_the_first_step(monkeypatch):
    monkeypatch.setattr(together, "TOGETHER_ON", ("cpu",))
    net, plain = model(), model()
    handle = headwise.regularize(net, QKRates())
    for one in (net, plain):
        one(ids()).square().mean().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    handle.after_step()
    wanted = dict(plain.named_parameters())
    # but for rows whose norms have other bits in a stack
    for name, p in net.named_parameters():
        torch.testing.assert_close(p, wanted[name], rtol=1e-6, atol=1e-7)
    values = net.layers[0].c_attn.weight[48:]
    assert torch.equal(values, plain.layers[0].c_attn.weight[48:])


def test_weights_loaded_between_steps_are_no_step():
    net, other = model(), model(seed=1)
    handle = headwise.regularize(net, QKRates(rate=0.5))
    state = net.state_dict()
    state.update({n: p.detach().clone() for n, p in other.named_parameters()})
    net.load_state_dict(state)
    net(ids())
    handle.after_step()
    wanted = dict(other.named_parameters())
    assert all(torch.equal(p, wanted[n]) for n, p in net.named_parameters())


def test_a_resumed_training_keeps_the_norms_of_its_start():
    def train(net, handle, steps):
        for _ in range(steps):
            net.zero_grad()
            net(ids()).square().mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.5).step()
            handle.after_step()

    net = model()
    handle = headwise.regularize(net, QKRates(rate=0.7))
    train(net, handle, 2)
    saved = copy.deepcopy(net.state_dict())
    train(net, handle, 2)
    again = model(seed=3)
    resumed = headwise.regularize(again, QKRates(rate=0.7))
    again.load_state_dict(saved)
    train(again, resumed, 2)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in net.state_dict().items())


def test_layers_that_share_their_weights_scale_a_step_once():
    shared = model()
    shared.layers[1].c_attn = shared.layers[0].c_attn
    handle = headwise.regularize(shared, QKRates(rate=0.5))
    before = shared.layers[0].c_attn.weight.detach().clone()
    shared(ids()).square().mean().backward()
    torch.optim.SGD(shared.parameters(), lr=0.5).step()
    went = shared.layers[0].c_attn.weight.detach().clone()
    handle.after_step()
    torch.testing.assert_close(shared.layers[0].c_attn.weight[:48].detach(), (before + 0.5 * (went - before))[:48])


def test_what_it_cannot_serve_is_refused_by_name():
    assert "itself" in QKRates().refuse(Site("x", torch.nn.Module(), qk_norm=True))
    with pytest.raises(ValueError, match=r"layers\.0.*use one of them"):
        headwise.regularize(model(), QKRates(), InterleavedHeads())
    frozen = model()
    frozen.layers[0].c_attn.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"c_attn\.weight, which is frozen"):
        headwise.regularize(frozen, QKRates())
    with pytest.raises(ValueError, match="QKRates: rate must be above 0, got 0"):
        QKRates(rate=0.0)


def test_a_cap_may_stand_behind_it():
    net = model()
    handle = headwise.regularize(net, QKRates(rate=0.5), SpectralCap(limit=0.4))
    net(ids())
    handle.after_step()
    assert torch.linalg.matrix_norm(net.layers[0].c_attn.weight[:24].detach(), 2) < 0.4001
    handle.remove(discard=True)
    assert not any("_headwise_holds" in m.__dict__ for m in net.modules())
