"""What acts on the branch acts where it enters the residual: behind the dropout there, or the layer is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from small_models import Attention as Plain
from small_models import _bert, _ids
from torch import nn

import headwise
from headwise import BranchDrop, ContraNorm, FeatScale, LayerScale
from headwise.attend.hosts.layers.branch_walk import last_before_sum, obstacle
from headwise.attend.projections import finding


class OneForAll(nn.Module):
    """One dropout for the attention branch and the MLP's, called around the projection as nanoGPT does."""

    def __init__(self, p):
        super().__init__()
        self.attn, self.drop, self.mlp = Plain(32), nn.Dropout(p), nn.Linear(32, 32)

    def forward(self, x):
        x = x + self.drop(self.attn(x))
        return x + self.drop(self.mlp(x))


class Scaled(nn.Module):
    """Drops inside the attention layer, scales the layer's branch afterwards."""

    def __init__(self, p):
        super().__init__()
        self.attn = Plain(32)
        self.attn.proj = nn.Sequential(nn.Linear(32, 32), nn.Dropout(p))
        self.gamma = nn.Parameter(torch.full((32,), 0.3))

    def forward(self, x):
        return x + self.gamma * self.attn(x)


class ByFunction(nn.Module):
    """Drops the branch by a function call, in a method of its own."""

    def __init__(self, p):
        super().__init__()
        self.attn, self.p = Plain(32), p

    def branch(self, x):
        y = self.attn(x)
        return F.dropout(y, p=self.p, training=self.training)

    def forward(self, x):
        return x + self.branch(x)


class Alone(nn.Module):
    """No dropout behind the attention layer."""

    def __init__(self, p):
        super().__init__()
        self.drop, self.attn = nn.Dropout(p), Plain(32)

    def forward(self, x):
        return x + self.attn(self.drop(x))


def tokens(batch=3, length=9):
    return torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(5))


def own(cls, where):
    def make(p):
        torch.manual_seed(0)
        return nn.Sequential(cls(p), cls(p)), (tokens(),), {}, [f"{i}.{where}" for i in (0, 1)]

    return make


def vit(p):
    import timm

    torch.manual_seed(0)
    net = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        depth=2,
        embed_dim=32,
        num_heads=4,
        proj_drop_rate=p,
        init_values=0.1,
        num_classes=5,
    )
    return (
        net,
        (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)),),
        {},
        [f"blocks.{i}.attn" for i in (0, 1)],
    )


def bert(p):
    torch.manual_seed(0)
    net = _bert()
    for layer in net.bert.encoder.layer:
        layer.attention.output.dropout.p = p
    return net, *_ids("right"), [f"bert.encoder.layer.{i}.attention.output.dropout" for i in (0, 1)]


def encoder(batch_first, norm_first):
    def make(p):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
        net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        for one in net.layers:
            one.dropout1.p = p
        return net, (tokens(),), {}, [f"layers.{i}.dropout1" for i in (0, 1)]

    make.tokens_at = 1 if batch_first else 0
    return make


CASES = {
    "one dropout for all": own(OneForAll, "attn"),
    "a sequence": own(Scaled, "attn.proj"),
    "timm": vit,
    "BERT": bert,
    "torch": encoder(True, False),
    "torch, norm first": encoder(True, True),
    "torch, tokens first": encoder(False, False),
}


def by_hand(net, places, at, real):
    """Scale what leaves the modules at these places."""

    def scale(module, args, y):
        if real is None:
            mean = y.mean(at, keepdim=True)
        else:
            mean = (y * real[..., None]).sum(at, keepdim=True) / real.sum(1)[:, None, None]
        return y + 0.7 * mean - 0.4 * (y - mean)

    for place in places:
        net.get_submodule(place).register_forward_hook(scale)
    return net


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("kind", CASES)
def test_the_branch_is_scaled_behind_its_dropout(kind, p, mode):
    net, args, kwargs, places = CASES[kind](p)
    twin = copy.deepcopy(net)
    real = kwargs.get("attention_mask")
    if kind == "one dropout for all":
        # The dropout is shared: by hand its first call of each block is the branch's.
        for block in twin:
            block.forward = lambda x, b=block: _one_for_all(b, x)
    else:
        by_hand(twin, places, getattr(CASES[kind], "tokens_at", 1), real)
    handle = headwise.regularize(net, FeatScale(), example=kwargs or args)
    with torch.no_grad():
        for fitted in handle.fitted:
            fitted.states[0].tensor("mean_gain").fill_(0.7)
            fitted.states[0].tensor("rest_gain").fill_(-0.4)
    outs = []
    for model in (net, copy.deepcopy(net), twin):
        torch.manual_seed(3)
        out = model.train(mode == "train")(*args, **kwargs)
        outs.append(out if isinstance(out, torch.Tensor) else out[0])
    torch.testing.assert_close(outs[0], outs[2], rtol=1e-5, atol=1e-5)
    assert torch.equal(outs[1], outs[0])
    handle.remove(discard=True)
    assert not any(m._forward_hooks for m in net.modules())


