"""What branches write, and the gates of outputs, as a watch reads them from models."""

import pytest
import torch
from small_models import HOSTS, fresh
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    MixtralModel,
    OPTConfig,
    OPTModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import headwise
from headwise import GatedOutput
from headwise.attend.hosts.layers.branch_ends import mlp_of
from headwise.health.watching.alerts import HealthWarning

WRITES = ["attention_write", "mlp_write"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TOKENS = torch.arange(24).view(3, 8)


def one_step(model, call, names):
    watch = headwise.watch(model.train(), every=1, statistics=names)
    call(model)
    watch.step()
    records, reasons = watch.records(), watch.reasons()
    watch.remove()
    values = {}
    for record in records:
        values.setdefault(record["statistic"], []).append(record["value"])
    return values, reasons


class Block(nn.Module):
    """A block whose writes are known: attention's projection has a bias alone, and so has the MLP."""

    def __init__(self, attention, mlp):
        super().__init__()
        self.attn, self.norm, self.norm2 = fresh(HOSTS["own"]).blocks[0].attn, nn.LayerNorm(32), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        for layer, size in ((self.attn.proj, attention), (self.mlp[2], mlp)):
            nn.init.zeros_(layer.weight)
            nn.init.constant_(layer.bias, size)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(self.norm2(x))


def test_writes_are_ratios_of_norms_to_the_stream_that_enters_the_block():
    model = nn.Sequential(nn.ModuleList([Block(0.5, 3.0), Block(-2.0, 1.0)]))
    model.forward = lambda x: model[0][1](model[0][0](x))
    x = torch.ones(2, 5, 32) * 4
    values, _ = one_step(model, lambda m: m(x).sum().backward(), WRITES)
    # the stream of the second block is 4 + 0.5 + 3 everywhere
    assert values["attention_write"] == pytest.approx([0.5 / 4, 2.0 / 7.5])
    assert values["mlp_write"] == pytest.approx([3.0 / 4, 1.0 / 7.5])


def ends(model):
    """Yield for each block what its branches add, found by hand in the model's own modules."""
    if isinstance(model, BertModel):
        return [(b.attention.output.dropout, b.output.dropout) for b in model.encoder.layer]
    if isinstance(model, GPT2Model):
        return [(b.attn.resid_dropout, b.mlp.dropout) for b in model.h]
    if isinstance(model, (LlamaModel, MixtralModel)):
        return [(b.self_attn.o_proj, b.mlp) for b in model.layers]
    if isinstance(model, GPTNeoXModel):
        return [(b.post_attention_dropout, b.post_mlp_dropout) for b in model.layers]
    if isinstance(model, T5EncoderModel):
        return [(b.layer[0].dropout, b.layer[1].dropout) for b in model.encoder.block]
    return [(b.self_attn, b.linear2) for b in model.layers]


MODELS = {
    "bert": lambda: BertModel(
        BertConfig(vocab_size=30, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES)
    ),
    "gpt2": lambda: GPT2Model(
        GPT2Config(
            n_layer=2,
            n_head=2,
            n_embd=16,
            vocab_size=30,
            resid_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    ),
    "llama": lambda: LlamaModel(LlamaConfig(vocab_size=30, **SIZES)),
    "mixtral": lambda: MixtralModel(
        MixtralConfig(vocab_size=30, num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, **SIZES)
    ),
    "gpt neox": lambda: GPTNeoXModel(GPTNeoXConfig(vocab_size=30, hidden_dropout=0.0, **SIZES)),
    "t5": lambda: T5EncoderModel(
        T5Config(vocab_size=30, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
    ),
    "torch": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True),
        2,
        enable_nested_tensor=False,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_watch_reads_is_what_the_branches_add(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    kept = {}
    blocks = []
    for index, (attention, mlp) in enumerate(ends(model)):
        for kind, module in zip(WRITES, (attention, mlp), strict=True):
            module.register_forward_hook(
                lambda _, args, out, key=(kind, index): kept.update({key: out[0] if isinstance(out, tuple) else out})
            )
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2)
    for block in layers:
        block.register_forward_pre_hook(lambda _, args, kwargs: blocks.append(args[0]), with_kwargs=True)

    def run(model):
        blocks.clear()
        if name == "torch":
            return model(torch.randn(3, 8, 16)).sum().backward()
        return model(input_ids=TOKENS).last_hidden_state.sum().backward()

    values, reasons = one_step(model, run, WRITES)
    for kind in WRITES:
        wanted = [(kept[kind, i].norm(dim=-1) / blocks[i].norm(dim=-1)).mean().item() for i in range(2)]
        assert values[kind] == pytest.approx(wanted, rel=1e-5), (name, kind)
    assert not any(kind in why for why in reasons.values() for kind in WRITES)


def test_padding_is_left_out():
    torch.manual_seed(0)
    model = MODELS["bert"]()
    mask = (torch.arange(8) < torch.tensor([8, 5, 2])[:, None]).long()
    found = [
        one_step(model, lambda m, ids=ids: m(ids, attention_mask=mask).last_hidden_state.sum().backward(), WRITES)[0]
        for ids in (TOKENS, torch.where(mask == 1, TOKENS, 29))
    ]
    for kind in WRITES:
        assert found[0][kind] == pytest.approx(found[1][kind], rel=1e-4)


def test_compiled_models_are_read_as_others_are():
    torch.manual_seed(0)
    model, x = MODELS["llama"](), TOKENS
    names = [*WRITES, "log_sum_exp"]
    plain, _ = one_step(model, lambda m: m(x).last_hidden_state.sum().backward(), names)
    torch.compiler.reset()
    watch = headwise.watch(model, every=1, statistics=names)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).last_hidden_state.sum().backward()
    watch.step()
    for name in names:
        values = [r["value"] for r in watch.records() if r["statistic"] == name]
        assert values == pytest.approx(plain[name], rel=1e-4)
    watch.remove()


def test_branches_that_cannot_be_told_apart_have_a_reason():
    class Two(Block):
        def __init__(self):
            super().__init__(0.1, 0.1)
            self.ffn = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 32))

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = Block(0.1, 0.1).attn

        def forward(self, x):
            return x + self.attn(x)

    for block, reason in ((Two(), "its block has several MLPs: mlp, ffn"), (Alone(), "its block has no MLP beside")):
        model = nn.Sequential(nn.ModuleList([block]))
        model.forward = lambda x, block=block: block(x)
        values, reasons = one_step(model, lambda m: m(torch.randn(2, 5, 32)).sum().backward(), WRITES)
        assert reasons["0.0.attn"]["mlp_write"].startswith(reason) and len(values["attention_write"]) == 1


