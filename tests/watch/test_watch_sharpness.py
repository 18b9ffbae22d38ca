"""Sharpness and the norm of every matrix, read while a model trains."""

import gc
import warnings

import pytest
import torch
from small_models import HOSTS, fresh
from tiny_models import FAMILIES
from torch import nn

import headwise
from headwise.health.watching.alerts import HealthWarning
from headwise.health.watching.weights import OUTSIDE

X = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _no_model_of_another_test_is_left():
    gc.collect()
    yield
    gc.collect()


def loss_of(model, regularized=None):
    def loss():
        found = model(X).square().mean()
        return found if regularized is None else found + regularized.loss()

    return loss


def train(model, steps=4, watch=None, regularized=None, kind=torch.optim.SGD):
    """Train on the same batch; give the losses."""
    optimizer = kind(model.parameters(), lr=1e-2)
    losses, loss = [], loss_of(model, regularized)
    for _ in range(steps):
        optimizer.zero_grad()
        now = loss()
        now.backward()
        optimizer.step()
        if regularized is not None:
            regularized.after_step()
        if watch is not None:
            watch.step()
        losses.append(now.item())
    return losses


def of(watch, statistic):
    return {(r["site"], r["step"]): r["value"] for r in watch.records() if r["statistic"] == statistic}


def test_the_sharpness_of_a_step_is_that_of_the_weights_before_its_update():
    model, twin = fresh(HOSTS["own"]), fresh(HOSTS["own"])
    watch = headwise.watch(
        model, every=2, on_alert=None, statistics=["sharpness", "sharpness_share"], loss=loss_of(model)
    )
    train(model, 3, watch)
    assert set(of(watch, "sharpness")) == {("model", 0), ("model", 2)}
    assert of(watch, "sharpness")["model", 0] == pytest.approx(headwise.sharpness(loss_of(twin), twin).value, rel=1e-3)
    train(twin, 2)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1e-2)
    exact = headwise.sharpness(loss_of(twin), twin, optimizer)
    assert exact.threshold == pytest.approx(200)
    assert of(watch, "sharpness")["model", 2] == pytest.approx(exact.value, rel=1e-3)
    assert of(watch, "sharpness_share")["model", 2] == pytest.approx(exact.value / 200, rel=1e-3)
    record = next(r for r in watch.records() if r["statistic"] == "sharpness")
    assert record["head"] is None and record["depth"] == OUTSIDE


@pytest.mark.bits
@pytest.mark.parametrize(
    "methods",
    [(), (headwise.DropHead(p=0.4), headwise.Decorrelation(strength=0.1)), (headwise.SigmaReparam(layers="all"),)],
    ids=str,
)
def test_reading_it_changes_no_bit_of_the_training(methods):
    found = []
    for watched in (False, True):
        model = fresh(HOSTS["own"])
        model.dropout = nn.Dropout(0.3)
        model.register_forward_hook(lambda module, args, output: module.dropout(output))
        regularized = headwise.regularize(model, *methods, example=X, seed=3) if methods else None
        names = ["sharpness", "matrix_norm", "attention_entropy"]
        settings = {"every": 1, "on_alert": None, "statistics": names, "loss": loss_of(model, regularized)}
        watch = headwise.watch(model, **settings) if watched else None
        torch.manual_seed(5)
        losses = train(model, 4, watch, regularized)
        found.append((losses, [p.detach().clone() for p in model.parameters()], torch.rand(1)))
    (plain, weights, draw), (other, theirs, next_draw) = found
    assert plain == other and torch.equal(draw, next_draw)
    assert all(torch.equal(a, b) for a, b in zip(weights, theirs, strict=True))
    # the forward of the sharpness is none that heads are read of
    assert len([r for r in watch.records() if r["statistic"] == "attention_entropy" and r["step"] == 1]) == 2 * 4


