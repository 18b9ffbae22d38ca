"""LoRA and frozen layers: what acts on weights acts on the weights the model computes with, or is refused by name."""

from __future__ import annotations

import copy
import itertools
import sys

import peft
import pytest
import torch
from grids import part_of_grid
from methods import weight_hosts
from small_models import HOSTS, fresh
from tiny_models import FAMILIES
from torch import nn

import headwise
from headwise import AttnScale, DropHead, FeatScale, InputNoise, NuclearDecay, ProductDecay, QKClip, SigmaReparam
from headwise.attend import projections

# peft asks transformers by a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# name: how to build it, the modules that LoRA adapts, a batch
MODELS = {
    "separate": (lambda: FAMILIES["Llama"].build().train(), ["q_proj", "k_proj", "v_proj", "o_proj"],
    FAMILIES["Llama"].batch()),
    "some": (lambda: FAMILIES["Llama"].build().train(), ["q_proj", "v_proj"], FAMILIES["Llama"].batch()),
    "beside": (lambda: FAMILIES["BERT"].build().train(), ["query", "key", "value", "attention.output.dense"],
    FAMILIES["BERT"].batch()),
    "transposed": (lambda: FAMILIES["GPT2"].build().train(), ["c_attn", "attn.c_proj"], FAMILIES["GPT2"].batch()),
    "fused": (lambda: fresh(HOSTS["own"]), ["qkv", "attn.proj"], HOSTS["own"].batch()[0][0]),
}  # fmt: skip


def run(model, batch):
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    return out if isinstance(out, torch.Tensor) else out[0]


def adapted(name, adapters=1, seed=3, **settings):
    """Return the model with LoRA on its attention, whose B is not 0."""
    build, targets, batch = MODELS[name]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "transposed", **settings)
    made = peft.get_peft_model(build(), config)
    for i in range(1, adapters):
        made.add_adapter(f"more{i}", config)
    if adapters > 1:
        made.base_model.set_adapter(["default", *(f"more{i}" for i in range(1, adapters))])
    drawn(made, seed)
    return made, batch


def drawn(made, seed=3):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=g))


def merged(made):
    """Return a plain copy of an adapted model with its adapters in the weights."""
    return copy.deepcopy(made).merge_and_unload()


def sites(model):
    from headwise.attend.hosts.finding import sites

    return sites(model)


