"""ContraNorm: its formula where the branch enters the residual, under padding, causality and a cache."""

import pytest
import torch
from small_models import HOSTS, Own, fresh

import headwise
from headwise import ContraNorm


def branches(model, method, x, **changed):
    """Return what the first attention branch adds to the residual, plain and with the method."""
    block, seen = model.blocks[0], []
    hook = block.norm2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] - x))
    model(x)
    handle = headwise.regularize(model, method, example=(x,))
    for name, value in changed.items():
        with torch.no_grad():
            handle.fitted[0].states[0].tensor(name).copy_(value)
    model(x)
    hook.remove()
    handle.remove(discard=True)
    return seen[-2], seen[-1]


def moved(x, strength, temperature=1.0, identity=True, causal=False):
    """Write the formula token by token."""
    unit = x / x.norm(dim=-1, keepdim=True)
    out = torch.empty_like(x)
    for i in range(x.shape[1]):
        last = i + 1 if causal else x.shape[1]
        like = (unit[:, :last] @ unit[:, i, :, None] / temperature).softmax(1)
        mean = (like * x[:, :last]).sum(1)
        out[:, i] = (1 + strength if identity else 1) * x[:, i] - strength * mean
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("identity", [False, True])
def test_each_token_moves_away_from_those_that_are_like_it(identity, causal):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    method = ContraNorm(strength=0.7, temperature=0.5, identity=identity)
    plain, found = branches(Own(causal=causal), method, x)
    torch.testing.assert_close(found, moved(plain, 0.7, 0.5, identity, causal), rtol=1e-4, atol=1e-5)
    assert (found - plain).abs().max() > 0.01


def test_a_layer_norm_stands_behind_it_where_asked():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32)
    gain, shift = torch.linspace(0.5, 2, 32), torch.linspace(-1, 1, 32)
    plain, found = branches(Own(), ContraNorm(strength=0.7, identity=False, norm=True), x, gain=gain, shift=shift)
    y = moved(plain, 0.7, identity=False)
    normed = (y - y.mean(-1, keepdim=True)) / (y.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found, normed * gain + shift, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("host", ["bert-padded", "llama-left-padded"])
def test_padding_moves_no_real_token(host):
    model = fresh(HOSTS[host]).eval()
    headwise.regularize(model, ContraNorm(strength=1.0), example=HOSTS[host].example())
    _, batch = HOSTS[host].batch()
    real = batch["attention_mask"].bool()
    before = model(**batch)[0]
    other = torch.where(real, batch["input_ids"], (batch["input_ids"] + 7) % 49 + 1)
    after = model(input_ids=other, attention_mask=batch["attention_mask"])[0]
    torch.testing.assert_close(after[real], before[real], rtol=1e-4, atol=1e-5)
    assert (after[~real] - before[~real]).abs().max() > 1e-3


def test_no_token_hears_of_later_ones():
    torch.manual_seed(0)
    model, x = Own(causal=True).eval(), torch.randn(2, 6, 32)
    headwise.regularize(model, ContraNorm(strength=1.0), example=(x,))
    later = x.clone()
    later[:, 4:] += 1
    torch.testing.assert_close(model(later)[:, :4], model(x)[:, :4])


def test_a_cache_is_refused_by_name():
    model = fresh(HOSTS["llama"]).eval()
    headwise.regularize(model, ContraNorm(), example=HOSTS["llama"].example())
    with pytest.raises(ValueError, match=r"ContraNorm needs all tokens.*use_cache=False"):
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, use_cache=True, do_sample=False)


@pytest.mark.parametrize("text", ["ContraNorm(strength=-0.1)", "ContraNorm(temperature=0.0)"])
def test_settings_out_of_range_are_refused_by_name(text):
    with pytest.raises(ValueError, match="ContraNorm"):
        headwise.parse(text)
