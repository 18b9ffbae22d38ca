import pytest
import torch
from naive import qkv
from torch import nn
from torch.nn import functional as F

from headwise.attend.core import random_draws
from headwise.attend.core.call import Call
from headwise.attend.core.site import Site
from headwise.attend.methods import InputNoise
from headwise.testing.calls import attend_with, fit_standalone, standalone_site

B, T, C, H = 3, 10, 12, 3


def tokens(seed=0):
    return torch.randn(B, T, C, generator=torch.Generator().manual_seed(seed))


def noise_on(x, method):
    q, k, v = qkv(b=x.shape[0])
    fitted = fit_standalone([method], standalone_site(q, k, hidden=x))
    return method.hidden(x, Call(fitted, q, k, v, training=True, samples=x.shape[0])) - x


@pytest.mark.parametrize("unit", ["median", "std", "mad"])
def test_the_noise_is_normal_in_the_unit_of_each_sample(unit):
    x = (
        torch.randn(2, 100, 100, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0])[:, None, None]
        + 2
    )
    noise = noise_on(x, InputNoise(scale=0.5, unit=unit))
    for sample, made in zip(x, noise):
        level = {"median": sample.median(), "std": sample.std(), "mad": (sample - sample.median()).abs().median()}[unit]
        assert made.std() == pytest.approx(0.5 * float(level), rel=0.03)
        kurtosis = (made / made.std()).pow(4).mean()
        assert kurtosis == pytest.approx(3.0, abs=0.3)


def test_the_blogs_unit_does_nothing_on_layer_normed_input():
    x = F.layer_norm(torch.randn(4, 197, 768, generator=torch.Generator().manual_seed(0)), (768,))
    assert noise_on(x, InputNoise()).std() < 1e-4
    assert noise_on(x, InputNoise(unit="std")).std() == pytest.approx(0.01, rel=0.02)


def with_projections(cross=False):
    module = nn.MultiheadAttention(C, H, batch_first=True)
    site = Site("mha", module, heads=H, kv_heads=H, head_dim=C // H, hidden=C, is_cross=cross)
    return site, module


def projected(module, x):
    return [
        F.linear(x, w, b).unflatten(-1, (H, -1)).transpose(1, 2)
        for w, b in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3))
    ]


def test_per_head_noise_is_a_noisy_copy_of_the_input_for_each_head():
    torch.manual_seed(0)
    site, module = with_projections()
    x = tokens()
    method = InputNoise(scale=0.5, unit="std", per_head=True)
    fitted = fit_standalone([method], site)
    out = attend_with([method], *projected(module, x), fitted=fitted, hidden=x)[0]
    out.square().sum().backward()
    found = module.in_proj_weight.grad.clone()
    module.zero_grad()

    fitted.passes.recount(0)
    call = Call(fitted, *projected(module, x))
    level = 0.5 * x.flatten(1).std(1, correction=0)[:, None, None]
    heads = []
    for head in range(H):
        noise = random_draws.normal(call.draw_key(), call.salt(method, f"head {head}"), tuple(x.shape), x.device)
        q, k, v = (part[:, head] for part in projected(module, x + level * noise))
        heads.append((q @ k.mT / 2).softmax(-1) @ v)
    wanted = torch.stack(heads, 1)
    torch.testing.assert_close(out, wanted)
    wanted.square().sum().backward()
    torch.testing.assert_close(found, module.in_proj_weight.grad)


def test_heads_get_noise_of_their_own():
    site, _ = with_projections()
    method = InputNoise(scale=1.0, unit="std", per_head=True)
    fitted = fit_standalone([method], site)
    call = Call(fitted, *(torch.zeros(B, H, T, 4) for _ in range(3)))
    first, second = (
        random_draws.normal(call.draw_key(), call.salt(method, f"head {h}"), (5000,), call.q.device) for h in (0, 1)
    )
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.06


def test_per_head_noise_keeps_no_noisy_copies():
    site, module = with_projections()
    x = tokens()
    method = InputNoise(scale=0.5, unit="std", per_head=True)
    fitted = fit_standalone([method], site)
    made = [p.detach() for p in projected(module, x)]
    call = Call(fitted, *made, hidden=x, training=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        method.inputs(*made, call)
    assert kept and max(kept) < x.numel()


def test_a_host_that_scales_its_queries_gets_scaled_noise():
    torch.manual_seed(0)
    site, module = with_projections()
    x = tokens()
    q, k, v = (p.detach() for p in projected(module, x))
    method = InputNoise(scale=0.5, unit="std", per_head=True)
    added = []
    for factor in (1.0, 0.25):
        call = Call(fit_standalone([method], site), factor * q, k, v, hidden=x, training=True)
        added.append(method.inputs(factor * q, k, v, call)[0] - factor * q)
    torch.testing.assert_close(added[1], 0.25 * added[0], atol=1e-5, rtol=1e-4)


def test_cross_attention_gets_noise_on_its_queries_alone():
    torch.manual_seed(0)
    site, module = with_projections(cross=True)
    x = tokens()
    q, k, v = (p.detach() for p in projected(module, x))
    method = InputNoise(scale=0.5, unit="std", per_head=True)
    call = Call(fit_standalone([method], site), q, 2 * k, 2 * v, hidden=x, training=True)
    noisy = method.inputs(q, 2 * k, 2 * v, call)
    assert (noisy[0] != q).all() and torch.equal(noisy[1], 2 * k) and torch.equal(noisy[2], 2 * v)


def test_per_head_noise_refuses_what_is_no_plain_projection():
    method = InputNoise(per_head=True)
    site, module = with_projections()
    assert method.refuse(site) is None
    for fact, reason in (("rope", "rotary"), ("qk_norm", "norm"), ("windowed", "window")):
        site = with_projections()[0]
        setattr(site, fact, True)
        assert reason in method.refuse(site)
        assert InputNoise().refuse(site) is None
    site, module = with_projections()
    x = tokens()
    q, k, v = (p.detach() for p in projected(module, x))
    with pytest.raises(ValueError, match="no multiple of the projection of the layer's input; use per_head=False"):
        attend_with([method], q.flip(-1), k, v, fitted=fit_standalone([method], site), hidden=x)
    with pytest.raises(ValueError, match=r"needs the layer's input \(B, T, C\) at mha, got None"):
        attend_with([method], q, k, v, fitted=fit_standalone([method], site))


def test_unknown_units_are_refused():
    with pytest.raises(ValueError, match="unit must be one of 'median', 'std', 'mad', got 'mean'"):
        InputNoise(unit="mean")


def test_the_level_is_each_samples_own_or_the_whole_batchs():
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)) + torch.tensor([1.0, 9.0])[:, None, None]
    own = InputNoise(over="sample")._level(x)
    torch.testing.assert_close(own.flatten(), torch.stack([x[0].median(), x[1].median()]))
    torch.testing.assert_close(InputNoise(over="batch")._level(x).flatten(), x.median()[None])
    for unit, wanted in (("std", x.std(correction=0)), ("mad", (x - x.median()).abs().median())):
        level = InputNoise(over="batch", unit=unit)._level(x)
        torch.testing.assert_close(level.flatten(), wanted[None])
        assert (level * torch.ones_like(x)).shape == x.shape


def test_the_median_of_layer_normed_samples_is_a_hundredth_in_size_and_not_a_hundred_thousandth():
    x = torch.nn.functional.layer_norm(torch.randn(64, 65, 192, generator=torch.Generator().manual_seed(0)), (192,))
    size = InputNoise()._level(x).abs().mean()
    assert 1e-3 < size < 5e-2
