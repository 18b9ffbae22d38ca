"""Muon by head: what it shares with torch's, what it tells, refuses and saves, and the loops in which it steps."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from optimizers.layouts import LAYOUTS, built, gradients, set_gradients
from small_models import HOSTS, fresh
from torch import nn

import headwise
from headwise import QKClip, SigmaReparam
from headwise.attend.optimizers.parts import Part, rest


def groups(model, decay=0.1, rate=1e-3):
    return headwise.parameter_groups(model, lr=rate, weight_decay=decay)


def trained(model, optimizer, host, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        host.run(model).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_by_matrix_it_takes_the_steps_of_torch_where_projections_are_stored_apart(scale):
    model, heads = built("llama")
    model = model.float()
    twin = copy.deepcopy(model)
    optimizer = headwise.Muon(groups(model), per="matrix", adjust_lr_fn=scale)
    hidden = [p for name, p in twin.named_parameters() if name in heads]
    theirs = torch.optim.Muon(hidden, lr=1e-3, weight_decay=0.1, adjust_lr_fn=scale)
    before = copy.deepcopy(model.state_dict())
    for grads in gradients(model, 3):
        grads = {name: gradient.float() for name, gradient in grads.items()}
        for net in (model, twin):
            set_gradients(net, grads)
        optimizer.step()
        theirs.step()
    for name in heads:
        ours, others = (net.get_parameter(name).detach() - before[name] for net in (model, twin))
        # torch iterates in bfloat16
        assert (ours - others).norm() < 0.03 * others.norm(), name


def test_groups_of_heads_take_the_key_heads_that_their_queries_use():
    model = built("llama")[0]
    told = headwise.Muon(groups(model), per="group", heads_per_group=2).report()
    assert "layers.0.self_attn.q_proj.weight: q 2 × (16, 32)" in told
    assert "layers.0.self_attn.k_proj.weight: k 2 × (8, 32)" in told
    assert "layers.0.self_attn.o_proj.weight: o 2 × (32, 16)" in told
    told = headwise.Muon(groups(model), per="group", heads_per_group=4).report()
    assert "q_proj.weight: q 1 × (32, 32)" in told and "k_proj.weight: k 1 × (16, 32)" in told


def test_by_matrix_a_fused_weight_is_its_projections():
    told = headwise.Muon(groups(built("torch")[0]), per="matrix").report()
    assert "layers.0.self_attn.in_proj_weight: q 1 × (32, 32), k 1 × (32, 32), v 1 × (32, 32)" in told


def test_the_report_names_every_parameter_once_and_says_why_adamw_moves_a_matrix():
    model = built("deepseek")[0]
    told = headwise.Muon(groups(model), layers="attention").report().splitlines()
    names = [line.strip().partition(":")[0] for line in told if line.startswith("  ")]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "  model.layers.0.mlp.up_proj.weight: mlp, is not moved by heads" in told
    assert "  model.layers.0.self_attn.kv_a_proj_with_mqa.weight: rotary_k 1 × (4, 32), down_kv 1 × (12, 32)" in [
        line.replace("down_kv 1 × (12, 32), rotary_k 1 × (4, 32)", "rotary_k 1 × (4, 32), down_kv 1 × (12, 32)")
        for line in told
    ]


def test_rows_of_no_head_are_one_more_matrix():
    weight = nn.Parameter(torch.randn(11, 4))
    queries, gate = Part("q", 0, slice(0, 6), 2, 1), rest([Part("q", 0, slice(0, 6), 2, 1)], weight)
    assert rest([queries, *gate], weight) == []
    assert [(part.kind, part.count, part.rows.tolist()) for part in gate] == [("rest", 1, [6, 7, 8, 9, 10])]
    assert torch.equal(gate[0].of(weight)[0], weight[6:])
    copied = weight.detach().clone()
    gate[0].write_(copied, torch.zeros(1, 5, 4))
    gate[0].add_(copied, torch.ones(1, 5, 4), -2.0)
    assert torch.equal(copied[:6], weight[:6]) and (copied[6:] == -2).all()


class Experts(nn.Module):
    """An attention layer beside a stack of experts."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) * 0.1)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + torch.einsum("btc,ecd->btd", x, self.experts)


def test_each_expert_of_a_stack_is_a_matrix_unless_its_sides_matter():
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts())
    optimizer = headwise.Muon(groups(model))
    assert "0.experts: expert 3 × (8, 8)" in optimizer.report()
    told = headwise.Muon(groups(model), adjust_lr_fn="original").report()
    assert '0.experts: mlp, is a stack of experts, in which "original" cannot tell outputs from inputs' in told
    before = model[0].experts.detach().clone()
    model(torch.randn(2, 3, 8)).square().sum().backward()
    optimizer.step()
    assert all((model[0].experts[e] != before[e]).any() for e in range(3))


