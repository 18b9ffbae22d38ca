"""Ablated heads write exactly nothing, on every host, and write again when the ablation is removed."""

import copy

import pytest
import torch
from grids import part_of_grid
from small_models import HOSTS, fresh

import headwise
from headwise import DropHead, NeuTRENO
from headwise.attend.projections import of as projections_of

SOME = ("own", "torch", "llama", "bert-padded")


def without_output(model, site, head):
    """Set the weights that take a head's output to zero in the output projection, and return the model."""
    block = projections_of(site).o
    weight = block.module.weight
    places = torch.arange(weight.shape[0 if block.transposed else 1])[block.rows].view(block.heads, -1)[head]
    with torch.no_grad():
        weight.index_fill_(0 if block.transposed else 1, places, 0.0)
    return model


@pytest.mark.parametrize("name", part_of_grid(HOSTS, SOME))
@pytest.mark.parametrize("training", [True, False])
def test_an_ablated_head_adds_nothing_to_the_output_projection(name, training):
    host = HOSTS[name]
    model = fresh(host).train(training)
    plain = run(host, model)
    sites = [site for site in headwise.sites(model) if site.heads]
    handle = headwise.regularize(model, allow_none=True, example=host.example())
    ablation = handle.ablate(sites[-1].index, 1)
    found = run(host, model)
    assert not torch.equal(found, plain)
    ablation.remove()
    assert torch.equal(run(host, model), plain)
    handle.remove()
    wanted = run(host, without_output(model, sites[-1], 1))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def run(host, model):
    torch.manual_seed(3)
    return host.run(model)


def encoder(layers=2):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, nhead=4, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False)


def test_all_heads_off_leave_the_bias_of_the_output_projection():
    model, x = encoder(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, allow_none=True)
    with handle.ablate(0, range(4)):
        out = model.layers[0].self_attn(x, x, x)[0]
    torch.testing.assert_close(out, model.layers[0].self_attn.out_proj.bias.expand(2, 5, 16))


def test_outputs_that_are_not_finite_are_zero_too():
    model, x = encoder(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, allow_none=True)
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[32 + 4 : 32 + 8] = float("nan")
    assert model(x).isnan().any()
    with handle.ablate(1, 1):
        assert model(x).isfinite().all()


def test_ablations_add_up_and_each_ends_alone():
    model, x = encoder(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, DropHead(p=0.0), where=["layers.0.self_attn"])
    plain = model(x)
    first, second = handle.ablate(0, [1, 2]), handle.ablate("layers.0.self_attn", 2)
    both = model(x)
    first.remove()
    one = model(x)
    first.remove()
    assert not torch.equal(one, both) and torch.equal(model(x), one)
    second.remove()
    assert torch.equal(model(x), plain)
    assert repr(first) == "Ablation('layers.0.self_attn', heads=[1, 2])"


def test_layers_with_and_without_methods_are_ablated_and_restored_with_the_handle():
    model, x = encoder(3), torch.randn(2, 5, 16)
    plain, hooks = model(x), looks(model)
    handle = headwise.regularize(model, NeuTRENO(strength=0.5), where=["layers.0.self_attn", "layers.1.self_attn"])
    fitted = model(x)
    state = handle.state()
    for layer in range(3):
        with handle.ablate(layer, 3):
            assert not torch.equal(model(x), fitted)
            assert handle.state().keys() == state.keys()
        assert torch.equal(model(x), fitted)
    handle.ablate(2, 0), handle.ablate(0, 0)
    handle.remove()
    assert torch.equal(model(x), plain) and looks(model) == hooks


def looks(model):
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), sorted(m.__dict__)) for m in model.modules()]


def test_a_watched_layer_is_ablated_in_either_order():
    model, x = encoder().eval(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, allow_none=True)
    plain = model(x)
    watch = headwise.watch(model)
    ablation = handle.ablate(1, 0)
    off = model(x)
    assert not torch.equal(off, plain)
    watch.remove()
    assert torch.equal(model(x), off)
    again = headwise.watch(model)
    assert torch.equal(model(x), off)
    ablation.remove()
    assert torch.equal(model(x), plain)
    again.remove()
    assert torch.equal(model(x), plain)


def test_a_copy_keeps_its_ablation_to_itself():
    model, x = encoder(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, DropHead(p=0.0))
    plain = model(x)
    ablation = handle.ablate(0, 1)
    twin, off = copy.deepcopy(model), model(x)
    ablation.remove()
    assert torch.equal(model(x), plain) and torch.equal(twin(x), off)


def test_a_compiled_model_is_ablated():
    model, x = encoder(), torch.randn(2, 5, 16)
    handle = headwise.regularize(model, DropHead(p=0.0))
    compiled = torch.compile(model, backend="eager")
    plain = compiled(x)
    with handle.ablate(1, 2):
        off = model(x)
        torch.testing.assert_close(compiled(x), off)
    torch.testing.assert_close(compiled(x), plain)
    assert not torch.allclose(off, plain)


def test_what_cannot_be_ablated_is_refused_by_name():
    model = encoder()
    handle = headwise.regularize(model, DropHead())
    for layer, head, error, message in (
        (2, 0, ValueError, r"layer: layers are from 0 to 1, as headwise\.sites\(model\) lists them, got 2"),
        ("layers.0.attn", 0, ValueError, r"no attention layer 'layers\.0\.attn'\. Did you mean 'layers\.0\.self_attn'"),
        (1.5, 0, TypeError, "layer: a layer is an index or the name of an attention layer, got 1.5"),
        (0, 4, ValueError, r"head must be from 0 to 3 at layers\.0\.self_attn, got 4"),
        (0, [0, -1, 9], ValueError, "got -1, 9"),
        (0, "all", TypeError, "head must be the index of a head or several, got 'all'"),
    ):
        with pytest.raises(error, match=message):
            handle.ablate(layer, head)
    handle.remove()
    with pytest.raises(RuntimeError, match="no longer regularized"):
        handle.ablate(0, 0)


def test_a_copy_of_a_layer_without_methods_keeps_its_ablation():
    model, x = encoder(), torch.randn(2, 5, 16)
    plain = model(x)
    handle = headwise.regularize(model, allow_none=True)
    ablation = handle.ablate(0, 1)
    twin, off = copy.deepcopy(model), model(x)
    ablation.remove()
    assert torch.equal(model(x), plain) and torch.equal(twin(x), off)
    headwise.handle(twin).remove()
    assert torch.equal(twin(x), plain)


def test_a_model_is_not_folded_while_heads_are_off():
    model = encoder()
    handle = headwise.regularize(model, DropHead())
    ablation = handle.ablate(1, 0)
    with pytest.raises(RuntimeError, match=r"Ablation\('layers\.1\.self_attn', heads=\[0\]\) is in force"):
        handle.fold()
    ablation.remove()
    handle.fold()


def test_ablations_that_ended_are_forgotten():
    handle = headwise.regularize(encoder(), DropHead())
    for _ in range(5):
        with handle.ablate(0, 1):
            pass
    assert len(handle._ablations) == 1 and not handle._ablations[0].holds