def assert_same_weights(made, plain):
    for site, twin in zip(sites(made), sites(plain), strict=True):
        for block, other in zip(projections.of(site).blocks, projections.of(twin).blocks, strict=True):
            assert block.kind == other.kind
            torch.testing.assert_close(block.weight(), other.weight(), rtol=1e-5, atol=1e-6)
            if other.bias() is not None:
                torch.testing.assert_close(block.bias(), other.bias(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_those_of_the_merged_model(name):
    made, _ = adapted(name)
    assert_same_weights(made, merged(made))
    base = made.get_base_model() if name == "fused" else made
    first = projections.of(sites(base)[0]).q
    assert (first.weight() - first.by_rows(first.module.base_layer.weight)[first.rows]).abs().max() > 1e-2


@pytest.mark.parametrize("state", ["two adapters", "bias", "rank-stabilised", "merged in place"])
def test_every_state_of_adapters_is_read_as_it_acts(state):
    settings = {"bias": {"lora_bias": True}, "rank-stabilised": {"use_rslora": True}}.get(state, {})
    made, _ = adapted("fused", adapters=2 if state == "two adapters" else 1, **settings)
    plain = merged(made)
    if state == "merged in place":
        made.merge_adapter()
    assert_same_weights(made, plain)


def test_a_switched_off_adapter_is_left_out_and_comes_back():
    made, _ = adapted("fused")
    block, plain = projections.of(sites(made)[0]).q, merged(made)
    with made.disable_adapter():
        assert torch.equal(block.weight(), block.by_rows(block.module.base_layer.weight)[block.rows])
    assert_same_weights(made, plain)


@pytest.mark.parametrize(
    "method", [NuclearDecay(strength=1.0), ProductDecay(strength=1.0)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize(
    ("first", "name"),
    part_of_grid(
        itertools.product(["adapters", "regularize"], MODELS),
        [*(("adapters", name) for name in MODELS), ("regularize", "separate"), ("regularize", "fused")],
    ),
)
def test_decay_of_products_is_that_of_the_effective_weights_and_trains_the_adapters(method, name, first):
    if first == "adapters":
        made, batch = adapted(name)
        handle = headwise.regularize(made, method)
    else:
        build, targets, batch = MODELS[name]
        model = build()
        handle = headwise.regularize(model, method)
        made = peft.get_peft_model(
            model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "transposed")
        )
        drawn(made)
    # Without the methods' own hooks, which the merged copy would carry along.
    plain = merged(adapted(name)[0])
    judge = headwise.regularize(plain.requires_grad_(True), method)
    run(made, batch), run(plain, batch)
    value, wanted = handle.loss(), judge.loss()
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    value.backward()
    wanted.backward()
    assert all(p.grad is None for n, p in made.named_parameters() if "lora_" not in n)
    q = projections.of(sites(made)[0]).q
    full = plain.get_submodule(q.where.rpartition(".")[0].removeprefix("base_model.model.")).weight.grad
    full = full.t() if name == "transposed" else full
    a, b = q.module.lora_A["default"].weight, q.module.lora_B["default"].weight
    torch.testing.assert_close(b.grad, 3 * full @ a.T, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(a.grad, 3 * b.T @ full, rtol=1e-3, atol=1e-4)
    assert b.grad.abs().max() > 1e-3


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["separate", "transposed", "fused"])
def test_qkclip_never_writes_a_frozen_base(name):
    made, batch = adapted(name)
    before = state(made)
    with pytest.raises(ValueError, match=r"would rewrite .*\.weight, which is frozen .*QKNorm, SoftCap or Temperature"):
        headwise.regularize(made, QKClip(threshold=1e-3))
    run(made, batch)
    assert all(torch.equal(before[key], value) for key, value in made.state_dict().items())


def test_qkclip_on_a_trained_base_scales_base_and_adapter_to_the_threshold():
    net = weight_hosts.model()
    made = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["c_attn"], lora_bias=True))
    drawn(made)
    made.requires_grad_(True)
    handle = headwise.regularize(made, QKClip(threshold=0.05), where=lambda site: "layers.0" in site.name)
    weight_hosts.loss_of(made, weight_hosts.ids())
    tall = handle.fitted[0].states[0].tensor("largest").clone()
    assert (tall > 0.05).all()
    handle.after_step()
    weight_hosts.loss_of(made, weight_hosts.ids())
    torch.testing.assert_close(
        handle.fitted[0].states[0].tensor("largest"), torch.full_like(tall, 0.05), rtol=1e-4, atol=1e-6
    )


def test_a_frozen_layer_is_left_out_of_clipping_and_the_report_says_so():
    net, batch = weight_hosts.model(), weight_hosts.ids()
    net.layers[0].requires_grad_(False)
    handle = headwise.regularize(net, QKClip(threshold=1e-3))
    before = net.layers[0].c_attn.weight.clone()
    weight_hosts.loss_of(net, batch)
    handle.after_step()
    assert torch.equal(net.layers[0].c_attn.weight, before)
    row = next(row for row in handle.report().rows if row.name == "layers.0")
    assert "layers.0.c_attn.weight, which is frozen" in row.detail
    handle.remove()
    with pytest.raises(ValueError, match=r"layers.0: QKClip would rewrite layers.0.c_attn.weight, which is frozen"):
        headwise.regularize(net, QKClip(), where=["layers.0"])


def test_frozen_queries_leave_the_keys_to_clip():
    model = FAMILIES["Llama"].build().train()
    for layer in model.model.layers:
        layer.self_attn.q_proj.requires_grad_(False)
    with pytest.raises(ValueError, match=r"q_proj.weight, which is frozen.*QKClip\(balance=0.0\) writes keys alone"):
        headwise.regularize(model, QKClip(threshold=1e-3))
    before = state(model)
    handle = headwise.regularize(model, QKClip(threshold=1e-3, balance=0.0))
    model(**FAMILIES["Llama"].batch())
    handle.after_step()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {f"model.layers.{i}.self_attn.k_proj.weight" for i in range(3)}


def test_layers_are_asked_again_once_a_parameter_was_frozen_or_a_module_put_in(monkeypatch):
    net, asked, plain = weight_hosts.model(), [], QKClip.refuse
    handle = headwise.regularize(net, QKClip())
    monkeypatch.setattr(QKClip, "refuse", lambda self, site: [asked.append(site.name), plain(self, site)][1])

    def step():
        weight_hosts.loss_of(net, weight_hosts.ids()).backward()
        handle.loss()
        handle.after_step()
        return len(asked)

    layers = len(handle.fitted)
    # Adapters that are in the process may change in place, so that layers are asked in each step.
    monkeypatch.delitem(sys.modules, "peft.tuners.tuners_utils", raising=False)
    assert step() == step() == layers
    net.layers[0].added = torch.nn.Identity()
    assert step() == step() == 2 * layers
    net.layers[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"layers.1: QKClip.* can no longer act"):
        step()


def test_layers_frozen_after_regularize_stop_the_step_before_anything_is_clipped():
    net = weight_hosts.model()
    handle = headwise.regularize(net, QKClip(threshold=1e-3))
    net.layers[1].requires_grad_(False)
    before = state(net)
    weight_hosts.loss_of(net, weight_hosts.ids())
    with pytest.raises(
        RuntimeError, match=r"layers.1: QKClip\(threshold=0.001\) can no longer act: .*before regularize\(\)"
    ):
        handle.after_step()
    assert handle.step == 0
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


@pytest.mark.parametrize("method", [NuclearDecay(), ProductDecay()], ids=lambda m: type(m).__name__)
def test_decay_of_weights_that_are_all_frozen_is_refused(method):
    net = weight_hosts.model().requires_grad_(False)
    with pytest.raises(ValueError, match=r"would change nothing: all weights of layers\.0 are frozen"):
        headwise.regularize(net, method)
    net.layers[0].c_proj.requires_grad_(True)
    assert len(headwise.regularize(net, method).fitted) == 1


LATER = [
    (QKClip(threshold=1e-3), "separate transposed fused"),
    (FeatScale(), "beside fused"),
    (AttnScale(), "beside fused"),
    (SigmaReparam(), "separate transposed fused"),
]


@pytest.mark.parametrize(
    ("method", "name"),
    [pytest.param(m, name, id=f"{type(m).__name__}-{name}") for m, names in LATER for name in names.split()],
)
def test_adapters_put_on_after_regularize_are_told_where_a_method_cannot_follow(method, name):
    build, targets, batch = MODELS[name]
    model = build()
    handle = headwise.regularize(model, method, example=batch)
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=name == "transposed"))
    before = state(made)
    run(made, batch)
    with pytest.raises(RuntimeError, match=rf"{type(method).__name__}.*before regularize\(\): call it last"):
        handle.after_step()
    assert all(torch.equal(before[key], value) for key, value in made.state_dict().items())