def test_a_layer_that_is_called_twice_is_moved_once():
    model = built("albert")[0]
    told = headwise.Muon(groups(model)).report()
    assert told.splitlines()[0] == 'Muon(per="head"): 6 weights as 18 matrices of 2 shapes'


def lora(target):
    import peft

    model = fresh(HOSTS["llama"])
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_refused_by_name_and_left_to_adamw_where_weights_are_trained_too():
    model = lora(["q_proj", "up_proj"])
    with pytest.raises(ValueError, match=r"none that is trained: .*lora_A.* is a factor of an adapter.*Use AdamW"):
        headwise.Muon(groups(model))
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.weight"):
            parameter.requires_grad = True
    told = headwise.Muon(groups(model)).report()
    assert "k_proj.weight: k 2 × (8, 32)" in told
    assert "q_proj.lora_B.default.weight: attention, is a factor of an adapter, which has no heads" in told
    assert "up_proj.lora_A.default.weight: mlp, is a factor of an adapter, which has no heads" in told


def test_a_reparametrized_weight_is_moved_by_its_heads():
    model = fresh(HOSTS["llama"])
    headwise.regularize(model, SigmaReparam())
    told = headwise.Muon(groups(model)).report()
    assert "self_attn.q_proj.parametrizations.weight.original: q 4 × (8, 32)" in told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per": "row"}, 'per must be "head", "group" or "matrix", got \'row\''),
        ({"per": "group"}, r'layers\.0\.self_attn: per="group" needs heads_per_group'),
        ({"per": "group", "heads_per_group": 3}, "has 4 query heads, which are not groups of 3"),
        ({"heads_per_group": 2}, r'heads_per_group=2 is for per="group" alone'),
        ({"momentum": 1.0}, "momentum must be below 1"),
        ({"layers": "mlp"}, "layers must be one of 'attention', 'all'"),
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn must be one of 'match_rms_adamw', 'original'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        headwise.Muon(groups(fresh(HOSTS["llama"])), **settings)


def test_a_group_must_not_share_a_part_of_a_head():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=48, intermediate_size=48, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=3,
        vocab_size=20, head_dim=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with pytest.raises(ValueError, match="6 query heads and 3 heads of k, so that groups of 3 would share a part of a"):
        headwise.Muon(groups(model), per="group", heads_per_group=3)


def test_heads_that_cannot_be_told_are_refused_and_whole_matrices_need_none():
    from transformers import CodeGenConfig, CodeGenForCausalLM

    model = CodeGenForCausalLM(CodeGenConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=4, vocab_size=20))
    with pytest.raises(ValueError, match=r'Muon\(per="head"\): .*h\.0\.attn .*per="matrix" needs no heads'):
        headwise.Muon(groups(model))
    told = headwise.Muon(groups(model), per="matrix").report()
    assert "h.0.attn.qkv_proj.weight: mlp 1 × (96, 32)" in told


def test_plain_lists_of_groups_are_refused():
    model = fresh(HOSTS["own"])
    with pytest.raises(TypeError, match=r"what headwise\.parameter_groups returned.*Muon\(\) got list"):
        headwise.Muon(list(groups(model)))


def test_a_sparse_gradient_is_refused():
    model = fresh(HOSTS["own"])
    optimizer = headwise.Muon(groups(model))
    weight = optimizer.param_groups[0]["params"][0]
    weight.grad = torch.zeros_like(weight).to_sparse()
    with pytest.raises(RuntimeError, match="Muon takes dense gradients"):
        optimizer.step()


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt-neox", "deepseek", "gpt2"])
def test_a_resumed_training_goes_on_to_the_bit(name, dtype, tmp_path):
    def begun():
        model = built(name)[0].to(dtype)
        return model, headwise.Muon(groups(model), nesterov=name != "gpt2")

    model, optimizer = begun()
    steps = [{n: g.to(dtype) for n, g in grads.items()} for grads in gradients(model, 6)]
    for at, grads in enumerate(steps):
        if at == 3:
            torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
        set_gradients(model, grads)
        optimizer.step()
    other, again = begun()
    weights, state = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for grads in steps[3:]:
        set_gradients(other, grads)
        again.step()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_a_model_and_its_optimizer_goes_on_alike(way):
    host = HOSTS["own"]
    model = fresh(host)
    optimizer = headwise.Muon(groups(model))
    trained(model, optimizer, host, 2)
    other, again = way((model, optimizer))
    for net, one in ((model, optimizer), (other, again)):
        trained(net, one, host, 2)
    assert again.report() == optimizer.report()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_schedules_scale_both_rates():
    optimizer = headwise.Muon(groups(fresh(HOSTS["own"]), rate=0.02), adamw_lr=0.001)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    rates = {group["orthogonal"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {True: 0.01, False: 0.0005}


def test_a_rate_on_the_device_moves_as_a_number_does():
    model = fresh(HOSTS["own"]).double()
    twin = copy.deepcopy(model)
    plain = headwise.Muon(groups(model, rate=0.01))
    tensor = headwise.Muon(groups(twin, rate=0.01))
    for group in tensor.param_groups:
        group["lr"] = torch.tensor(0.01, dtype=torch.float64) if group["orthogonal"] else group["lr"]
    for grads in gradients(model, 2):
        for net, optimizer in ((model, plain), (twin, tensor)):
            set_gradients(net, grads)
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_group_that_is_added_is_moved_by_adamw():
    model = fresh(HOSTS["own"])
    optimizer = headwise.Muon(groups(model))
    new = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [new], "lr": 0.1, "weight_decay": 0.0})
    new.grad = torch.ones(4, 4)
    optimizer.step()
    torch.testing.assert_close(new.detach(), torch.full((4, 4), 0.9))


