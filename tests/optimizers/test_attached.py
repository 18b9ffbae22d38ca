"""What is attached to an optimizer: saved with it to the bit, removed without a trace, and refused where it has no
meaning."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from optimizers.layouts import built, copied, gradients, set_gradients
from small_models import HOSTS, fresh
from torch import nn

import headwise
from headwise import QKClip

KINDS = ("Hyperball", "Stiefel", "CautiousDecay", "AlphaDecay")


def attach(kind, optimizer, groups):
    if kind == "CautiousDecay":
        return headwise.CautiousDecay(optimizer)
    return getattr(headwise, kind)(optimizer, groups, **({"every": 4, "least": 4} if kind == "AlphaDecay" else {}))


def begun(kind, base="AdamW", name="llama", dtype=torch.float32):
    model = built(name)[0].to(dtype)
    decay = 0.1 if kind.endswith("Decay") else 0.0
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=decay)
    optimizer = headwise.Muon(groups) if base == "Muon" else torch.optim.AdamW(groups)
    return model, optimizer, groups


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["AdamW", "Muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_goes_on_to_the_bit(kind, base, dtype, tmp_path):
    model, optimizer, groups = begun(kind, base, dtype=dtype)
    attach(kind, optimizer, groups)
    steps = [{n: g.to(dtype) for n, g in grads.items()} for grads in gradients(model, 6)]
    for at, grads in enumerate(steps):
        if at == 3:
            torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
        set_gradients(model, grads)
        optimizer.step()
    other, again, groups = begun(kind, base, dtype=dtype)
    attach(kind, again, groups)
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for grads in steps[3:]:
        set_gradients(other, grads)
        again.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_after_removal_the_optimizer_steps_as_it_did(kind):
    model, optimizer, groups = begun(kind)
    twin = copy.deepcopy(model)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    attached = attach(kind, optimizer, groups)
    with pytest.raises(ValueError, match=f"{kind} is attached to this optimizer already"):
        attach(kind, optimizer, groups)
    attached.remove()
    attached.remove()
    assert [group["weight_decay"] for group in optimizer.param_groups] == decays
    assert not any(key.startswith(("alpha", "cautious")) for group in optimizer.param_groups for key in group)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(headwise.parameter_groups(twin, lr=0.01, weight_decay=decays[0]))
    for grads in gradients(model, 2):
        for net, one in ((model, optimizer), (twin, plain)):
            set_gradients(net, {name: gradient.float() for name, gradient in grads.items()})
            one.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    attach(kind, optimizer, groups).remove()


@pytest.mark.parametrize("base", ["AdamW", "Muon"])
def test_norms_stay_with_bfloat16_weights(base):
    model, optimizer, groups = begun("Hyperball", base, dtype=torch.bfloat16)
    headwise.Hyperball(optimizer, groups)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = float(weight.detach().float().norm())
    for grads in gradients(model, 20):
        set_gradients(model, {name: gradient.bfloat16() for name, gradient in grads.items()})
        optimizer.step()
    assert float(weight.detach().float().norm()) == pytest.approx(before, rel=0.01)


def test_the_radius_is_the_one_singular_value_of_each_head():
    model, optimizer, groups = begun("Stiefel", "Muon", "gpt-neox")
    headwise.Stiefel(optimizer, groups, radius=0.5)
    for grads in gradients(model, 3):
        set_gradients(model, {name: gradient.float() for name, gradient in grads.items()})
        optimizer.step()
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight
    for rows in weight.detach().split(8):
        torch.testing.assert_close(torch.linalg.svdvals(rows), torch.full((8,), 0.5), rtol=1e-4, atol=1e-5)


def test_the_retraction_removes_the_part_of_a_step_that_leaves_the_manifold():
    torch.manual_seed(0)
    weight, step = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    from headwise.attend.optimizers.orthogonal import polar

    on = polar(weight[None])[0]
    inward = (step @ on.T + on @ step.T) / 2 @ on
    small = 1e-5
    moved = (polar((on + small * step)[None])[0] - on) / small
    torch.testing.assert_close(moved, step - inward, rtol=0, atol=1e-3)


def test_hyperball_makes_the_rate_the_relative_size_of_a_step():
    model, optimizer, groups = begun("Hyperball")
    headwise.Hyperball(optimizer, groups)
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    set_gradients(model, {name: g.float() for name, g in next(gradients(model, 1)).items()})
    optimizer.step()
    relative = float((weight.detach() - before).norm() / before.norm())
    # at right angles or a little less, as the norm stays
    assert 0.006 < relative <= 0.0101


def test_exponents_are_named_and_small_matrices_are_left_out():
    _, optimizer, groups = begun("AlphaDecay", name="torch")
    decay = headwise.AlphaDecay(optimizer, groups, least=32)
    names = {name for name in decay.exponents() if name.startswith("layers.0")}
    assert names == {
        f"layers.0.{name}"
        for name in (
            "self_attn.in_proj_weight q",
            "self_attn.in_proj_weight k",
            "self_attn.in_proj_weight v",
            "self_attn.out_proj.weight o",
            "linear1.weight mlp",
            "linear2.weight mlp",
        )
    }
    assert headwise.AlphaDecay(torch.optim.AdamW(groups), groups).exponents() == {}


def test_matrices_that_are_too_small_decay_as_before():
    model, optimizer, groups = begun("AlphaDecay")
    twin = copy.deepcopy(model)
    headwise.AlphaDecay(optimizer, groups, least=1000)
    plain = torch.optim.AdamW(headwise.parameter_groups(twin, lr=0.01, weight_decay=0.1))
    for grads in gradients(model, 2):
        for net, one in ((model, optimizer), (twin, plain)):
            set_gradients(net, {name: gradient.float() for name, gradient in grads.items()})
            one.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
def test_a_decay_of_what_is_fixed_is_refused_before_a_weight_changes(kind):
    model, _, _ = begun(kind)
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"{kind} keeps .*q_proj\.weight.*weight_decay=0\.1 cannot change: set it"):
        attach(kind, torch.optim.AdamW(groups), groups)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_clipping_of_weights_whose_size_is_fixed_is_refused(kind, when):
    host = HOSTS["own"]
    model = fresh(host)
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups)
    message = rf"QKClip shrinks the weights at blocks\.0\.attn, whose size {kind} fixes"
    if when == "before":
        headwise.regularize(model, QKClip())
        with pytest.raises(ValueError, match=message):
            attach(kind, optimizer, groups)
        return
    attach(kind, optimizer, groups)
    headwise.regularize(model, QKClip())
    host.run(model).square().mean().backward()
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_a_matrix_of_zeros_is_refused():
    model, optimizer, groups = begun("Hyperball")
    nn.init.zeros_(model.model.layers[1].mlp.down_proj.weight)
    with pytest.raises(ValueError, match=r"a matrix of model\.layers\.1\.mlp\.down_proj\.weight is zero"):
        headwise.Hyperball(optimizer, groups)


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel", "AlphaDecay"])
def test_an_optimizer_of_other_parameters_is_refused(kind):
    _, _, groups = begun(kind)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ValueError, match=rf"{kind} finds no matrix of LlamaForCausalLM in the optimizer"):
        attach(kind, other, groups)


def test_decays_without_a_decay_and_decays_of_the_gradient_are_refused():
    model = fresh(HOSTS["own"])
    none, some = (headwise.parameter_groups(model, lr=0.01, weight_decay=decay) for decay in (0.0, 0.1))
    with pytest.raises(ValueError, match="CautiousDecay finds no weight decay"):
        headwise.CautiousDecay(torch.optim.AdamW(none))
    with pytest.raises(ValueError, match="AlphaDecay finds no weight decay"):
        headwise.AlphaDecay(torch.optim.AdamW(none), none)
    with pytest.raises(ValueError, match="CautiousDecay needs an optimizer whose weight decay is decoupled; Adam adds"):
        headwise.CautiousDecay(torch.optim.Adam(some))
    with pytest.raises(ValueError, match="AlphaDecay needs an optimizer whose weight decay is decoupled; SGD adds"):
        headwise.AlphaDecay(torch.optim.SGD(some), some)
    # torch writes an optimizer's settings into its groups
    some = headwise.parameter_groups(model, lr=0.01, weight_decay=0.1)
    optimizer = torch.optim.AdamW(some)
    headwise.CautiousDecay(optimizer)
    with pytest.raises(ValueError, match="CautiousDecay has taken this optimizer's weight decay"):
        headwise.AlphaDecay(optimizer, some)


def test_a_closure_computes_the_gradients_within_the_step():
    host = HOSTS["own"]
    ways = []
    for closed in (False, True):
        model = fresh(host).double()
        groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.0)
        optimizer = torch.optim.AdamW(groups)
        headwise.Hyperball(optimizer, groups)
        x = torch.randn(3, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

        def closure(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            if closed:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        ways.append(list(model.parameters()))
    for ours, theirs in zip(*ways, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
def test_a_method_that_caps_what_is_fixed_is_refused(kind):
    model = fresh(HOSTS["own"])
    headwise.regularize(model, headwise.SpectralCap())
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.0)
    with pytest.raises(ValueError, match=rf"SpectralCap writes blocks\.0\.attn\..*and {kind} fixes its size"):
        attach(kind, torch.optim.AdamW(groups), groups)


def test_two_that_fix_the_size_of_weights_are_refused():
    model, optimizer, groups = begun("Stiefel")
    headwise.Stiefel(optimizer, groups)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="Hyperball would change the size of weights that Stiefel fixes"):
        headwise.Hyperball(optimizer, groups)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_optimizer_that_accelerate_has_prepared_is_refused():
    from accelerate import Accelerator

    _, optimizer, groups = begun("Hyperball")
    prepared = Accelerator(cpu=True).prepare(optimizer)
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer wraps another: attach to that one, before accelerator"):
        headwise.Hyperball(prepared, groups)


def test_the_split_of_a_reparametrized_model_changes_no_state_of_it():
    model = fresh(HOSTS["own"])
    nn.utils.parametrizations.spectral_norm(model.blocks[0].mlp[0])
    model.train()
    before = copy.deepcopy(model.state_dict())
    headwise.Muon(headwise.parameter_groups(model, lr=0.01, weight_decay=0.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
@pytest.mark.parametrize("decay", ["CautiousDecay", "AlphaDecay"])
def test_a_decay_that_another_has_taken_is_refused_too(kind, decay):
    _, optimizer, groups = begun(decay)
    attach(decay, optimizer, groups)
    with pytest.raises(ValueError, match=rf"{kind} keeps .*q_proj\.weight, which .*_decay=0\.1 cannot change: set it"):
        attach(kind, optimizer, groups)


@pytest.mark.parametrize("kind", ["CautiousDecay", "AlphaDecay"])
def test_a_state_from_before_decays_were_taken_is_taken_anew(kind):
    model, optimizer, groups = begun(kind)
    twin, beside, others = begun(kind)
    first, second = gradients(model, 2)
    for net, one in ((model, optimizer), (twin, beside)):
        set_gradients(net, {name: gradient.float() for name, gradient in first.items()})
        one.step()
    state = copy.deepcopy(optimizer.state_dict())
    attach(kind, optimizer, groups)
    optimizer.load_state_dict(state)
    attach(kind, beside, others)
    for net, one in ((model, optimizer), (twin, beside)):
        set_gradients(net, {name: gradient.float() for name, gradient in second.items()})
        one.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["CautiousDecay", "AlphaDecay"])
def test_a_schedule_of_the_decay_is_followed(kind):
    _, optimizer, groups = begun(kind)
    attach(kind, optimizer, groups)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    optimizer.step()
    group = optimizer.param_groups[0]
    key = {"CautiousDecay": "cautious_decay", "AlphaDecay": "alpha_decay"}[kind]
    assert (group["weight_decay"], group[key]) == (0.0, 0.3)


def test_alpha_decay_leaves_other_parameters_of_a_group_their_decay():
    model, _, groups = begun("AlphaDecay")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    attach("AlphaDecay", optimizer, groups)
    embedding = model.get_input_embeddings().weight
    before = embedding.detach().clone()
    embedding.grad = torch.zeros_like(embedding)
    optimizer.step()
    torch.testing.assert_close(embedding.detach(), before * (1 - 0.1 * 0.1))


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
def test_a_decay_that_comes_later_is_refused_at_the_step(kind):
    model, optimizer, groups = begun(kind)
    attach(kind, optimizer, groups)
    before = copy.deepcopy(model.state_dict())
    state = optimizer.state_dict()
    state["param_groups"][0]["weight_decay"] = 0.1
    optimizer.load_state_dict(state)
    set_gradients(model, {name: gradient.float() for name, gradient in next(gradients(model, 1)).items()})
    with pytest.raises(ValueError, match=rf"{kind} keeps .*q_proj\.weight, which weight_decay=0\.1 cannot change"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_a_fused_optimizer_skips_changes_nothing(kind):
    model = built("llama")[0].float()
    groups = headwise.parameter_groups(model, lr=0.01, weight_decay=0.1 if kind.endswith("Decay") else 0.0)
    optimizer = torch.optim.AdamW(groups, fused=True)
    attach(kind, optimizer, groups)
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    tokens = torch.arange(10).view(2, 5)
    for finite in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(tokens, labels=tokens).loss).backward()
        if not finite:
            model.get_input_embeddings().weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert finite != all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


OPTIMIZERS = [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]


DECOUPLED = {"AdamW", "Adafactor", "Muon"}


@pytest.mark.parametrize("kind", [c for c in OPTIMIZERS if "weight_decay" in inspect.signature(c).parameters])
def test_every_optimizer_of_torch_that_adds_its_decay_to_the_gradient_is_refused(kind):
    optimizer = kind([nn.Parameter(torch.ones(4, 4))], weight_decay=0.1)
    if kind.__name__ in DECOUPLED:
        headwise.CautiousDecay(optimizer)
    else:
        with pytest.raises(ValueError, match=f"{kind.__name__} adds it to the gradient"):
            headwise.CautiousDecay(optimizer)


def saved_by_head(kind, **settings):
    model = built("llama")[0]
    groups = headwise.parameter_groups(model, 0.01, 0.1 if kind is headwise.AlphaDecay else 0.0)
    optimizer = torch.optim.AdamW(groups)
    attached = kind(optimizer, groups, **settings)
    return model, optimizer, attached


def test_a_state_of_other_matrices_is_refused_before_a_weight_moves():
    model, optimizer, _ = saved_by_head(headwise.Hyperball, per="head")
    set_gradients(model, next(iter(gradients(model))))
    optimizer.step()
    other, again, _ = saved_by_head(headwise.Hyperball, per="matrix")
    again.load_state_dict(optimizer.state_dict())
    before = copied(other)
    set_gradients(other, next(iter(gradients(other))))
    with pytest.raises(
        ValueError, match=r"has \d norms for .*_proj\.weight, and Hyperball keeps 1 here: build it with"
    ):
        again.step()
    assert all(torch.equal(p, before[name]) for name, p in other.named_parameters())


def test_factors_of_other_matrices_are_read_anew():
    model, optimizer, _ = saved_by_head(headwise.AlphaDecay, per="head", least=4)
    set_gradients(model, next(iter(gradients(model))))
    optimizer.step()
    other, again, _ = saved_by_head(headwise.AlphaDecay, per="matrix", least=4)
    again.load_state_dict(optimizer.state_dict())
    fresh, plain, _ = saved_by_head(headwise.AlphaDecay, per="matrix", least=4)
    other.load_state_dict(fresh.state_dict())
    for net, one in ((other, again), (fresh, plain)):
        set_gradients(net, next(iter(gradients(net))))
        one.step()
    assert [g["alpha_factors"] for g in again.param_groups if "alpha_factors" in g] == [
        g["alpha_factors"] for g in plain.param_groups if "alpha_factors" in g
    ]


@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
def test_whole_matrices_are_fixed_where_heads_cannot_be_told(kind):
    from transformers import CodeGenConfig, CodeGenForCausalLM

    model = CodeGenForCausalLM(CodeGenConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=20))
    groups = headwise.parameter_groups(model, 0.01, 0.0)
    optimizer = torch.optim.AdamW(groups)
    getattr(headwise, kind)(optimizer, groups, per="matrix")
    weight = model.transformer.h[0].attn.qkv_proj.weight
    before = weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    assert not torch.equal(weight, before)
    torch.testing.assert_close(weight.norm(), before.norm())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["Hyperball", "Stiefel"])
def test_weights_beside_adapters_that_are_no_sum_of_weights_are_fixed(kind):
    import peft

    model = peft.get_peft_model(built("llama")[0], peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad |= name.endswith("o_proj.weight")
    groups = headwise.parameter_groups(model, 0.01, 0.0)
    attached = getattr(headwise, kind)(torch.optim.AdamW(groups), groups, per="head")
    assert {attached.parts.name(held.parameter).rpartition(".")[0][-6:] for held in attached._held()} <= {"o_proj"}
    assert list(attached._held(moved=False))