def test_methods_that_act_in_the_call_alone_go_on_under_later_adapters():
    model = fresh(HOSTS["own"])
    handle = headwise.regularize(model, DropHead(p=0.5))
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["qkv"]))
    run(made, MODELS["fused"][2]).sum().backward()
    assert float(handle.loss()) == 0
    handle.after_step()
    assert handle.step == 1


@pytest.mark.parametrize("name", ["separate", "fused"])
def test_the_handle_is_found_through_peft(name):
    build, targets, _ = MODELS[name]
    model = build()
    handle = headwise.regularize(model, DropHead())
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    assert headwise.handle(made) is handle
    outside = headwise.regularize(adapted(name)[0], DropHead())
    assert headwise.handle(nn.parallel.DataParallel(outside.model)) is outside


def test_a_model_around_a_regularized_part_is_not_itself_regularized():
    model = FAMILIES["Llama"].build()
    headwise.regularize(model.model, DropHead())
    with pytest.raises(ValueError, match="LlamaForCausalLM is not regularized"):
        headwise.handle(model)


@pytest.mark.parametrize("name", MODELS)
def test_adapters_of_attention_decay_with_attention(name):
    made, _ = adapted(name)
    made.base_model.model.requires_grad_(False)
    for key, parameter in made.named_parameters():
        parameter.requires_grad_("lora_" in key)
    groups = headwise.parameter_groups(made, lr=1.0, weight_decay=0.1, attention_weight_decay=0.3)
    assert [group["name"] for group in groups] == ["attention"]
    assert len(groups[0]["params"]) == sum("lora_" in key for key, _ in made.named_parameters())


def test_adapters_elsewhere_are_not_attentions():
    model = FAMILIES["Llama"].build()
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    groups = {g["name"]: g["params"] for g in headwise.parameter_groups(made, lr=1.0, weight_decay=0.1)}
    named = {name: p for name, p in made.named_parameters() if p.requires_grad}
    for name, parameter in named.items():
        assert any(parameter is p for p in groups["attention" if "q_proj" in name else "mlp"]), name


@pytest.mark.parametrize("kind", ["dora", "ia3", "multihead"])
def test_adapters_of_other_kinds_keep_to_attentions_group(kind):
    made = _other(kind)
    groups = {g["name"]: g["params"] for g in headwise.parameter_groups(made, lr=1.0, weight_decay=0.1)}
    inside = [p for n, p in made.named_parameters() if p.requires_grad and p.dim() > 1 and p.numel() > max(p.shape)]
    assert not inside or all(any(p is q for q in groups["attention"]) for p in inside)
    assert {len(g) for g in groups.values()} != {0}


def _other(kind):
    if kind == "multihead":
        return peft.get_peft_model(fresh(HOSTS["torch"]), peft.LoraConfig(r=2, target_modules=["self_attn"]))
    llama = FAMILIES["Llama"].build().train()
    if kind == "dora":
        return peft.get_peft_model(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"], use_dora=True))
    return peft.get_peft_model(llama, peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]))