def test_weights_without_a_gradient_stay():
    model = fresh(HOSTS["own"])
    optimizer = headwise.Muon(groups(model))
    before = copy.deepcopy(model.state_dict())
    model.blocks[0].attn.qkv.weight.grad = torch.ones_like(model.blocks[0].attn.qkv.weight)
    optimizer.step()
    moved = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert moved == ["blocks.0.attn.qkv.weight"]


def test_matrices_of_a_model_are_orthogonalized_in_parts_where_they_are_many(monkeypatch):
    model = built("gpt-neox")[0]
    twin = copy.deepcopy(model)
    one, parts = headwise.Muon(groups(model)), headwise.Muon(groups(twin))
    for grads in gradients(model, 2):
        set_gradients(model, grads)
        set_gradients(twin, grads)
        one.step()
        with monkeypatch.context() as few:
            few.setattr("headwise.attend.optimizers.orthogonal.STACKED", 4000)
            parts.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_methods_that_act_after_the_step_and_a_closure_work():
    host = HOSTS["own"]
    model = fresh(host)
    handle = headwise.regularize(model, QKClip(threshold=0.01))
    optimizer = headwise.Muon(groups(model))

    def closure():
        optimizer.zero_grad()
        loss = host.run(model).square().mean() + handle.loss()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    handle.after_step()
    assert optimizer.step(closure).item() < first


def test_names_of_layouts_cover_ten_model_types():
    assert len(LAYOUTS) >= 10


def test_convolutions_of_mlps_are_moved_by_adamw():
    block = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "up": nn.Conv1d(8, 16, 3)})
    model = nn.ModuleList([block, copy.deepcopy(block)])
    optimizer = headwise.Muon(headwise.parameter_groups(model, lr=0.01, weight_decay=0.0))
    muon, adamw = optimizer.report().split("AdamW:")
    assert "up.weight" not in muon
    assert "0.up.weight: mlp, has shape (16, 8, 3)" in adamw


def test_maximizing_is_refused():
    groups = headwise.parameter_groups(nn.MultiheadAttention(8, 2), lr=0.01, weight_decay=0.0, maximize=True)
    with pytest.raises(ValueError, match="Muon minimizes: give it the negative of the loss"):
        headwise.Muon(groups)


@pytest.mark.parametrize("key", ["name", "lr", "weight_decay"])
def test_a_group_made_by_hand_needs_what_tells_its_moves(key):
    groups = headwise.parameter_groups(nn.MultiheadAttention(8, 2), lr=0.01, weight_decay=0.0)
    groups.append({k: v for k, v in {**groups[0], "params": []}.items() if k != key})
    with pytest.raises(ValueError, match=rf"by hand has no '{key}': give it the name, lr and weight_decay"):
        headwise.Muon(groups)


def test_a_compiled_step_moves_the_parameters_of_adamw_too():
    host = HOSTS["own"]
    model = fresh(host)
    twin = copy.deepcopy(model)
    compiled, plain = headwise.Muon(groups(model, rate=0.1)), headwise.Muon(groups(twin, rate=0.1))
    step = torch.compile(lambda: compiled.step(), backend="eager")
    for _ in range(2):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        step()
        plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("per", ["head", "matrix"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_weight_that_several_parameters_make_is_refused_by_name(name, per):
    model = built(name)[0]
    place = {"llama": "model.layers.0.self_attn.q_proj", "gpt2": "transformer.h.0.attn.c_attn"}[name]
    nn.utils.parametrizations.weight_norm(model.get_submodule(place))
    known = groups(model)
    attention = {id(p) for group in known if group["name"] == "attention" for p in group["params"]}
    assert id(model.get_submodule(place).parametrizations.weight.original1) in attention
    message = rf"Muon cannot move {place}\S*, which torch computes from 2 parameters: call .*remove_param"
    with pytest.raises(ValueError, match=message):
        headwise.Muon(known, per=per)


def test_one_matrix_is_told_in_the_singular():
    told = headwise.Muon(groups(nn.MultiheadAttention(8, 1, bias=False)), per="matrix").report()
    assert told.splitlines()[0] == 'Muon(per="matrix"): 2 weights as 4 matrices of 1 shape'
