"""The importance of heads by gradients and by their removal, and what compression makes of idle heads."""

import pytest
import torch
from small_models import HOSTS, fresh

import headwise
from headwise import DropHead, NeuTRENO, RelaxedAttention
from headwise.attend.regularizing.importance import Importance, LayerImportance

HOST = HOSTS["own"]


def squares(model, batch):
    return model(batch).square().mean()


def batches(count=3, size=4):
    return [torch.randn(size, 9, 32, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def test_by_loss_it_is_the_loss_without_a_head_minus_the_loss():
    model, data = fresh(HOST), batches()
    found = headwise.importance(model, data, loss=squares, by="loss")
    handle, model = headwise.regularize(model, allow_none=True), model.eval()

    def mean():
        with torch.no_grad():
            return sum(float(squares(model, x)) for x in data) / 3

    assert found.loss == pytest.approx(mean())
    for index, row in enumerate(found.layers):
        for head, value in enumerate(row.heads):
            with handle.ablate(index, head):
                assert value == pytest.approx(mean() - found.loss, abs=1e-7)
    assert [len(row.heads) for row in found.layers] == [4, 4]


def test_by_gradient_it_is_the_mean_over_samples_of_the_gradients_of_gates():
    model, data = fresh(HOST).eval(), batches(2, 3)
    found = headwise.importance(model, data, loss=squares)
    # written out: the heads' outputs of the last layer, scaled one sample at a time
    proj, wanted = model.blocks[1].attn.proj, torch.zeros(4)
    for x in torch.cat(data):
        xi = torch.ones(4, requires_grad=True)
        hook = proj.register_forward_pre_hook(
            lambda _, args, xi=xi: (args[0].unflatten(-1, (4, 8)) * xi[:, None]).flatten(-2)
        )
        wanted += torch.autograd.grad(squares(model, x[None]), xi)[0].abs() / 6
        hook.remove()
    torch.testing.assert_close(torch.tensor(found.layers[1].heads), wanted)


def test_both_agree_to_first_order_on_heads_that_write_little():
    model, (x,) = fresh(HOST), batches(1, 1)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.proj.weight *= torch.logspace(-4, -2, 4).repeat_interleave(8)
    by_gradient = headwise.importance(model, [x], loss=squares)
    by_loss = headwise.importance(model, [x], loss=lambda m, b: squares(m.double(), b.double()), by="loss")
    for one, other in zip(by_gradient.layers, by_loss.layers, strict=True):
        assert torch.tensor(one.heads).log() == pytest.approx(torch.tensor(other.heads).abs().log(), abs=0.1)


def test_both_find_the_head_that_writes_nothing_and_the_one_that_matters_in_a_trained_model():
    torch.manual_seed(0)
    model, data = fresh(HOST), batches(8)
    # what each token's neighbour says, which only attention can tell
    target = [x.roll(1, 1)[..., :5] for x in data]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(160):
        x, y = data[step % 8], target[step % 8]
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[:, 8:16] = 0.0

    def loss(model, pair):
        return (model(pair[0]) - pair[1]).square().mean()

    pairs = list(zip(data, target, strict=True))
    gradient, removed = (headwise.importance(model, pairs, loss=loss, by=by) for by in ("gradient", "loss"))
    assert gradient.ranked()[0][:2] == ("blocks.0.attn", 1) and gradient.ranked()[0][2] == 0
    assert removed.layers[0].heads[1] == pytest.approx(0, abs=1e-6)
    a, b = (torch.tensor([x for row in one.layers for x in row.heads]) for one in (gradient, removed))
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.6


def test_the_model_and_its_gradients_stay_as_they_are():
    model, x = fresh(HOST).train(), batches(1)
    plain = HOST.run(model)
    hooks = [(len(m._forward_hooks), sorted(m.__dict__)) for m in model.modules()]
    for by in ("gradient", "loss"):
        torch.manual_seed(1)
        headwise.importance(model, x, loss=squares, by=by)
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(HOST.run(model), plain)
    assert [(len(m._forward_hooks), sorted(m.__dict__)) for m in model.modules()] == hooks


def test_methods_and_ablations_stay_in_force_and_frozen_models_are_measured():
    model, data = fresh(HOST).requires_grad_(False), batches(1)
    plain = headwise.importance(model, data, loss=squares)
    handle = headwise.regularize(model, NeuTRENO(strength=0.9), where=["blocks.0.attn", "blocks.1.attn"])
    with_methods = headwise.importance(model, data, loss=squares)
    assert with_methods.loss != pytest.approx(plain.loss)
    ablation = handle.ablate(0, 2)
    for by in ("gradient", "loss"):
        found = headwise.importance(model, data, loss=squares, by=by)
        assert found.layers[0].heads[2] == 0 and found.loss != pytest.approx(with_methods.loss)
    ablation.remove()
    assert headwise.importance(model, data, loss=squares).loss == pytest.approx(with_methods.loss)


@pytest.mark.parametrize("name", ["torch", "llama", "bert-padded"])
def test_other_hosts_are_measured(name):
    host = HOSTS[name]
    model = fresh(host)
    handle = headwise.regularize(model, DropHead(), RelaxedAttention(), example=host.example())
    found = {
        by: headwise.importance(model, [None], loss=lambda m, _: host.run(m).square().mean(), by=by)
        for by in ("gradient", "loss")
    }
    for row, other in zip(found["gradient"].layers, found["loss"].layers, strict=True):
        assert len(row.heads) == len(other.heads) > 1
        assert all(x > 0 for x in row.heads) and any(other.heads)
    handle.remove()


def test_the_table_reads_by_layer_and_head():
    found = Importance("gradient", 1.25, (LayerImportance("a", (0.5, 0.0)), LayerImportance("b", (3.0, 4.0, 0.25))))
    assert str(found).splitlines() == [
        "importance of heads by gradient; the loss is 1.25",
        "layer  head 0  head 1  head 2",
        "a         0.5       0",
        "b           3       4    0.25",
    ]
    assert found.ranked()[:2] == [("a", 1, 0.0), ("b", 2, 0.25)]
    assert found.idle(below=0.3) == {"a": [1], "b": [2]}
    assert found.normalized().layers[0].heads == (1.0, 0.0)
    assert "<td" in found._repr_html_() and "0.25" in found._repr_html_()


def test_what_cannot_be_measured_is_refused_by_name():
    model = fresh(HOST)
    for data, settings, error, message in (
        ([], {"loss": squares}, ValueError, "data has no batch"),
        ([], {"loss": squares, "by": "loss"}, ValueError, "data has no batch"),
        (torch.ones(2), {}, TypeError, "data must be batches, such as a list or a loader, got Tensor"),
        (
            batches(),
            {"loss": lambda m, b: m(b)},
            ValueError,
            r"loss must return a 0-d tensor, got the shape \(4, 9, 5\)",
        ),
        (batches(), {"loss": lambda m, b: b.sum()}, ValueError, "loss does not depend on any head"),
        (batches(), {}, ValueError, "the output of Own has no loss: put labels into the batches, or pass loss="),
        (batches(), {"by": "entropy"}, ValueError, 'by must be "gradient" or "loss", got \'entropy\''),
    ):
        with pytest.raises(error, match=message):
            headwise.importance(model, data, **settings)
    with pytest.raises(ValueError, match="Linear has no attention layer that can be reached"):
        headwise.importance(torch.nn.Linear(2, 2), batches(), loss=squares)
    assert not any("headwise" in key for key in model.state_dict())


@pytest.mark.parametrize("regularized", [False, True])
def test_a_compiled_model_is_measured(regularized):
    model, data = fresh(HOST), batches(1)
    plain = headwise.importance(model, data, loss=squares)
    if regularized:
        headwise.regularize(model, DropHead())
    found = headwise.importance(torch.compile(model, backend="eager"), data, loss=squares)
    assert [row.layer for row in found.layers] == [row.layer for row in plain.layers]
    for row, wanted in zip(found.layers, plain.layers, strict=True):
        assert row.heads == pytest.approx(wanted.heads, rel=1e-4)