def test_buffers_and_penalties_of_the_forward_are_taken_back():
    model = nn.Sequential(nn.BatchNorm1d(9), fresh(HOSTS["own"]))
    regularized = headwise.regularize(model, headwise.Decorrelation(strength=1.0), example=X)
    # this loss leaves the penalty out, and so must not leave it to the training
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["sharpness"], loss=loss_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    (model(X).square().mean() + regularized.loss()).backward()
    mean = model[0].running_mean.clone()
    optimizer.step()
    assert torch.equal(model[0].running_mean, mean) and model[0].num_batches_tracked == 1
    watch.step()
    regularized.after_step()
    assert float(regularized.loss()) == 0
    assert of(watch, "sharpness")


def test_adam_has_no_share_before_its_first_step_and_the_watch_says_why():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, loss=loss_of(model), statistics=["sharpness_share"])
    train(model, 1, watch, kind=torch.optim.AdamW)
    assert "no second moments" in watch.reasons()["model"]["sharpness_share"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss_of(model)().backward()
        optimizer.step()
        watch.step()
    assert set(of(watch, "sharpness_share")) == {("model", 2)} and "model" not in watch.reasons()


def test_all_statistics_hold_those_of_a_loss_where_it_is_given():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, loss=loss_of(model))
    train(model, 1, watch)
    read = {r["statistic"] for r in watch.records()}
    assert {"sharpness", "sharpness_share", "attention_entropy"} <= read and "matrix_norm" not in read


def test_names_that_do_not_fit_are_refused():
    model = fresh(HOSTS["own"])
    with pytest.raises(ValueError, match=r"sharpness needs a loss: pass watch\(\) a loss="):
        headwise.watch(model, statistics=["sharpness"])
    with pytest.raises(ValueError, match="no statistic uses loss=: add sharpness or sharpness_share"):
        headwise.watch(model, statistics=["attention_entropy"], loss=loss_of(model))
    with pytest.raises(ValueError, match=r"no statistic 'sharpnes'. Did you mean 'sharpness'"):
        headwise.watch(model, statistics=["sharpnes"])


def test_a_loop_without_an_optimizer_of_torch_is_told_once():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["matrix_norm"])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            model(X)
            watch.step()
    texts = [str(one.message) for one in said if one.category is HealthWarning]
    assert len([text for text in texts if "matrix_norm are not read: call optimizer.step()" in text]) == 1


def test_a_resumed_watch_reads_at_its_own_steps():
    model = fresh(HOSTS["own"])
    watch = headwise.watch(model, every=4, on_alert=None, statistics=["matrix_norm"])
    watch.step_to(3)
    train(model, 3, watch)
    assert {step for _, step in of(watch, "matrix_norm")} == {4}
    watch.remove()
    train(model, 1)
    assert {step for _, step in of(watch, "matrix_norm")} == {4}


def exact(matrix):
    return float(torch.linalg.svdvals(matrix.detach().flatten(1).double())[0])


