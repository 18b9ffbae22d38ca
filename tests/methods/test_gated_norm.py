import pytest
import torch
from torch.nn import functional as F

import headwise
from headwise import GatedNorm
from headwise.attend.core.site import Site


class Layer(torch.nn.Module):
    """Self attention of two heads behind a norm, as pre-norm models have it."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = torch.nn.RMSNorm(8), torch.nn.Linear(8, 24)
        self.attention = Attention(self.qkv)

    def forward(self, x):
        return self.attention(self.norm(x))


class Attention(torch.nn.Module):
    """Attention of two heads of 4."""

    def __init__(self, qkv):
        super().__init__()
        self.qkv, self.num_heads = qkv, 2

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("start", "factor"), [("half", 1), ("one", 2), ("open", 1)])
def test_the_normalised_input_is_multiplied_by_a_gate_of_itself(start, factor):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, 5, 8)
    plain, y = layer(x), layer.norm(x)
    handle = headwise.regularize(layer, GatedNorm(rank=3, start=start), example=x)
    learned = {name.rpartition(".")[2]: p for name, p in layer.named_parameters() if "GatedNorm" in name}
    assert {n: tuple(p.shape) for n, p in learned.items() if n != "bias"} == {"down": (3, 8), "up": (8, 3)}
    assert ("bias" in learned) == (start == "open")
    if start == "one":
        torch.testing.assert_close(layer(x), plain)
    torch.nn.init.normal_(learned["up"])
    logits = F.silu(y @ learned["down"].T) @ learned["up"].T + learned.get("bias", 0.0)
    out = layer(x)
    torch.testing.assert_close(out, handle_free(layer, y * factor * torch.sigmoid(logits)))
    out.sum().backward()
    assert all((p.grad != 0).any() for p in learned.values())
    handle.remove(discard=True)
    assert torch.equal(layer(x), plain)


def handle_free(layer, y):
    """Return what the layer's attention makes of its input y, written out."""
    q, k, v = layer.qkv(y).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_settings_and_layers_that_it_does_not_fit_are_refused():
    with pytest.raises(ValueError, match="GatedNorm: rank must be at least 1, got 0"):
        GatedNorm(rank=0)
    with pytest.raises(ValueError, match="start must be one of 'open', 'half', 'one', got 'shut'"):
        GatedNorm(start="shut")
    assert "image and text" in GatedNorm().refuse(Site("x", torch.nn.Module(), joint=True))
