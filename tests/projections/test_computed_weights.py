"""Weights that a hook computes before each forward are refused by the name of what computes them."""

from __future__ import annotations

import pytest
import torch
from small_models import HOSTS, fresh
from torch.nn.utils import prune

import headwise
from headwise import QKClip, SpectralCap

KINDS = {
    "prune": (
        lambda m: prune.random_unstructured(m, "weight", 0.2),
        r"RandomUnstructured .*prune\.remove\(layer, 'weight'\)",
    ),
    "prune twice": (
        lambda m: [prune.random_unstructured(m, "weight", 0.2), prune.l1_unstructured(m, "weight", 0.2)],
        r"PruningContainer .*prune\.remove\(layer, 'weight'\)",
    ),
    "weight_norm": (torch.nn.utils.weight_norm, r"WeightNorm .*remove_weight_norm\(layer\)"),
    "spectral_norm": (torch.nn.utils.spectral_norm, r"SpectralNorm .*remove_spectral_norm\(layer\)"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("method", [QKClip(threshold=0.5), SpectralCap(limit=0.2)], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_that_a_hook_computes_is_told_by_its_hook(kind, method):
    model = fresh(HOSTS["llama"])
    apply, words = KINDS[kind]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            apply(module)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"is computed before each forward by {words}") as raised:
        headwise.regularize(model, method)
    assert "FSDP" not in str(raised.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_weight_that_an_own_hook_sets_is_told_as_that():
    model = fresh(HOSTS["llama"])
    for module in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
        weight = module.weight
        del module.weight
        module.register_parameter("kept", torch.nn.Parameter(weight.detach() / 2))
        module.weight = 2 * module.kept
        module.register_forward_pre_hook(lambda m, _: setattr(m, "weight", 2 * m.kept))
    with pytest.raises(ValueError, match="is set before each forward by a hook of Linear: make it a plain parameter"):
        headwise.regularize(model, QKClip(threshold=0.5))
