"""Cross attention that neither a layer's name nor its sizes tell: seen in the call of nn.MultiheadAttention."""

import pytest
import torch
from torch import nn

import headwise
from headwise import DropHead, EntropyPenalty
from headwise.attend.core.method import REGISTRY
from headwise.attend.methods import __all__ as names

SELF_ONLY = sorted(name for name in names if REGISTRY[name].self_only)
LENGTHS = torch.tensor([5, 3])


class Reads(nn.Module):
    """Attends from x to y under a name that says nothing."""

    def __init__(self, name="attention"):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({name: nn.MultiheadAttention(16, 2, batch_first=True)}) for _ in range(2)]
        )
        self.name = name

    def forward(self, x, y, **given):
        for layer in self.layers:
            x = x + layer[self.name](x, y, y, need_weights=False, **given)[0]
        return x


def tokens(count, seed=0):
    return torch.randn(2, count, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SELF_ONLY)
@pytest.mark.parametrize("keys", [5, 6])
def test_a_method_of_self_attention_refuses_the_call_by_name(name, keys):
    model = Reads()
    model.train()
    handle = headwise.regularize(model, REGISTRY[name](**REGISTRY[name].strong))
    computed = []
    model.layers[0]["attention"].out_proj.register_forward_hook(lambda *_: computed.append(1))
    counters = [fitted.passes.count() for fitted in handle.fitted]
    with pytest.raises(RuntimeError, match=rf"layers\.0\.attention.*not its query.*{name}.*where="):
        model(tokens(6), tokens(keys, seed=1))
    assert not computed and counters == [fitted.passes.count() for fitted in handle.fitted]
    handle.remove()


@pytest.mark.parametrize("name", ["XSA", "SymmetricAttention"])
def test_self_attention_passes_however_its_one_tensor_is_written(name):
    model = nn.MultiheadAttention(16, 2)
    handle = headwise.regularize(model, REGISTRY[name](**REGISTRY[name].strong))
    x = tokens(6)
    one = x.transpose(0, 1)
    wanted = model(one, one, one)[0]
    torch.testing.assert_close(model(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0], wanted)
    handle.remove()


def test_a_layer_named_self_may_make_queries_and_keys_apart():
    model = Reads("self_attn")
    handle = headwise.regularize(model, headwise.XSA())
    x = tokens(6)
    model(x, x.clone())
    with pytest.raises(RuntimeError, match=r"self_attn.*not its query.*XSA"):
        model(x, tokens(5))
    handle.remove()


def test_other_methods_take_the_call():
    model = Reads()
    handle = headwise.regularize(model, DropHead(p=0.5))
    model(tokens(6), tokens(5, seed=1))
    handle.remove()


@pytest.mark.parametrize("keys", [6, 5])
def test_padded_keys_are_no_padded_queries(keys):
    model = Reads()
    layer = model.layers[0]["attention"]
    handle = headwise.regularize(model, EntropyPenalty(strength=1.0), where=lambda site: site.depth == 0)
    x, y = tokens(6), tokens(keys, seed=1)
    padding = torch.arange(keys) >= LENGTHS[:, None]
    model(x, y, key_padding_mask=padding)
    q = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[0]
    k = nn.functional.linear(y, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[1]
    q, k = (z.double().unflatten(-1, (2, 8)).transpose(1, 2) for z in (q, k))
    a = (q @ k.mT / 8**0.5).masked_fill(padding[:, None, None], -torch.inf).softmax(-1)
    entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
    assert handle.loss().item() == pytest.approx(-entropy.mean().item(), rel=1e-5)
    handle.remove()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_watch_counts_every_query_beside_padded_keys(compiled):
    model = Reads().train()
    watch = headwise.watch(model, every=1, statistics=["attention_entropy"])
    run = torch.compile(model, backend="eager") if compiled else model
    x, y = tokens(6), tokens(6, seed=1)
    padding = torch.arange(6) >= LENGTHS[:, None]
    run(x, y, key_padding_mask=padding)
    watch.step()
    layer = model.layers[0]["attention"]
    q = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[0]
    k = nn.functional.linear(y, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)[1]
    q, k = (z.double().unflatten(-1, (2, 8)).transpose(1, 2) for z in (q, k))
    a = (q @ k.mT / 8**0.5).masked_fill(padding[:, None, None], -torch.inf).softmax(-1)
    wanted = -(a * a.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    found = {r["head"]: r["value"] for r in watch.records() if r["depth"] == 0}
    for head, value in enumerate(wanted.tolist()):
        assert found[head] == pytest.approx(value, rel=1e-5)
    watch.remove()
