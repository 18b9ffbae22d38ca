"""Values carried between layers: only where tokens are those of the same call, and with caches of every name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwise
from headwise import FeatScale, NeuTRENO, RelaxedAttention, ValueResidual
from headwise.attend.core.method import REGISTRY


class PerImage(nn.Module):
    """Attends within each image apart, as some vision models do: one call for each."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.num_heads = 2
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = []
        for image in x.split(4, dim=1):
            q, k, v = self.qkv(image).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            outs.append(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.proj(torch.cat(outs, dim=1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PerImage() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("method", [NeuTRENO(), ValueResidual()], ids=repr)
def test_layers_that_attend_twice_in_a_forward_carry_nothing_and_say_so(method):
    model = Model()
    headwise.regularize(model, method)
    assert model(torch.randn(1, 4, 16)).shape == (1, 4, 16)
    with pytest.raises(RuntimeError, match=r"layers\.0 computes attention more than once in a forward"):
        model(torch.randn(1, 8, 16))
    # What failed leaves nothing behind.
    assert model(torch.randn(2, 4, 16)).shape == (2, 4, 16)


def test_other_methods_work_on_layers_that_attend_twice():
    model, x = Model().eval(), torch.randn(1, 8, 16)
    headwise.regularize(model, RelaxedAttention(gamma=0.5, matched_inference=True))
    assert torch.allclose(model(x)[:, :4], model(x[:, :4]), atol=1e-6)


@pytest.mark.bits
@pytest.mark.parametrize("method", [NeuTRENO(), ValueResidual()], ids=repr)
@pytest.mark.parametrize("family", ["GPTNeoX", "GPTBigCode"])
def test_caches_are_known_under_other_names(family, method):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "GPTNeoX":
        shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
        config = transformers.GPTNeoXConfig(vocab_size=61, max_position_embeddings=64, **shape)
    else:
        config = transformers.GPTBigCodeConfig(
            vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_inner=48, n_positions=64
        )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    headwise.regularize(model, method)
    settings = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    ids = torch.randint(3, 60, (2, 5))
    whole, cached = (model.generate(input_ids=ids, use_cache=cache, **settings) for cache in (False, True))
    assert torch.equal(whole.sequences, cached.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(whole.logits), rtol=0, atol=2e-5)


@pytest.mark.parametrize("example", [False, True])
def test_pooling_heads_are_left_by_methods_that_need_all_tokens(example):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=16, patch_size=4, **shape))
    batch = {"pixel_values": torch.randn(2, 3, 16, 16)}
    handle = headwise.regularize(model, FeatScale(), example=batch if example else None)
    pooling = [row for row in handle.report().rows if "head" in row.name]
    assert [row.status for row in pooling] == ["not applicable"]
    assert model(**batch).pooler_output.shape == (2, 32)


def test_a_method_that_carries_values_without_saying_so_is_named():
    class Undeclared(headwise.Method):
        """Adds the first values."""

        share: float = 0.5
        no_neutral = "an example"

        def output(self, o, call):
            return o + self.share * call.first_values()

    try:
        model = Model()
        headwise.regularize(model, Undeclared())
        with pytest.raises(RuntimeError, match=r"does not set carries = True, one of Undeclared\(share=0\.5\)"):
            model(torch.randn(1, 4, 16))
    finally:
        REGISTRY.pop("Undeclared")


@pytest.mark.parametrize("method", [NeuTRENO(), ValueResidual()], ids=repr)
def test_a_layer_called_alone_gets_no_values_of_an_earlier_input(method):
    model = Model()
    headwise.regularize(model, method)
    x = torch.randn(1, 4, 16)
    refused = pytest.raises(
        RuntimeError, match=r"layers\.1 needs the values of the first self attention of layers, which did not run"
    )
    whole = model(x)
    with refused:
        model.layers[1](x)
    # Layers that are called in their order make a forward of their own, as often as wanted.
    for _ in range(2):
        y = x
        for layer in model.layers:
            y = y + layer(y)
        torch.testing.assert_close(y, whole)
    with refused:
        model.layers[1](x)
    model.layers[2].forward, kept = lambda x: 1 / 0, model.layers[2].forward
    with pytest.raises(ZeroDivisionError):
        model(x)
    model.layers[2].forward = kept
    with refused:
        model.layers[1](x)
    torch.testing.assert_close(model(x), whole)
