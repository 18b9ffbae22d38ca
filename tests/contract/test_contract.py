"""The contract of every method on every host: neutral, strong, removal, folding, gradients, copies, state."""

import copy

import pytest
import torch
from rounding import assert_same_to_rounding
from small_models import HOSTS, fresh

import headwise
from headwise import methods as shelf
from headwise.core.method import REGISTRY

NAMES = list(shelf.__all__)
# Where a method has no meaning and says so by name; everything else must fit.
MEANINGLESS = {(name, host) for name in ("FeatScale", "LSA") for host in ("own-causal", "llama", "llama-left-padded")}
PAIRS = [(method, host) for method in NAMES for host in HOSTS if (method, host) not in MEANINGLESS]


def on(*hosts):
    """Pairs of every method with these hosts."""
    return [(method, host) for method, host in PAIRS if host in hosts]


@pytest.mark.parametrize(("name", "reason"), [("FeatScale", "causal"), ("LSA", "sees itself alone")])
@pytest.mark.parametrize("host", ["own-causal", "llama"])
def test_a_method_without_meaning_says_why(host, name, reason):
    model = fresh(HOSTS[host])
    with pytest.raises(ValueError, match=reason):
        headwise.regularize(model, REGISTRY[name](), example=HOSTS[host].example())


def fit(name, host, settings, model=None):
    """Fit one method onto a host."""
    model = model if model is not None else fresh(HOSTS[host])
    return model, headwise.regularize(model, REGISTRY[name](**settings), example=HOSTS[host].example())


def run(host, model, seed=3):
    torch.manual_seed(seed)
    return HOSTS[host].run(model)


def same(a, b, exact):
    if exact:
        assert torch.equal(a, b)
    else:
        assert_same_to_rounding(a, b)


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), PAIRS)
def test_a_neutral_setting_changes_nothing(name, host):
    cls = REGISTRY[name]
    if cls.neutral is None:
        assert cls.no_neutral, f"{name} declares no neutral setting and does not say why"
        return
    model = fresh(HOSTS[host])
    plain = {mode: run(host, model.train(mode)) for mode in (True, False)}
    model, handle = fit(name, host, cls.neutral, model)
    for mode in (True, False):
        with torch.enable_grad():
            out = run(host, model.train(mode))
        exact = all(f.kernels <= {"fused"} for f in handle.fitted)
        same(out, plain[mode], exact and not cls.learns)
        if mode:
            loss = handle.loss()
            # A penalty of strength 0 is 0; one without such a setting may read something and changes no output.
            assert float(loss.detach()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("name", "host"), PAIRS)
def test_a_strong_setting_visibly_acts(name, host):
    cls = REGISTRY[name]
    model = fresh(HOSTS[host])
    plain = {mode: run(host, model.train(mode)).detach() for mode in (True, False)}
    model, handle = fit(name, host, cls.strong, model)
    if cls.learns and cls.neutral is not None:
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if ".headwise." in key:
                    parameter.add_(0.5)
    out = run(host, model.train())
    loss = handle.loss()
    acted = (out - plain[True]).abs().max() > 1e-4
    if cls.penalizes:
        (grad,) = torch.autograd.grad(loss, [next(p for n, p in model.named_parameters() if ("q" in n or "in_proj" in n) and p.dim() == 2)], allow_unused=False)
        acted = acted or (abs(float(loss.detach())) > 1e-6 and grad.abs().max() > 0)
    if cls.overrides("after_step") and not acted:
        out.sum().backward()
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
        before = {k: p.detach().clone() for k, p in model.named_parameters()}
        handle.after_step()
        acted = any(not torch.equal(p, before[k]) for k, p in model.named_parameters())
    assert acted, f"{name}{cls.strong} did nothing on {host}"
    acts_in_eval = (run(host, model.eval()) - plain[False]).abs().max() > 1e-6
    assert bool(acts_in_eval) == (cls.acts == "both" or cls.overrides("after_step"))


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), PAIRS)
def test_removal_before_any_step_gives_back_the_same_bits_and_keys(name, host):
    model = fresh(HOSTS[host])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    plain, kinds, attributes = run(host, model), [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
    model, handle = fit(name, host, REGISTRY[name].strong, model)
    run(host, model)
    handle.remove()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert torch.equal(run(host, model), plain)
    assert [type(m) for m in model.modules()] == kinds
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("name", "host"), on("own", "llama", "bert-padded", "torch"))
def test_every_gradient_is_finite_and_training_steps_work(name, host):
    model, handle = fit(name, host, REGISTRY[name].strong)
    optimizer = torch.optim.AdamW(headwise.parameter_groups(model, lr=1e-3, weight_decay=0.1, attention_weight_decay=0.01))
    for _ in range(3):
        loss = run(host, model).square().mean() + handle.loss()
        optimizer.zero_grad()
        loss.backward()
        own = [(n, p) for n, p in model.named_parameters() if ".headwise." in n]
        assert all(p.grad is not None for _, p in own), [n for n, p in own if p.grad is None]
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        handle.after_step()
    assert torch.isfinite(run(host, model)).all()


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on("own", "llama", "torch"))
def test_folding_keeps_the_bits_of_the_eval_model(name, host):
    model, handle = fit(name, host, REGISTRY[name].strong)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (run(host, model).square().mean() + handle.loss()).backward()
    optimizer.step()
    handle.after_step()
    model.eval()
    with torch.no_grad():
        before = run(host, model)
        handle.fold()
        after = run(host, model)
    assert torch.equal(before, after)
    stays = REGISTRY[name].acts == "both" and not REGISTRY[name].overrides("fold")
    assert stays != handle.removed
    if not stays:
        assert list(model.state_dict()) == list(fresh(HOSTS[host]).state_dict())


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on("own", "llama", "torch"))
def test_a_deep_copy_and_a_state_dict_carry_everything(name, host):
    model, handle = fit(name, host, REGISTRY[name].strong)
    run(host, model).sum().backward()
    twin = copy.deepcopy(model)
    other = headwise.handle(twin)
    assert other is not handle and other.model is twin
    assert all(f.site.module is not g.site.module for f, g in zip(handle.fitted, other.fitted, strict=True))
    assert torch.equal(run(host, model), run(host, twin))
    twin.load_state_dict(model.state_dict(), strict=True)
    handle.remove(discard=True)
    assert torch.isfinite(run(host, twin)).all()
    assert headwise.handle(twin) is other
    other.remove(discard=True)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_works(name):
    model, handle = fit(name, "own", REGISTRY[name].strong)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = run("own", model)
        loss = out.float().square().mean() + handle.loss()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    handle.after_step()


@pytest.mark.parametrize("name", NAMES)
def test_text_and_repr_are_inverse(name):
    cls = REGISTRY[name]
    for method in (cls(), cls(**cls.strong), cls(**(cls.neutral or {}))):
        assert headwise.parse(repr(method)) == [method]


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_none_in_eval_and_without_gradients(name):
    model, handle = fit(name, "own", REGISTRY[name].strong)
    run("own", model.eval())
    assert float(handle.loss().detach()) == 0.0
    with torch.no_grad():
        run("own", model.train())
    assert float(handle.loss().detach()) == 0.0