def _one_for_all(block, x):
    y = block.drop(block.attn(x))
    mean = y.mean(1, keepdim=True)
    x = x + y + 0.7 * mean - 0.4 * (y - mean)
    return x + block.drop(block.mlp(x))


def test_a_dropout_by_function_call_is_refused_by_name_unless_it_is_0():
    net = nn.Sequential(ByFunction(0.1))
    keys = list(net.state_dict())
    with pytest.raises(
        ValueError,
        match=r"0\.attn.*FeatScale drops the attention branch by a function call with p=0\.1 in ByFunction.*where=",
    ):
        headwise.regularize(net, FeatScale(), where=["0.attn"], example=tokens())
    assert list(net.state_dict()) == keys
    headwise.regularize(nn.Sequential(ByFunction(0.0)), FeatScale(), example=tokens())


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_bart_drops_by_a_function_call(p):
    from transformers import BartConfig, BartModel

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(
        d_model=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=50,
        max_position_embeddings=32,
        dropout=p,
        **sizes,
    )
    net = BartModel(config)
    if p:
        with pytest.raises(ValueError, match=r"p=0\.1 in BartEncoderLayer"):
            headwise.regularize(net, FeatScale())
    else:
        assert len(headwise.regularize(net, FeatScale()).fitted) == 1


def test_a_dropout_elsewhere_is_not_the_branchs():
    for net in (nn.Sequential(Alone(0.3)), nn.Sequential(nn.MultiheadAttention(32, 4, dropout=0.2))):
        site = headwise.sites(net)[0]
        assert last_before_sum(site) is None
        assert obstacle(site) is None


def test_code_without_source_that_may_drop_is_refused():
    space = {"nn": nn, "F": F, "Plain": Plain}
    code = (
        "class Hidden(nn.Module):\n"
        "    def __init__(self, p):\n        super().__init__()\n        self.attn, self.drop = Plain(32), "
        "nn.Dropout(p)\n"
        "    def forward(self, x):\n        return x + self.drop(self.attn(x))\n"
    )
    exec(code, space)
    assert "source cannot be read" in obstacle(headwise.sites(nn.Sequential(space["Hidden"](0.1)))[0])
    assert obstacle(headwise.sites(nn.Sequential(space["Hidden"](0.0)))[0]) is None


class OwnDropout(nn.Module):
    """A dropout by its name that keeps its probability under another one."""

    def forward(self, x):
        return F.dropout(x, 0.1, self.training)


def test_a_dropout_that_keeps_no_p_counts_as_one_where_the_source_is_missing():
    space = {"nn": nn, "Plain": Plain, "OwnDropout": OwnDropout}
    code = (
        "class Hidden(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.attn, self.drop = Plain(32), OwnDropout()\n"
        "    def forward(self, x):\n        return x + self.drop(self.attn(x))\n"
    )
    exec(code, space)
    assert "source cannot be read" in obstacle(headwise.sites(nn.Sequential(space["Hidden"]()))[0])


