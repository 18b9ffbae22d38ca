"""SigmaReparam, SpectralNorm and WeightNorm on attention alone and on every linear layer and convolution of a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from methods.weight_hosts import ids, loss_of, model
from small_models import PlainBlock, _llama
from torch import nn
from torch.nn.utils import parametrizations

import headwise
from headwise import QKClip, SigmaReparam, SpectralNorm, WeightNorm
from headwise.attend import hosts
from headwise.attend.projections.block import Block as Part
from headwise.attend.projections.spectral import Spectral

METHODS = [SigmaReparam(), SigmaReparam(init="one"), SpectralNorm(), WeightNorm(), WeightNorm(init="one")]


class Vision(nn.Module):
    """A small vision transformer: a convolution cuts patches; blocks, a norm and a head follow."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.blocks = nn.ModuleList(PlainBlock(32, 4, False, 0.0) for _ in range(2))
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


LINEAR = [
    "patches",
    "head",
    *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")),
]


def vision(seed=0):
    torch.manual_seed(seed)
    return Vision()


def images(seed=0):
    return torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


def train(net, handle, steps=3, lr=0.1):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        (net(images(step)).square().mean() + handle.loss()).backward()
        optimizer.step()
        handle.after_step()


def reparametrized(net):
    return {
        n.removesuffix(".parametrizations.weight")
        for n, _ in net.named_modules()
        if n.endswith(".parametrizations.weight")
    }


def test_queries_and_keys_alone_leave_values_and_outputs_plain():
    net = vision()
    before = copy.deepcopy(net.state_dict())
    handle = headwise.regularize(net, SigmaReparam(init="one", layers="qk"))
    assert reparametrized(net) == {name for name in LINEAR if ".attn.qkv" in name}
    weight = net.blocks[0].attn.qkv.weight.detach()
    for part, plain in list(zip(weight.chunk(3), before["blocks.0.attn.qkv.weight"].chunk(3)))[:2]:
        torch.testing.assert_close(part * torch.linalg.matrix_norm(plain, ord=2), plain)
    assert torch.equal(weight.chunk(3)[2], before["blocks.0.attn.qkv.weight"].chunk(3)[2])
    train(net, handle)
    handle.fold()
    assert net.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match="layers must be one of"):
        WeightNorm(layers="qk")


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_all_takes_every_linear_layer_and_convolution_and_attention_its_own(method):
    net = vision()
    handle = headwise.regularize(net, method)
    assert reparametrized(net) == {name for name in LINEAR if ".attn." in name}
    handle.remove()
    headwise.regularize(net, method.replace(layers="all"))
    assert reparametrized(net) == set(LINEAR)


def test_the_rest_of_a_model_is_read_once_however_deep_it_is(monkeypatch):
    read, find = [], hosts.find
    monkeypatch.setattr(hosts, "find", lambda net: read.append(net) or find(net))
    handle = headwise.regularize(vision(), SigmaReparam(layers="all"))
    assert len(read) <= 2, "every layer searches the whole model again"
    handle.remove()
    net = vision()
    headwise.regularize(net, SigmaReparam(layers="all"), where=lambda site: site.depth == 1)
    assert reparametrized(net) == {name for name in LINEAR if not name.startswith("blocks.0.attn")}