@pytest.mark.parametrize(
    "method", [NuclearDecay(), ProductDecay(), QKClip(), SigmaReparam()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dora", "LoRA's DoraLinearVariant"),
        ("ia3", "peft's ia3 Linear"),
        ("multihead", "peft's lora MultiheadAttention"),
    ],
)
def test_adapters_that_are_no_sum_of_weights_are_refused_by_name(method, kind, told):
    made = _other(kind)
    with pytest.raises(ValueError, match=rf"is adapted by {told}, whose effect .*merge the adapters") as error:
        headwise.regularize(made, method)
    assert max(map(len, str(error.value).splitlines())) < 500 * len(sites(made))


def test_noise_per_head_goes_through_the_effective_weights():
    made, batch = adapted("fused")
    plain, method = merged(made), InputNoise(scale=1.0, unit="std", per_head=True)
    outputs = []
    for model in (made, plain):
        headwise.regularize(model, method, seed=5)
        outputs.append(run(model, batch))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="is adapted by peft's lora MultiheadAttention"):
        headwise.regularize(_other("multihead"), method)


def test_sigma_reparam_on_lora_is_refused_shortly():
    made, _ = adapted("separate")
    with pytest.raises(
        ValueError, match=r"SigmaReparam scales whole weights, and .*q_proj is adapted: merge the adapters"
    ) as error:
        headwise.regularize(made, SigmaReparam())
    text = str(error.value)
    assert "Linear(" not in text
    assert len(text) < 1000


def test_a_low_rank_layer_of_ones_own_is_refused_by_name():
    class Low(nn.Linear):
        def __init__(self, *sizes, **settings):
            super().__init__(*sizes, **settings)
            self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.randn(sizes[1], 2))

        def forward(self, x):
            return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T

    model = FAMILIES["Llama"].build().train()
    for layer in model.model.layers:
        layer.self_attn.q_proj = Low(32, 32, bias=False)
    with pytest.raises(ValueError, match=r"q_proj.weight \(Low\) holds lora_a, lora_b in addition to.*merge them"):
        headwise.regularize(model, ProductDecay())


@pytest.mark.parametrize("first", ["adapters", "watch"])
@pytest.mark.parametrize("name", MODELS)
def test_watched_figures_are_those_of_the_effective_weights(name, first):
    build, targets, batch = MODELS[name]
    names = ["spectral_norm_qk", "nuclear_norm_vo", "stable_rank_qk", "entropy_floor_spectral"]
    if first == "adapters":
        made, _ = adapted(name)
        watch = headwise.watch(made, every=1, on_alert=None, statistics=names)
    else:
        model = build()
        watch = headwise.watch(model, every=1, on_alert=None, statistics=names)
        made = peft.get_peft_model(
            model, peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, fan_in_fan_out=name == "transposed")
        )
        drawn(made)
    plain = merged(adapted(name)[0])
    twin = headwise.watch(plain, every=1, on_alert=None, statistics=names)
    for model, one in ((made.train(), watch), (plain.train(), twin)):
        run(model, batch)
        one.step()
    values = [[r["value"] for r in one.records()] for one in (watch, twin)]
    assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert values[0]


def test_an_audited_model_with_adapters_is_read_with_them(tmp_path):
    from headwise.health.auditing.opening import BuiltModel
    from headwise.health.auditing.weights import read_checkpoint

    made, _ = adapted("separate")
    read, plain = (read_checkpoint(BuiltModel("a", "factory", model)) for model in (made, merged(made)))
    assert [r["value"] for r in read.records] == pytest.approx([r["value"] for r in plain.records], rel=1e-4)


COMPUTED = [SigmaReparam(), headwise.SpectralNorm(), headwise.WeightNorm(), headwise.InterleavedHeads()]


@pytest.mark.parametrize("safe", [False, True], ids=["in place", "safe"])
@pytest.mark.parametrize("method", COMPUTED, ids=lambda method: type(method).__name__)
def test_an_adapter_is_not_merged_into_a_computed_weight_which_would_lose_it(method, safe):
    build, targets, batch = MODELS["separate"]
    model = build().eval()
    handle = headwise.regularize(model, method)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, init_lora_weights=False)).eval()
    with pytest.raises(RuntimeError, match=r"what is merged into it would be lost: call handle.fold\(\)"):
        adapted.merge_and_unload(safe_merge=safe)
    with torch.no_grad():
        expected = adapted(**batch).logits
        handle.fold()
        merged = adapted.merge_and_unload(safe_merge=safe)
        torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5, rtol=1e-4)


def test_a_computed_weight_reads_as_a_plain_tensor():
    model = MODELS["separate"][0]()
    headwise.regularize(model, SigmaReparam())
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight.data) is torch.Tensor and type(weight * 2) is torch.Tensor
    assert torch.equal(weight.data, weight) and weight.requires_grad and not weight.data.requires_grad
