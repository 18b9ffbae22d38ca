"""Every method on projections that LoRA wraps does what it does on the merged model, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from grids import part_of_grid
from integration.test_adapters import adapted, merged, run

import headwise
from headwise.attend import methods

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# they hold a weight of their own in the place of the layer's, or write the base, which is frozen
REFUSED = {"InterleavedHeads", "SigmaReparam", "SpectralCap", "SpectralNorm", "WeightNorm", "QKClip", "QKRates"}
# over a causal layer a mean over tokens would leak the future, and a first token without itself would see nothing
REFUSED_ON = {"separate": {"FeatScale", "LSA"}, "beside": set()}


# what works on weights, and one of each other kind
KINDS = ("DropHead", "EntropyPenalty", "NeuTRENO", "NuclearDecay", "ProductDecay", "QKClip", "QKNorm", "QKRates")
KINDS += ("SigmaReparam", "SpectralCap", "SpectralNorm", "WeightNorm")


@pytest.mark.parametrize("name", ["separate", "beside"])
@pytest.mark.parametrize("method", part_of_grid(sorted(set(methods.__all__)), KINDS))
def test_a_method_on_adapted_projections_is_that_on_the_merged_model_or_refused_by_name(method, name):
    made, batch = adapted(name)
    # float64: a method that renormalizes enlarges the rounding in which the two products differ
    made = made.double()
    plain = merged(made).train().requires_grad_(True)
    base = made.train().get_base_model()
    if method in REFUSED | REFUSED_ON[name]:
        with pytest.raises(ValueError, match=r"adapt|frozen|causal|first token"):
            headwise.regularize(base, getattr(methods, method)())
        return
    handles = [headwise.regularize(one, getattr(methods, method)(), seed=5) for one in (base, plain)]
    assert len(handles[0].fitted) == len(handles[1].fitted) > 0
    outs = [run(one, batch) for one in (base, plain)]
    torch.testing.assert_close(*outs, rtol=1e-6, atol=1e-6)
    losses = [handle.loss() for handle in handles]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    (outs[0].square().mean() + losses[0]).backward()
    # SymmetricAttention reads no keys: their adapters get none
    reached = [p.grad for key, p in base.named_parameters() if "lora_" in key and p.grad is not None]
    assert len(reached) >= 6 and all(grad.isfinite().all() for grad in reached) and any(grad.any() for grad in reached)
    assert all(p.grad is None for key, p in base.named_parameters() if "base_layer" in key)
    for handle in handles:
        handle.remove(discard=True)