def test_each_matrix_of_the_model_has_spectral_norm_one():
    net = vision()
    headwise.regularize(net, SpectralNorm(layers="all"))
    for name in LINEAR:
        weight = net.get_submodule(name).weight.detach().flatten(1)
        for part in weight.split(32) if name.endswith("qkv") else [weight]:
            assert torch.linalg.matrix_norm(part, 2).item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("layers", ["attention", "all"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_after_training_folding_keeps_the_bits_and_gives_the_plain_keys(method, layers):
    net = vision()
    keys, kinds = list(net.state_dict()), [type(m) for m in net.modules()]
    handle = headwise.regularize(net, method.replace(layers=layers))
    train(net, handle)
    net.eval()
    before = net(images(9))
    handle.fold()
    assert torch.equal(net(images(9)), before)
    assert list(net.state_dict()) == keys
    assert [type(m) for m in net.modules()] == kinds


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_removal_gives_back_every_weight_and_training_is_not_lost_in_silence(method):
    net = vision()
    bits, weights = copy.deepcopy(net.state_dict()), {n: net.get_submodule(n).weight for n in LINEAR}
    headwise.regularize(net, method.replace(layers="all")).remove()
    assert all(net.get_submodule(n).weight is w for n, w in weights.items())
    assert list(net.state_dict()) == list(bits)
    assert all(torch.equal(x, bits[k]) for k, x in net.state_dict().items())
    handle = headwise.regularize(net, method.replace(layers="all"))
    train(net, handle, steps=1)
    with pytest.raises(RuntimeError, match=type(method).__name__):
        handle.remove()
    handle.remove(discard=True)
    assert not reparametrized(net)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_state_dicts_copies_and_safetensors_carry_everything(method, tmp_path):
    from safetensors.torch import load_file, save_file

    net = vision()
    handle = headwise.regularize(net, method.replace(layers="all"))
    train(net, handle)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(images(5)), net(images(5)))
    save_file({k: x.contiguous() for k, x in net.state_dict().items()}, tmp_path / "weights.safetensors")
    other = vision(seed=1)
    headwise.regularize(other, method.replace(layers="all"))
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"), strict=True)
    assert torch.equal(other(images(5)), net(images(5)))
    # A copy that trains on leaves the first as it is.
    before = net(images(5))
    train(twin, headwise.handle(twin))
    assert torch.equal(net(images(5)), before)
    headwise.handle(twin).fold()
    handle.remove(discard=True)


@pytest.mark.grid
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_one_compiled_graph_gives_the_same_numbers(method):
    torch._dynamo.reset()
    net = vision()
    headwise.regularize(net, method.replace(layers="all"))
    eager = net(images())
    torch.testing.assert_close(
        torch.compile(net, fullgraph=True, backend="aot_eager")(images()), eager, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("method", [SigmaReparam(), WeightNorm()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_starting_at_the_current_weights_changes_no_bit_in_any_precision(method, dtype):
    net = vision().to(dtype)
    before = net(images().to(dtype))
    headwise.regularize(net, method.replace(layers="all"))
    assert torch.equal(net(images().to(dtype)), before)
    learned = [p for n, p in net.named_parameters() if n.endswith(("gamma", "gain"))]
    assert {p.dtype for p in learned} == {torch.promote_types(dtype, torch.float32)}


def test_every_step_has_the_sigma_of_the_authors_iteration():
    # Theirs, per matrix: start from the right vector of the decomposition; in each training forward left = W·right and
    # right = Wᵀ·left, both made unit, and sigma = left·W·right.
    net = vision().double()
    handle = headwise.regularize(net, SigmaReparam(layers="all"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def matrices():
        for name in LINEAR:
            part = net.get_submodule(name).parametrizations.weight
            full = part.original.detach().flatten(1)
            split = full.split(32) if name.endswith("qkv") else [full]
            yield from ((name, i, w, part[0]) for i, w in enumerate(split))

    right = {(name, i): torch.linalg.svd(w)[2][0] for name, i, w, _ in matrices()}
    moved = 0.0
    for step in range(6):
        for name, i, w, spectral in matrices():
            left = F.normalize(w @ right[name, i], dim=0)
            right[name, i] = F.normalize(w.t() @ left, dim=0)
            theirs = left @ w @ right[name, i]
            ours = spectral.sigma(net.get_submodule(name).parametrizations.weight.original)[i]
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=0)
            moved = max(moved, float((torch.linalg.matrix_norm(w, 2) - theirs).abs() / theirs))
        optimizer.zero_grad()
        (net(images(step).double()) - 1).square().mean().backward()
        optimizer.step()
        handle.after_step()
    # The iteration lags behind the true norm here, so that another order of updates would show.
    assert moved > 1e-6


def test_the_output_projection_iterates_from_its_own_right_vector():
    torch.manual_seed(0)
    linear = nn.Linear(6, 9, bias=False).double()
    block = Part("o", linear, "weight", "weight", slice(0, 6), 3, 2)
    spectral = Spectral(linear.weight, [block], "one")
    changed = linear.weight.detach() + 0.3 * torch.randn(9, 6, dtype=torch.float64)
    right = torch.linalg.svd(linear.weight.detach())[2][0]
    left = F.normalize(changed @ right, dim=0)
    right = F.normalize(changed.t() @ left, dim=0)
    spectral.iterate(changed)
    torch.testing.assert_close(spectral.sigma(changed)[0], left @ changed @ right, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["mlp.0", "attn.proj"])
def test_weight_norm_is_torchs_over_training_steps(name):
    torch.manual_seed(0)
    net = PlainBlock(32, 4, False, 0.0)
    net = nn.Sequential(net)
    twin = copy.deepcopy(net)
    headwise.regularize(net, WeightNorm(layers="all"))
    parametrizations.weight_norm(twin[0].get_submodule(name))
    mine, theirs = (m[0].get_submodule(name) for m in (net, twin))
    x, target = torch.randn(5, 7, mine.in_features), torch.randn(5, 7, mine.out_features)
    for _ in range(4):
        for layer in (mine, theirs):
            layer.zero_grad()
            (layer(x) - target).square().mean().backward()
            with torch.no_grad():
                for p in layer.parameters():
                    p.sub_(0.5 * p.grad)
        torch.testing.assert_close(mine.weight, theirs.weight, rtol=1e-5, atol=1e-6)
    assert (mine.parametrizations.weight[0].gain - mine.parametrizations.weight.original.norm(dim=1)).abs().max() > 1e-3


def test_spectral_norm_is_torchs_definition_with_its_gradient():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3)
    spectral = Spectral(conv.weight, [Part("w", conv, "weight", "weight", slice(0, 8), 1, 8)], None)
    leaf = conv.weight.detach().clone().requires_grad_()
    plain = leaf.detach().clone().requires_grad_()
    upstream = torch.randn_like(leaf)
    found, wanted = spectral(leaf), plain / torch.linalg.matrix_norm(plain.flatten(1), 2)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found.backward(upstream)
    wanted.backward(upstream)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert not list(spectral.parameters())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_head_that_is_the_embeddings_matrix_stays_plain(method):
    torch.manual_seed(0)
    net = _llama()
    net.lm_head.weight = net.model.embed_tokens.weight
    headwise.regularize(net, method.replace(layers="all"))
    assert net.lm_head.weight is net.model.embed_tokens.weight
    assert len(reparametrized(net)) == 2 * 7


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_what_cannot_be_reparametrized_is_refused_and_nothing_is_changed(method):
    shared = vision()
    shared.blocks[0].mlp[0].weight = shared.blocks[1].mlp[0].weight
    zero = vision()
    nn.init.zeros_(zero.blocks[1].mlp[2].weight)
    known = vision()
    parametrizations.orthogonal(known.head)
    cases = [
        (shared, r"blocks.1.mlp.0 and blocks.0.mlp.0 share one weight"),
        (zero, r"blocks.1.mlp.2.weight .* zero"),
        (known, "parametrized already"),
    ]
    for net, reason in cases:
        keys = list(net.state_dict())
        with pytest.raises(ValueError, match=reason):
            headwise.regularize(net, method.replace(layers="all"))
        assert list(net.state_dict()) == keys
    with torch.device("meta"):
        empty = Vision()
    with pytest.raises(ValueError, match="meta device"):
        headwise.regularize(empty, method)


@pytest.mark.parametrize("methods", [(SpectralNorm(), QKClip()), (QKClip(), SpectralNorm())], ids=repr)
def test_qk_clip_is_refused_beside_spectral_norm(methods):
    net = model()
    keys, attributes = list(net.state_dict()), [set(m.__dict__) for m in net.modules()]
    with pytest.raises(ValueError, match=r"at layers\.0.*use one of them"):
        headwise.regularize(net, *methods)
    assert list(net.state_dict()) == keys
    assert [set(m.__dict__) for m in net.modules()] == attributes


def test_qk_clip_scales_weight_normed_heads():
    net = model()
    handle = headwise.regularize(net, WeightNorm(), QKClip(threshold=0.01))
    before = net.layers[0].c_attn.weight.detach().clone()
    loss_of(net, ids())
    largest = handle.fitted[0].states[1].tensor("largest").clone()
    handle.after_step()
    eta = (0.01 / largest).sqrt().repeat_interleave(8)[:, None]
    torch.testing.assert_close(net.layers[0].c_attn.weight.detach()[:24], before[:24] * eta)


def test_no_gain_decays_and_every_plain_weight_still_does():
    net = vision()
    headwise.regularize(net, WeightNorm(layers="all"))
    groups = headwise.parameter_groups(net, lr=0.1, weight_decay=0.1)
    names = {id(p): n for n, p in net.named_parameters()}
    kept = {names[id(p)] for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    assert {n for n in names.values() if n.endswith("gain")} <= kept
    assert not any(n.endswith("original") for n in kept)


def test_a_weight_norm_is_of_output_units_in_transposed_layers_too():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2Model(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
    )
    headwise.regularize(model, WeightNorm(init="one"))
    # (inputs, outputs), as transformers' Conv1D keeps it
    weight = model.h[0].attn.c_attn.weight
    assert weight.shape == (16, 48)
    torch.testing.assert_close(weight.norm(dim=0), torch.ones(48))
