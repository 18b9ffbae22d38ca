"""What methods learned is never lost silently: removal, loading, and the advice that a plain model's error gives."""

from __future__ import annotations

import pytest
import torch
from small_models import HOSTS, Own, fresh

import headwise
from headwise import XSA, AttentionSink, AttnScale, DropHead, GatedOutput, SigmaReparam, SSMax
from headwise.attend.core.method_state import MethodState


def fitted(method, seed=0):
    torch.manual_seed(seed)
    model = Own()
    return model, headwise.regularize(model, method, example=torch.randn(2, 5, 32))


@pytest.mark.parametrize("method", [SigmaReparam(), AttnScale(), GatedOutput()], ids=repr)
def test_removal_after_training_without_after_step_is_refused(method):
    model, handle = fitted(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 5, 32)).square().mean().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"learned something that remove\(\) would lose: fold\(\).*discard=True"):
        handle.remove()
    handle.remove(discard=True)


@pytest.mark.parametrize("method", [XSA(), AttentionSink(learned=False), SSMax(learned=False)], ids=repr)
def test_a_method_that_learns_nothing_at_its_settings_is_removed_after_steps(method):
    model, handle = fitted(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(2, 5, 32)).square().mean().backward()
        optimizer.step()
        handle.after_step()
    handle.remove()


def test_removal_after_loading_trained_gains_is_refused():
    model, _ = fitted(AttnScale())
    trained = {name: x + 0.5 if name.endswith("gain") else x for name, x in model.state_dict().items()}
    other, handle = fitted(AttnScale(), seed=1)
    other.load_state_dict(trained)
    with pytest.raises(RuntimeError, match="learned something"):
        handle.remove()


@pytest.mark.parametrize(
    "change", [lambda m: m.load_state_dict(m.state_dict()), lambda m: m.to("cpu"), lambda m: m.eval()]
)
def test_removal_is_free_where_nothing_moved(change):
    model, handle = fitted(SigmaReparam())
    before = {name: x.clone() for name, x in Own().state_dict().items()}
    change(model)
    handle.remove()
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("method", [SigmaReparam(), AttnScale()], ids=repr)
def test_a_plain_model_that_gets_regularized_weights_names_the_remedy(method):
    model, _ = fitted(method)
    with pytest.raises(RuntimeError, match="fold_before_saving_or_regularize_before_loading"):
        Own().load_state_dict(model.state_dict())


def test_weights_of_other_methods_are_not_called_plain():
    source, _ = fitted(SigmaReparam())
    model, _ = fitted(AttnScale())
    with pytest.raises(
        RuntimeError, match=r"a model with other methods.*AttnScale.*with the methods they were saved with"
    ):
        model.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="come from a plain model"):
        model.load_state_dict(Own().state_dict())


def test_one_missing_weight_is_told_as_one():
    model, _ = fitted(AttnScale())
    state = model.state_dict()
    del state[next(key for key in state if "AttnScale" in key)]
    with pytest.raises(RuntimeError, match=r": \S*AttnScale\S* is missing\. Load"):
        model.load_state_dict(state)


def test_methods_that_learn_nothing_leave_no_entry():
    model, _ = fitted(DropHead())
    assert model.state_dict().keys() == Own().state_dict().keys()


@pytest.mark.parametrize("method", [SigmaReparam(), AttnScale(), GatedOutput()], ids=repr)
def test_weights_that_need_not_fit_are_loaded_with_a_warning(method):
    model, handle = fitted(method)
    plain = Own()
    with pytest.warns(UserWarning, match=r"these weights come from a plain model.*Load the weights before regularize"):
        missing, _ = model.load_state_dict(plain.state_dict(), strict=False)
    assert any("headwise" in key for key in missing)
    assert torch.equal(model.head.weight, plain.head.weight)
    # What fits is loaded without a word, also as a part of something larger.
    outer = torch.nn.Sequential(model)
    state = outer.state_dict()
    assert outer.load_state_dict(state, strict=False) == outer.load_state_dict(state)
    with pytest.raises(RuntimeError, match="come from a plain model"):
        outer.load_state_dict(torch.nn.Sequential(Own()).state_dict())
    handle.remove(discard=True)


LEARNERS = ["AttnScale()", "FeatScale()", "QKNorm()", "GatedOutput()", 'GatedOutput(per="element")']


@pytest.mark.parametrize("text", LEARNERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("host", ["own", "bert-padded", "torch"])
def test_learned_parameters_have_the_precision_of_the_layer_they_serve(text, dtype, host):
    model = fresh(HOSTS[host]).to(dtype)
    args, kwargs = HOSTS[host].batch()
    args = tuple(x.to(dtype) for x in args)
    handle = headwise.regularize(model, *headwise.parse(text), example=kwargs or args)
    learned = {n: p for n, p in model.named_parameters() if ".headwise." in n}
    assert learned and {p.dtype for p in learned.values()} == {dtype}
    out = model(*args, **kwargs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    assert out.dtype == dtype
    out.sum().backward()
    assert all(p.grad is not None for p in learned.values())
    handle.remove()


@pytest.mark.parametrize("text", LEARNERS)
def test_learned_parameters_of_a_model_without_numbers_have_none_either(text):
    with torch.device("meta"):
        model = fresh(HOSTS["torch"])
    handle = headwise.regularize(model, *headwise.parse(text))
    learned = [p for n, p in model.named_parameters() if ".headwise." in n]
    assert learned and all(p.is_meta for p in learned)
    assert model(torch.randn(2, 9, 32, device="meta")).is_meta
    handle.remove()
    assert not any("headwise" in name for name in model.state_dict())


@pytest.mark.parametrize("text", ["AttentionSink(learned=False)", "SSMax(learned=False)", "QKClip(threshold=0.01)"])
def test_numbers_that_no_state_dict_holds_survive_empty_memory(text, monkeypatch):
    made = fresh(HOSTS["torch"])
    handles = [headwise.regularize(made, *headwise.parse(text))]
    with torch.device("meta"):
        model = fresh(HOSTS["torch"])
    handles.append(headwise.regularize(model, *headwise.parse(text)))
    empty = torch.empty_like
    # memory that was not written holds anything
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty(*args, **kwargs).fill_(1e4))
    model.to_empty(device="cpu")
    monkeypatch.undo()
    model.load_state_dict(made.state_dict())
    args, kwargs = HOSTS["torch"].batch()
    for handle in handles:
        handle.model.train()(*args, **kwargs).sum().backward()
        handle.after_step()
    assert all(torch.equal(x, y) for x, y in zip(made.parameters(), model.parameters(), strict=True))
    assert torch.equal(made.eval()(*args, **kwargs), model.eval()(*args, **kwargs))


def test_maxima_of_a_step_move_with_the_model():
    net = fresh(HOSTS["torch"])
    handle = headwise.regularize(net, headwise.QKClip())
    args, kwargs = HOSTS["torch"].batch()
    net.train()(*args, **kwargs)
    before = [state.tensor("largest").clone() for f in handle.fitted for state in f.states]
    net.double()
    after = [state.tensor("largest") for f in handle.fitted for state in f.states]
    assert all(torch.isfinite(x).all() and torch.equal(x.double(), y) for x, y in zip(before, after, strict=True))


def test_quantized_weights_do_not_set_the_precision_of_what_is_learned():
    layer = torch.nn.Module()
    layer.packed = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    state = MethodState(layer, "AttnScale")
    assert state.parameter("gain", torch.zeros(2)).dtype == torch.float32
