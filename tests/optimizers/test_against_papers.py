"""Fifteen steps of each optimizer in fp64 equal those of its paper, on models that store their heads unlike."""

from __future__ import annotations

import math

import pytest
import torch
from optimizers import layouts
from optimizers.layouts import LAYOUTS, built, copied, gradients, set_gradients

import headwise

RATE, DECAY = 0.02, 0.1


def close(model, want):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), want[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)


def undecayed(model):
    groups = headwise.parameter_groups(model, RATE, DECAY)
    none = {id(p) for group in groups if group["name"] == "undecayed" for p in group["params"]}
    return {name for name, p in model.named_parameters() if id(p) in none}


def turned(weight, model):
    """Return whether a weight is stored with its inputs first, as Conv1D stores it."""
    return type(model.get_submodule(weight.rpartition(".")[0])).__name__ == "Conv1D"


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_muon_by_head(name, scale):
    model, heads = built(name)
    optimizer = headwise.Muon(headwise.parameter_groups(model, RATE, DECAY), per="head", adjust_lr_fn=scale)
    want, plain = copied(model), undecayed(model)
    muon = {w: layouts.Muon(s, original=scale == "original", turned=turned(w, model)) for w, s in heads.items()}
    rules = {weight: muon.get(weight) or layouts.AdamW() for weight in want}
    for grads in gradients(model):
        set_gradients(model, grads)
        optimizer.step()
        for weight, gradient in grads.items():
            decay = 0.0 if weight in plain else DECAY
            want[weight] = (1 - RATE * decay) * want[weight] - RATE * rules[weight].update(gradient)
    close(model, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_hyperball_by_head_around_adamw(name):
    model, heads = built(name)
    groups = headwise.parameter_groups(model, RATE, 0.0)
    optimizer = torch.optim.AdamW(groups)
    headwise.Hyperball(optimizer, groups, per="head")
    want = copied(model)
    rules = {weight: layouts.AdamW() for weight in want}
    radii = {weight: [m.norm() for m in split(want[weight])] for weight, split in heads.items()}
    for grads in gradients(model):
        set_gradients(model, grads)
        optimizer.step()
        for weight, gradient in grads.items():
            update = rules[weight].update(gradient)
            if weight not in heads:
                want[weight] = want[weight] - RATE * update
                continue
            split = heads[weight]
            for matrix, u, radius in zip(split(want[weight]), split(update), radii[weight], strict=True):
                moved = matrix - RATE * radius * u / u.norm()
                matrix.copy_(radius * moved / moved.norm())
    close(model, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_stiefel_by_head_around_muon(name):
    model, heads = built(name)
    mlps = {weight for weight, split in heads.items() if split is layouts.whole and "q_a_proj" not in weight}
    want = copied(model)
    groups = headwise.parameter_groups(model, RATE, 0.0)
    optimizer = headwise.Muon(groups)
    headwise.Stiefel(optimizer, groups)
    rules = {weight: layouts.Muon(heads[weight]) if weight in heads else layouts.AdamW() for weight in want}

    def retract():
        for weight in set(heads) - mlps:
            for matrix in heads[weight](want[weight]):
                left, _, right = torch.linalg.svd(matrix, full_matrices=False)
                matrix.copy_(left @ right)

    retract()
    close(model, want)
    for grads in gradients(model):
        set_gradients(model, grads)
        optimizer.step()
        for weight, gradient in grads.items():
            want[weight] = want[weight] - RATE * rules[weight].update(gradient)
        retract()
    close(model, want)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("base", ["adamw", "muon"])
def test_cautious_decay(name, base):
    model, heads = built(name)
    groups = headwise.parameter_groups(model, RATE, DECAY)
    optimizer = headwise.Muon(groups) if base == "muon" else torch.optim.AdamW(groups)
    headwise.CautiousDecay(optimizer)
    want, plain = copied(model), undecayed(model)
    muon = {w: layouts.Muon(s) for w, s in heads.items()} if base == "muon" else {}
    rules = {weight: muon.get(weight) or layouts.AdamW() for weight in want}
    for grads in gradients(model):
        set_gradients(model, grads)
        optimizer.step()
        for weight, gradient in grads.items():
            update, x = rules[weight].update(gradient), want[weight]
            decay = 0.0 if weight in plain else DECAY
            want[weight] = x - RATE * (update + decay * torch.where(update * x >= 0, x, 0.0))
    close(model, want)


def hill(matrix):
    """Return PL_Alpha_Hill with the tail from the median on, as the authors' code counts it."""
    values = sorted(float(x) ** 2 for x in torch.linalg.svdvals(matrix))
    first = len(values) // 2
    tail = values[first:]
    return 1 + len(tail) / sum(math.log(x / tail[0]) for x in tail)


@pytest.mark.parametrize("name", LAYOUTS)
def test_alpha_decay_by_head_around_adamw(name):
    model, heads = built(name)
    groups = headwise.parameter_groups(model, RATE, DECAY)
    optimizer = torch.optim.AdamW(groups)
    headwise.AlphaDecay(optimizer, groups, per="head", every=5, least=4)
    want, plain = copied(model), undecayed(model)
    rules = {weight: layouts.AdamW() for weight in want}
    for step, grads in enumerate(gradients(model)):
        set_gradients(model, grads)
        optimizer.step()
        if step % 5 == 0:
            exponents = {w: [hill(m) for m in split(want[w])] for w, split in heads.items()}
            every = [x for own in exponents.values() for x in own]
            low, high = min(every), max(every)
        for weight, gradient in grads.items():
            decays = torch.full_like(want[weight], 0.0 if weight in plain else DECAY)
            if weight in heads:
                for part, exponent in zip(heads[weight](decays), exponents[weight], strict=True):
                    part.mul_(2 / 3 + (3 - 2 / 3) * (exponent - low) / (high - low))
            want[weight] = want[weight] * (1 - RATE * decays) - RATE * rules[weight].update(gradient)
    close(model, want)