def test_the_other_branch_of_blocks_is_found():
    for model, wanted in (
        (OPTModel(OPTConfig(vocab_size=30, ffn_dim=24, word_embed_proj_dim=16, **SIZES)), "fc2"),
        (ViTModel(ViTConfig(image_size=8, patch_size=4, **SIZES)), None),
    ):
        site = headwise.sites(model)[0]
        block = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
        found = mlp_of(block, site)
        assert wanted is None or found is getattr(block, wanted)
        # it ends the branch: what it returns has the width of the stream
        assert [p.shape[0] for p in found.parameters() if p.dim() == 2][-1] == 16


def test_a_copy_of_a_watched_model_is_not_watched_and_removal_leaves_no_hook():
    import copy

    model = MODELS["gpt2"]()
    hooks = [len(m._forward_hooks) for m in model.modules()]
    watch = headwise.watch(model.train(), every=1, statistics=WRITES)
    twin = copy.deepcopy(model)
    twin(TOKENS)
    with pytest.warns(HealthWarning, match="no training forward of step 0 reached"):
        watch.step()
    assert watch.records() == []
    watch.remove()
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


@pytest.mark.parametrize("settings", [{}, {"start": "one", "per": "element"}, {"source": "both", "rank": 2}], ids=str)
def test_gates_of_a_method_are_read(settings):
    model = fresh(HOSTS["own"])
    method = GatedOutput(**settings)
    handle = headwise.regularize(model, method, example=HOSTS["own"].example())
    gates = []
    import headwise.attend.methods.gated_output as module

    plain = module.gated
    try:
        module.gated = lambda o, z, w=None, factor=1.0: (
            gates.append(torch.sigmoid(z if w is None else z + w)), plain(o, z, w, factor)
        )[1]  # fmt: skip
        for parameter in handle.parameters():
            nn.init.normal_(parameter, std=3.0)
        values, _ = one_step(
            model, lambda m: HOSTS["own"].run(m).sum().backward(), ["gate_mean", "gate_closed", "gate_open"]
        )
    finally:
        module.gated = plain
    for name, read in (
        ("gate_mean", lambda g: g),
        ("gate_closed", lambda g: (g < 0.05).float()),
        ("gate_open", lambda g: (g > 0.95).float()),
    ):
        wanted = torch.cat([read(g).mean((0, 2, 3)) for g in gates])
        assert values[name] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert min(values["gate_closed"]) > 0 or method.per == "head"