def _post_norm(family):
    """Return a tiny causal model whose attention branch passes a norm before the residual, and the places of these
    norms."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0}
    if family == "Olmo2":
        del sizes["head_dim"]
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    net = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**sizes))
    norm = "post_self_attn_layernorm" if family == "Glm4" else "post_attention_layernorm"
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return net.eval(), [f"model.layers.{i}.{norm}" for i in (0, 1)]


IDS = torch.arange(1, 13).view(2, 6)
POST_NORMS = ["Gemma2", "Gemma3", "Glm4", "Olmo2"]


@pytest.mark.parametrize("family", POST_NORMS)
def test_a_branch_that_is_normalised_is_scaled_where_it_enters_the_residual(family):
    net, places = _post_norm(family)
    twin = copy.deepcopy(net)
    for place in places:
        twin.get_submodule(place).register_forward_hook(lambda module, args, y: 0.1 * y)
    before = net(IDS).logits
    handle = headwise.regularize(net, headwise.LayerScale(start=0.1))
    torch.testing.assert_close(net(IDS).logits, twin(IDS).logits, rtol=1e-5, atol=1e-5)
    # Before the norm the factor would be taken away again.
    assert (net(IDS).logits - before).abs().max() > 1e-2
    handle.remove(discard=True)
    assert torch.equal(net(IDS).logits, before)
    assert not any(m._forward_hooks for m in net.modules() if m is not net)


@pytest.mark.parametrize("family", POST_NORMS)
def test_a_branch_that_is_normalised_is_moved_apart_behind_its_norm(family):
    net, places = _post_norm(family)
    twin = copy.deepcopy(net)

    def apart(module, args, y):
        unit = torch.nn.functional.normalize(y, dim=-1)
        alike = (unit @ unit.mT).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
        return y + 0.5 * (y - alike.softmax(-1) @ y)

    for place in places:
        twin.get_submodule(place).register_forward_hook(apart)
    headwise.regularize(net, headwise.ContraNorm(strength=0.5))
    ours, theirs = (model(IDS, use_cache=False).logits for model in (net, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", POST_NORMS)
def test_a_branch_that_is_normalised_is_left_out_whole_and_the_others_are_scaled_up(family):
    net, places = _post_norm(family)
    twin, entering = copy.deepcopy(net), []
    headwise.regularize(net, headwise.BranchDrop(p=0.5), seed=1)
    for model in (net, twin):
        model.get_submodule(places[0]).register_forward_hook(lambda module, args, y: entering.append(y))
        model.train()(IDS.repeat(8, 1))
    ratio = entering[0] / entering[1]
    assert set(ratio.round(decimals=3).unique().tolist()) == {0.0, 2.0}
    assert all(len(sample.round(decimals=3).unique()) == 1 for sample in ratio)


def written(tmp_path, way):
    """Return a block whose forward is this text, in a file that can be read."""
    import importlib.util

    text = (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\nfrom small_models import Attention\n"
        "class Block(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.attn, self.norm, self.mlp = Attention(32), nn.LayerNorm(32), nn.Linear(32, 32)\n"
        "        self.drop, self.drop_path, self.first, self.none = nn.Dropout(0.0), nn.Tanh(), False, None\n"
        "    def forward(self, x):\n" + "".join(f"        {line}\n" for line in way.split("; "))
    )
    path = tmp_path / "written_block.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("written_block", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return nn.Sequential(module.Block())


@pytest.mark.parametrize(
    ("way", "last"),
    [
        ("return x + self.norm(self.attn(x))", "0.norm"),
        ("y = self.attn(x); y = self.norm(y.to(x.dtype)); return x + y", "0.norm"),
        ("return x + self.drop(self.norm(self.attn(x)))", "0.drop"),
        ("return x + self.norm(self.drop(self.attn(x)))", "0.norm"),
        ("return x + self.drop_path(self.norm(self.attn(x)))", "0.norm"),
        ("y = self.attn(x) if self.none is None else self.none(x); return x + self.norm(y)", "0.norm"),
        # What follows the norm is another part, and its sum begins before the norm.
        ("y = self.attn(x); return y + self.mlp(self.norm(y))", None),
        ("x = x + self.attn(x); return x + self.mlp(self.norm(x))", None),
        ("return self.norm(x + self.attn(x))", None),
        ("return self.mlp(self.norm(self.attn(x)))", None),
        ("y = self.attn(self.norm(x)) if self.first else self.norm(self.attn(x)); return x + y", "0.norm"),
        ("y = self.norm(self.attn(x)) if self.first else self.attn(self.norm(x)); return x + y", None),
    ],
)
def test_the_norm_before_the_residual_is_found(tmp_path, way, last):
    net = written(tmp_path, way)
    found = last_before_sum(headwise.sites(net)[0])
    assert found is (None if last is None else net.get_submodule(last))


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("return x + F.layer_norm(self.attn(x), (32,))", "normalises the attention branch by a function call in Block"),
        (
            "return x + self.norm(self.attn(x).flip(1))",
            "may bring the tokens of the attention branch into another layout",
        ),
    ],
)
def test_a_norm_behind_which_nothing_can_stand_is_refused_by_name(tmp_path, way, told):
    net = written(tmp_path, way)
    with pytest.raises(ValueError, match=rf"0\.attn.*LayerScale {told}.*where="):
        headwise.regularize(net, headwise.LayerScale(), where=["0.attn"], example=tokens())


@pytest.mark.parametrize("rank", [None, 12])
def test_the_branch_of_latent_attention_needs_its_output_projection_alone(rank):
    from transformers import DeepseekV3Config, DeepseekV3Model

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    latent = {"q_lora_rank": rank, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    net = DeepseekV3Model(DeepseekV3Config(**sizes, **latent, num_key_value_heads=4, first_k_dense_replace=2)).eval()
    twin = copy.deepcopy(net)
    for layer in twin.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, y: 0.1 * y)
    headwise.regularize(net, headwise.LayerScale(start=0.1))
    ours, theirs = (model(IDS).last_hidden_state for model in (net, twin))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Processor:
    """Computes the attention of a layer that hands it over, as diffusers' processors do; it is no module."""

    def __call__(self, attn, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ByProcessor(nn.Module):
    """Hands its attention to an object."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(32, 32) for _ in range(4))
        self.processor, self.act = Processor(), F.gelu

    def forward(self, x):
        return self.act(self.processor(self, x))


def test_a_layer_that_hands_its_attention_to_a_processor_is_told_so():
    net = nn.ModuleDict({"attn": type("Attention", (ByProcessor,), {})()})
    with pytest.raises(
        ValueError, match=r"attn .*hands the attention to self\.processor \(Processor\), an object that is not a module"
    ) as told:
        headwise.regularize(net, headwise.DropHead())
    assert "calls neither" not in str(told.value)


def test_what_acts_on_the_branch_needs_the_output_projection_alone(monkeypatch):
    # convolutions over queries and keys leave no matrix of them
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16}
    more = {"head_dim": 8, "cca_time0": 2, "cca_time1": 2, "vocab_size": 50, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model("zaya", **sizes, **experts, **more, layer_types=["hybrid"] * 2)
    torch.manual_seed(0)
    net = transformers.AutoModel.from_config(config).train()
    handle = headwise.regularize(net, headwise.BranchDrop(p=0.5), headwise.ContraNorm(strength=1.0))
    probed = []
    monkeypatch.setattr(finding, "probed", lambda *args: probed.append(args))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        out = net(torch.randint(2, 50, (2, 7)), use_cache=False)[0]
        (out.square().mean() + handle.loss()).backward()
        optimizer.step()
        handle.after_step()
    assert out.isfinite().all() and not probed


class TimeFirst(nn.Module):
    """Takes and returns (T, B, C), as fairseq's layers do, whose output projection runs on (T, B, C) too."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.num_heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 1, 3, 0, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))


class BatchFirst(TimeFirst):
    """The same weights and numbers for (B, T, C)."""

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class InABlock(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.attn = attn

    def forward(self, x):
        return x + self.attn(x)


@pytest.mark.parametrize(
    "method", [FeatScale(), ContraNorm(strength=1.0), BranchDrop(p=0.5)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("tokens", [5, 3])
def test_a_branch_whose_tokens_come_before_samples_is_edited_as_samples(method, tokens):
    torch.manual_seed(0)
    time, batch = InABlock(TimeFirst()), InABlock(BatchFirst())
    batch.load_state_dict(time.state_dict())
    x = torch.randn(tokens, 3, 16)
    plain = time(x)
    headwise.regularize(time, method, example=x)
    for parameter in headwise.regularize(batch, method).parameters():
        parameter.data.normal_()
    time.load_state_dict(batch.state_dict())
    wanted = batch(x.transpose(0, 1)).transpose(0, 1)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    torch.testing.assert_close(time(x), wanted)


def test_tokens_before_samples_that_might_be_windows_are_refused():
    model = InABlock(TimeFirst())
    headwise.regularize(model, LayerScale())
    with pytest.raises(RuntimeError, match=r"attn returns \(3, 6, 16\) from 6 rows of 3 queries: .* pass example="):
        model(torch.randn(3, 6, 16))
    model(torch.randn(4, 6, 16))
