"""Gradients, updates and spikes, read around the optimizer's steps, against their definitions on whole matrices."""

import math

import pytest
import torch
from small_models import HOSTS, fresh
from torch import nn

import headwise
from headwise.attend import projections
from headwise.health.watching.losses import Spikes
from headwise.health.watching.updates import OF_STEP, groups, spectral_entropy, update_spectrum

X = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(model, steps, watch=None, told=False, kind=torch.optim.AdamW, inputs=X):
    """Train; give for each step the gradients, and the parameters before and after it."""
    optimizer, seen = kind(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        seen.append(
            (gradients, before, {name: p.detach().clone() for name, p in model.named_parameters()}, loss.item())
        )
        if watch is not None:
            watch.step(loss if told else None)
    return seen


def of(watch, statistic):
    return {(r["site"], r["head"], r["step"]): r["value"] for r in watch.records() if r["statistic"] == statistic}


def norm(tensors):
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("width", [24, 9])
@pytest.mark.parametrize("move", [1.0, 1e-4])
def test_the_spectrum_of_the_update_is_that_of_the_whole_matrix(groups, width, move):
    q, k = drawn(4, 8, width), drawn(groups, 8, width, seed=1)
    dq, dk = drawn(4, 8, width, seed=2, scale=move), drawn(groups, 8, width, seed=3, scale=move)
    found = update_spectrum(q.double(), k.double(), (q + dq).double(), (k + dk).double())
    for head in range(4):
        g = head * groups // 4
        moved_q = (q + dq)[head].double() - q[head].double()
        moved_k = (k + dk)[g].double() - k[g].double()
        whole = moved_q.T @ k[g].double() + q[head].double().T @ moved_k
        exact = torch.linalg.svdvals(whole)
        assert found.shape[1] == min(16, width)
        torch.testing.assert_close(found[head], exact[: found.shape[1]], rtol=1e-9, atol=1e-9 * float(exact[0]))
        assert float(exact[found.shape[1] :].sum()) < 1e-9 * float(exact[0])


def test_spectral_entropy_of_known_spectra():
    values = torch.tensor([[1.0, 1.0, 1.0, 1.0], [5.0, 0.0, 0.0, 0.0], [3.0, 1.0, 0.0, 0.0]])
    exact = [math.log(4), 0.0, -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    assert spectral_entropy(values).tolist() == pytest.approx(exact, abs=1e-6)


def test_a_diverged_head_leaves_the_others_alone():
    q, k = drawn(2, 4, 10), drawn(2, 4, 10, seed=1)
    after = q + 0.1
    after[0, 0, 0] = math.nan
    found = update_spectrum(q, k, after, k)
    assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.parametrize("host", ["own", "llama"])
def test_what_is_read_around_a_step_equals_its_definition(host):
    model = fresh(HOSTS[host])
    model.train()
    watch = headwise.watch(
        model,
        every=2,
        on_alert=None,
        statistics=["gradient_norm", "update_ratio", "update_entropy", "update_norm", "update_rank"],
    )
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        out = HOSTS[host].run(model)
        out.square().mean().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.append(({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, before))
        optimizer.step()
        seen[-1] += ({name: p.detach().clone() for name, p in model.named_parameters()},)
        watch.step()
    gradients, before, after = seen[2]
    found = of(watch, "gradient_norm")
    assert found["model", None, 2] == pytest.approx(norm(gradients.values()), rel=1e-5)
    attention = [site.name for site in headwise.sites(model)]
    own = [g for name, g in gradients.items() if name.startswith(attention[1])]
    assert found[attention[1], None, 2] == pytest.approx(norm(own), rel=1e-5)
    assert {step for _, _, step in found} == {0, 2}
    block = attention[1].rpartition(".")[0]
    beside = [n for n in before if n.startswith(block + ".") and not n.startswith(attention[1])]
    ratio = norm([after[n] - before[n] for n in beside]) / norm([before[n] for n in beside])
    assert of(watch, "update_ratio")[block, None, 2] == pytest.approx(ratio, rel=1e-4)
    assert of(watch, "update_ratio").keys() >= {("outside", None, 2)} or host == "own"
    entropies = of(watch, "update_entropy")
    site = next(s for s in headwise.sites(model) if s.name == attention[1])

    def factors(values):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(values[name])
        found = projections.of(site)
        return found.q.by_head(torch.float64).detach(), found.k.by_head(torch.float64).detach()

    (q, k), (q2, k2) = factors(before), factors(after)
    for head in range(q.shape[0]):
        g = head * k.shape[0] // q.shape[0]
        whole = (q2[head] - q[head]).T @ k[g] + q[head].T @ (k2[g] - k[g])
        sigma = torch.linalg.svdvals(whole)
        share = sigma / sigma.sum()
        exact = -float(torch.special.xlogy(share, share).sum())
        assert entropies[attention[1], head, 2] == pytest.approx(exact, rel=1e-3)
        assert of(watch, "update_norm")[attention[1], head, 2] == pytest.approx(float(sigma[0]), rel=1e-4)
        stable = float(sigma.square().sum() / sigma[0] ** 2)
        assert of(watch, "update_rank")[attention[1], head, 2] == pytest.approx(stable, rel=1e-4)


def test_every_trained_parameter_stands_in_one_group():
    model = nn.Sequential(nn.Linear(32, 32), fresh(HOSTS["own"]), nn.Linear(32, 4))
    model[2].weight.requires_grad_(False)
    found = groups(model, list(headwise.sites(model)))
    held = [id(p) for one in found for p in one.parameters]
    assert len(held) == len(set(held))
    assert set(held) == {id(p) for p in model.parameters() if p.requires_grad}
    assert {one.name for one in found} >= {"outside", "1.blocks.0.attn", "1.blocks.0"}


def test_spikes_are_deviations_from_the_values_before():
    values = drawn(60, seed=4).tolist()
    values[40] = 30.0
    found = Spikes(window=20).add(values)
    assert found[:10] == [None] * 10
    for at in (10, 40, 41, 59):
        before = torch.tensor(values[max(0, at - 20) : at], dtype=torch.float64)
        assert found[at] == pytest.approx(float((values[at] - before.mean()) / before.std()), rel=1e-6)
    assert found[40] > 7 > max(x for x in found[10:40])


def test_values_that_cannot_be_compared_have_no_deviation():
    spikes = Spikes()
    assert spikes.add([2.0] * 12) == [None] * 12
    assert math.isnan(spikes.add([math.nan])[0]) and spikes.add([2.0]) == [None]
    assert len(spikes.before) == 13


def test_spikes_of_loss_and_gradient_are_those_of_all_steps_since_the_last_reading():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=8, on_alert=None, statistics=["gradient_spike", "loss_spike"])
    seen = train(model, 65, watch, told=True, kind=torch.optim.SGD)
    losses, gradients = [one[3] for one in seen], [norm(one[0].values()) for one in seen]
    for name, values, kept, first in (
        ("loss_spike", losses, Spikes(50, 50), 50),
        ("gradient_spike", gradients, Spikes(), 10),
    ):
        every = kept.add(values)
        assert every[first - 1] is None
        largest = {
            ("model", None, read): max(every[max(first, read - 7) : read + 1])
            for read in range(8, 65, 8)
            if read >= first
        }
        assert of(watch, name) == pytest.approx(largest, rel=1e-3)


def test_a_loss_that_nobody_gave_is_told():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["loss_spike"])
    train(model, 1, watch)
    assert "watch.step(loss)" in watch.reasons()["model"]["loss_spike"]


def test_a_group_that_stands_still_has_no_figure_and_the_watch_says_why():
    model = fresh(HOSTS["own"])
    with torch.no_grad():
        for p in model.blocks[0].attn.parameters():
            p.zero_()
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["update_ratio", "update_entropy", "update_rank"])
    train(model, 1, watch, kind=torch.optim.SGD)
    assert ("blocks.0.attn", None, 0) not in of(watch, "update_ratio")
    for name in ("update_entropy", "update_rank"):
        assert not [one for one in of(watch, name) if one[0] == "blocks.0.attn"]
    assert watch.reasons()["model"]["update_ratio of blocks.0.attn"]
    assert not watch.alerts()


@pytest.mark.bits
def test_reading_updates_changes_no_bit_of_the_training():
    found = []
    for watched in (False, True):
        model = fresh(HOSTS["own"])
        watch = headwise.watch(model, every=2, on_alert=None, statistics=list(OF_STEP)) if watched else None
        found.append([one[2] for one in train(model, 4, watch, told=True)])
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*found, strict=True) for n in a)