@pytest.mark.parametrize("start", ["half", "open", "one"])
@pytest.mark.parametrize("source", ["input", "output", "both"])
def test_gates_of_each_channel_of_low_rank_are_read(source, start, monkeypatch):
    import headwise.attend.methods.gated_output as module

    model = fresh(HOSTS["own"])
    method = GatedOutput(source=source, rank=2, per="element", start=start)
    handle = headwise.regularize(model, method, example=HOSTS["own"].example())
    torch.manual_seed(0)
    for parameter in handle.parameters():
        nn.init.normal_(parameter, std=3.0)
    factors, plain = [], module.low_rank_gated

    def wrapped(o, inner, up, bias=None, factor=1.0):
        out = plain(o, inner, up, bias, factor)
        factors.append((out / o / factor).detach())
        return out

    monkeypatch.setattr(module, "low_rank_gated", wrapped)
    values, _ = one_step(model, lambda m: HOSTS["own"].run(m).sum().backward(), ["gate_mean"])
    wanted = torch.cat([gates.mean((0, 2, 3)) for gates in factors])
    assert values["gate_mean"] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert wanted.std() > 0.01


def test_a_layer_without_gates_and_sinks_says_so():
    _, reasons = one_step(fresh(HOSTS["own"]), lambda m: HOSTS["own"].run(m), ["gate_mean_growth", "sink_open"])
    for why in reasons.values():
        assert why["gate_mean_growth"] == why["gate_mean"]
        assert why["sink_open"] == "the layer has no learned sink" and "no method gates" in why["gate_mean"]


def test_what_is_not_usual_is_read_only_if_it_is_named():
    model = fresh(HOSTS["own"]).train()
    watch = headwise.watch(model, every=1)
    HOSTS["own"].run(model).sum().backward()
    watch.step()
    found = {record["statistic"] for record in watch.records()}
    assert "log_sum_exp" in found
    assert not {"largest_log_sum_exp", "min_logit", "top_key_share", "top_key_distance", *WRITES} & found
    watch.remove()


def trained(model, watch, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        HOSTS["own"].run(model).square().mean().backward()
        optimizer.step()
        watch.step()


def by_step(watch, name):
    return {(r["step"], r["site"], r["head"]): r["value"] for r in watch.records() if r["statistic"] == name}


def test_drifts_are_changes_since_the_first_reading_also_of_a_run_that_goes_on():
    torch.manual_seed(0)
    model = fresh(HOSTS["own"]).train()
    names = ["log_sum_exp_drift", "sink_mass_growth"]
    watch = headwise.watch(model, every=2, statistics=names, on_alert=None)
    trained(model, watch, 5)
    for drift, base in (("log_sum_exp_drift", "log_sum_exp"), ("sink_mass_growth", "sink_mass")):
        values, changes = by_step(watch, base), by_step(watch, drift)
        assert {step for step, _, _ in changes} == {0, 2, 4}
        assert changes == {at: value - values[0, *at[1:]] for at, value in values.items()}
        assert any(changes[4, *at[1:]] != 0 for at in changes)
    known, first = watch.records(), by_step(watch, "log_sum_exp")
    watch.remove()
    later = headwise.watch(model, every=2, statistics=names, on_alert=None)
    later.step_to(6, known)
    trained(model, later, 1)
    values = by_step(later, "log_sum_exp")
    assert by_step(later, "log_sum_exp_drift") == {at: value - first[0, *at[1:]] for at, value in values.items()}
    later.remove()