class Whole(nn.Module):
    """A patch embedding, two blocks of attention with MLPs, and a head."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 8, 2, 2)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def norms(model, x):
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["matrix_norm"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).square().mean().backward()
    optimizer.step()
    watch.step()
    records = [r for r in watch.records() if r["statistic"] == "matrix_norm"]
    assert not watch.reasons().get("model")
    watch.remove()
    return {r["site"]: (r["value"], r["depth"]) for r in records}


def test_every_matrix_is_read_q_k_and_v_each_by_itself():
    torch.manual_seed(0)
    model = Whole()
    found = norms(model, torch.randn(2, 1, 4, 4))
    wanted = {"patch": (exact(model.patch.weight), OUTSIDE), "head": (exact(model.head.weight), OUTSIDE)}
    for depth, block in enumerate(model.blocks):
        place = f"blocks.{depth}"
        for kind, part in zip("qkv", block.self_attn.in_proj_weight.chunk(3), strict=True):
            wanted[f"{place}.self_attn {kind}"] = (exact(part), depth)
        wanted[f"{place}.self_attn.out_proj o"] = (exact(block.self_attn.out_proj.weight), depth)
        wanted[f"{place}.linear1"] = (exact(block.linear1.weight), depth)
        wanted[f"{place}.linear2"] = (exact(block.linear2.weight), depth)
    assert found.keys() == wanted.keys()
    for name, (value, depth) in wanted.items():
        assert found[name] == (pytest.approx(value, rel=1e-5), depth), name


def test_the_norms_are_those_of_what_reparametrized_layers_compute_with():
    torch.manual_seed(0)
    model = Whole()
    x = torch.randn(2, 1, 4, 4)
    plain = norms(model, x)
    regularized = headwise.regularize(model, headwise.SigmaReparam(layers="all", init="one"), example=x)
    ones = norms(model, x)
    assert plain.keys() == ones.keys()
    assert all(value == pytest.approx(1, rel=1e-5) for value, _ in ones.values())
    assert any(abs(value - 1) > 0.05 for value, _ in plain.values())
    regularized.remove(discard=True)


def test_a_matrix_too_large_to_decompose_and_one_that_is_no_number():
    from headwise.health.watching.weights import gram_coefficients, norm_in

    def spectral_norm(matrix):
        return norm_in(gram_coefficients(matrix))

    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    assert spectral_norm(matrix) == pytest.approx(exact(matrix), rel=1e-6)
    # finite still, and squared it is not
    assert spectral_norm(matrix * 1e30) == pytest.approx(exact(matrix) * 1e30, rel=1e-6)
    assert spectral_norm(matrix * 1e-30) == pytest.approx(exact(matrix) * 1e-30, rel=1e-6)
    # one direction stands a little above many that are equal
    turned = torch.linalg.qr(matrix)[0]
    bump = turned + 1e-3 * turned[:, :1] * (torch.arange(200) == 0)
    assert spectral_norm(bump) == pytest.approx(exact(bump), rel=1e-6)
    assert spectral_norm(torch.zeros(3, 5)) == 0
    matrix[0, 0] = torch.inf
    assert torch.tensor(spectral_norm(matrix)).isnan()


def test_a_device_gives_the_norms_that_a_processor_gives(monkeypatch):
    from headwise.health.statistics import lanczos
    from headwise.health.watching.weights import STEPS, gram_coefficients, norm_in

    matrix = torch.randn(80, 30, generator=torch.Generator().manual_seed(0))
    asked = norm_in(gram_coefficients(matrix))
    monkeypatch.setattr(lanczos, "WAITING", ("cpu",))
    rows = gram_coefficients(matrix)
    assert len(rows) == 1 + min(STEPS, 60)
    assert norm_in(rows) == asked == pytest.approx(exact(matrix), rel=1e-6)


def test_where_chooses_heads_and_not_matrices():
    torch.manual_seed(0)
    model = Whole()
    watch = headwise.watch(
        model, every=1, on_alert=None, statistics=["matrix_norm", "max_logit"], where="blocks.0.self_attn"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(torch.randn(2, 1, 4, 4)).square().mean().backward()
    optimizer.step()
    watch.step()
    assert {site for site, _ in of(watch, "max_logit")} == {"blocks.0.self_attn"}
    assert len(of(watch, "matrix_norm")) == 2 * 6 + 2 and ("blocks.1.self_attn q", 0) in of(watch, "matrix_norm")


def test_a_transposed_projection_and_a_tied_head_are_read():
    model = FAMILIES["GPT2"].build().train()
    assert any(type(m).__name__ == "Conv1D" for m in model.modules())
    watch = headwise.watch(model, every=1, on_alert=None, statistics=["matrix_norm"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(input_ids=torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()
    watch.step()
    found, block = of(watch, "matrix_norm"), model.transformer.h[0]
    assert found["transformer.h.0.mlp.c_fc", 0] == pytest.approx(exact(block.mlp.c_fc.weight), rel=1e-5)
    for kind, part in zip("qkv", block.attn.c_attn.weight.chunk(3, 1), strict=True):
        assert found[f"transformer.h.0.attn.c_attn {kind}", 0] == pytest.approx(exact(part), rel=1e-5)
    assert ("lm_head", 0) in found and ("transformer.wte", 0) not in found
