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


BY = ("gradient", "loss")


def spread(found):
    return [found.loss, *(x for row in found.layers for x in row.heads)]


@pytest.mark.parametrize("by", BY)
def test_it_does_not_matter_how_the_data_are_cut_into_batches(by):
    model, whole = fresh(HOST).double(), torch.randn(7, 9, 32, dtype=torch.float64)
    one = headwise.importance(model, [whole], loss=squares, by=by)
    for cut in ([1, 6], [5, 2], [2, 2, 3]):
        assert spread(headwise.importance(model, whole.split(cut), loss=squares, by=by)) == pytest.approx(spread(one))
    unweighted = headwise.importance(model, whole.split([1, 6]), loss=squares, by=by, weight=lambda batch: 1.0)
    assert spread(unweighted) != pytest.approx(spread(one), rel=1e-3)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", ["masked", "causal", "unnamed", "classes"])
def test_batches_of_transformers_count_by_the_labels_of_their_loss(kind, by):
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
    )

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = {
        "masked": lambda: BertForMaskedLM(BertConfig(vocab_size=19, **sizes)),
        "causal": lambda: LlamaForCausalLM(LlamaConfig(vocab_size=19, **sizes)),
        "unnamed": lambda: GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=19, bos_token_id=0, eos_token_id=0)
        ),
        "classes": lambda: BertForSequenceClassification(BertConfig(vocab_size=19, num_labels=3, **sizes)),
    }[kind]().double()
    ids = torch.randint(0, 19, (6, 8))
    labels = ids.clone()
    # Rows with few labels, and one without any, which a mean of rows or of batches counts as much as the others.
    labels[0, 3:], labels[1, 2:], labels[2] = -100, -100, -100
    labels = labels if kind != "classes" else torch.arange(6) % 3

    def measured(*cut):
        batches = [
            {"input_ids": i, "labels": y, "attention_mask": torch.ones_like(i)}
            for i, y in zip(ids.split(cut), labels.split(cut), strict=True)
        ]
        return spread(headwise.importance(model, batches, by=by))

    # transformers computes its losses in fp32
    whole = pytest.approx(measured(6), rel=1e-4, abs=1e-6)
    assert measured(3, 3) == whole and measured(1, 1, 1, 3) == whole
    if by == "loss" and kind != "classes":
        ignored = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
        with pytest.raises(ValueError, match="no batch of the data counts: all its labels are ignored"):
            headwise.importance(model, [ignored], by=by)


def test_batches_without_labels_count_by_their_mask():
    from transformers import BertConfig, BertModel

    model = BertModel(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=19)
    )
    batches = [{"input_ids": torch.ones(1, 6, dtype=torch.long)} for _ in range(2)]
    batches[0]["attention_mask"] = torch.tensor([[1, 1, 0, 0, 0, 0]])
    batches[1]["attention_mask"] = torch.ones(1, 6, dtype=torch.long)
    found = headwise.importance(
        model, batches, loss=lambda m, b: m(**b).last_hidden_state.sum() * 0 + b["attention_mask"].sum(), by="loss"
    )
    assert found.loss == pytest.approx((2 * 2 + 6 * 6) / 8)


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
        (
            batches(),
            {"loss": squares, "weight": lambda b: -1},
            ValueError,
            "weight must return a number from 0 up, got -1",
        ),
        (batches(), {"loss": squares, "weight": lambda b: 0}, ValueError, "no batch of the data counts"),
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
