"""Sharpness: the largest eigenvalue of a Hessian against whole Hessians, and thresholds against the steps
themselves."""

import math

import pytest
import torch
from grids import part_of_grid
from torch import nn

import headwise
from headwise.health.statistics import lanczos
from headwise.health.statistics.sharpness import sharpness, stability


def symmetric(*eigenvalues, seed=0):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64))[
        0
    ]
    return basis @ torch.tensor(eigenvalues, dtype=torch.float64).diag() @ basis.T


class Net(nn.Module):
    """Two layers and attention, a parameter the loss is linear in, and one it does not hold."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True, activation="gelu")
        self.shift, self.idle = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.layer(x).square().mean() + self.layer(x)[..., 0].pow(3).mean() + self.shift.sum()


def net(dtype=torch.float64):
    torch.manual_seed(0)
    model = Net().to(dtype)
    x = torch.randn(3, 5, 4).to(dtype)
    return model, lambda: model(x)


def whole_hessian(loss, parameters):
    """The Hessian, written out row by row with the loss's own second derivatives."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(loss(), parameters, create_graph=True, allow_unused=True)
        flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(gradient, parameters)])
        rows = []
        for entry in flat:
            found = [None] * len(parameters)
            if entry.requires_grad:
                found = torch.autograd.grad(entry, parameters, retain_graph=True, allow_unused=True)
            rows.append(
                torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(found, parameters)])
            )
    return torch.stack(rows).detach()


def largest(products, start, iterations, tolerance):
    rows = [lanczos.coefficients(product, start, iterations, tolerance) for product in products]
    return [lanczos.read(one, tolerance) for one in rows]


@pytest.mark.parametrize("eigenvalues", [(3.0, 1.0, -5.0, 0.1), (2.0, 2.0, 2.0), (0.0, -1.0), (7.0,)])
def test_lanczos_gives_the_largest_eigenvalue_and_not_the_largest_in_size(eigenvalues):
    matrix = symmetric(*eigenvalues)
    (found,) = largest([lambda v: matrix @ v], torch.ones(len(eigenvalues), dtype=torch.float64), 50, 1e-6)
    assert found.value == pytest.approx(max(eigenvalues), abs=1e-9)
    assert found.products <= len(eigenvalues)


def test_lanczos_ends_at_its_tolerance_and_says_how_far_it_is_off():
    matrix = symmetric(*torch.linspace(0, 1, 60).tolist(), 2.0)
    start = torch.randn(61, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    few, many = (largest([lambda v: matrix @ v], start, n, 1e-8)[0] for n in (3, 60))
    assert few.products == 3 and few.error > 1e-8 > many.error
    assert few.value == pytest.approx(2, abs=few.error) and many.value == pytest.approx(2, abs=1e-8)
    assert many.products < 60


@pytest.mark.parametrize(("pause", "made"), [(1, (2, 12)), (8, (8, 16)), (50, (40, 40))])
def test_what_is_read_once_is_what_is_read_after_each_product(monkeypatch, pause, made):
    monkeypatch.setattr(lanczos, "WAITING", ("cpu",))
    monkeypatch.setattr(lanczos, "PAUSE", pause)
    matrices = symmetric(*[3.0] * 6, *[-5.0] * 6), symmetric(*torch.linspace(0, 1, 11).tolist(), 1.2)
    calls = [0, 0]

    def product(which):
        def multiply(vector):
            calls[which] += 1
            return matrices[which] @ vector

        return multiply

    start = torch.ones(12, dtype=torch.float64)
    found = largest([product(0), product(1)], start, 40, 1e-8)
    assert [one.value for one in found] == pytest.approx([3, 1.2], rel=1e-7)
    assert tuple(calls) == made and tuple(one.products for one in found) == (2, 12)


def test_a_quadratic_has_the_sharpness_of_its_matrix():
    matrix = symmetric(4.0, 1.0, -9.0)
    first, second, idle = (torch.ones(n, dtype=torch.float64, requires_grad=True) for n in (1, 2, 3))

    def loss():
        w = torch.cat([first, second])
        return w @ matrix @ w / 2 + first.sum()

    found = headwise.sharpness(loss, [first, second, idle])
    assert found.value == pytest.approx(4, rel=1e-3) and found.error <= 1e-3 * 4
    assert found.share is None and first.grad is None
    assert headwise.sharpness(lambda: first.sum(), [first]).value == 0


def test_a_small_net_has_the_largest_eigenvalue_of_its_whole_hessian():
    model, loss = net()
    parameters = list(model.parameters())
    values = torch.linalg.eigvalsh(whole_hessian(loss, parameters))
    assert -values[0] > 0.01 * values[-1]
    found = sharpness(loss, model, iterations=200, tolerance=1e-8)
    assert found.value == pytest.approx(float(values[-1]), rel=1e-6)


def test_single_precision_is_near():
    model, loss = net(torch.float32)
    other, exact = net()
    assert sharpness(loss, model).value == pytest.approx(sharpness(exact, other).value, rel=5e-3)


@pytest.mark.parametrize("kind", part_of_grid(["adam", "adamw", "adagrad", "sgd"], ["adamw"]))
def test_the_preconditioned_sharpness_is_that_of_the_scaled_hessian(kind):
    model, loss = net()
    slow, fast = [
        list(model.layer.self_attn.parameters()),
        [p for n, p in model.named_parameters() if "self_attn" not in n],
    ]
    groups = [{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 2e-3}]
    made = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    optimizer = made[kind](groups)
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        for parameter in model.parameters():
            # moments of 0 make Adam's own steps infinite in what the loss does not hold
            parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    parameters, scales = list(model.parameters()), []
    for parameter in parameters:
        state, share = optimizer.state[parameter], 0.5 if any(parameter is p for p in slow) else 1.0
        if kind == "sgd":
            root = torch.ones_like(parameter)
        elif kind == "adagrad":
            root = state["sum"].sqrt() + 1e-10
        else:
            root = (1 - 0.9**3) * ((state["exp_avg_sq"] / (1 - 0.999**3)).sqrt() + 1e-8)
        scales.append((share / root).flatten())
    scale = torch.cat(scales).sqrt()
    exact = torch.linalg.eigvalsh(scale[:, None] * whole_hessian(loss, parameters) * scale)[-1]
    found = sharpness(loss, model, optimizer, iterations=300, tolerance=1e-9)
    assert found.preconditioned == pytest.approx(float(exact), rel=1e-6)
    limit = {"adam": 38, "adamw": 38, "adagrad": 2, "sgd": 2}[kind]
    assert found.threshold == pytest.approx(limit / 2e-3)
    assert found.share == pytest.approx(float(exact) / (limit / 2e-3), rel=1e-6)


@pytest.mark.parametrize(
    "settings",
    part_of_grid(
        [
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.5},
            {"momentum": 0.9, "dampening": 0.5},
        ],
        [{}, {"momentum": 0.9, "nesterov": True}],
    ),
)
@pytest.mark.parametrize("beyond", [0.98, 1.02])
def test_steps_of_sgd_grow_beyond_the_threshold_and_shrink_below_it(settings, beyond):
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1, **settings)
    curve = beyond * stability(optimizer, [w]).threshold
    for _ in range(1000):
        optimizer.zero_grad()
        (curve * w.square() / 2).sum().backward()
        optimizer.step()
    assert (abs(float(w.detach())) > 1) == (beyond > 1)


@pytest.mark.parametrize("beyond", [0.98, 1.02])
def test_steps_of_adam_with_a_preconditioner_that_stands_still_grow_beyond_38_over_the_rate(beyond):
    # ε so large that the preconditioner is ε alone, and the bias correction over after the first few hundred steps
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1, eps=1e8)
    curve = beyond * 38 / 0.1 * 1e8
    for step in range(3000):
        optimizer.zero_grad()
        # the gradient that Adam sees is kept so small that its square adds nothing to ε
        (curve * w.square() / 2).sum().backward()
        optimizer.state[w].get("exp_avg_sq", torch.zeros(1)).zero_()
        optimizer.step()
        optimizer.state[w]["exp_avg_sq"].zero_()
        if step == 300:
            with torch.no_grad():
                w.fill_(1e-6)
            optimizer.state[w]["exp_avg"].zero_()
    assert math.isfinite(float(w.detach())) and (abs(float(w.detach())) > 1e-6) == (beyond > 1)


def test_what_has_no_threshold_says_why():
    w, other = (torch.ones(1, requires_grad=True) for _ in range(2))
    for optimizer, words in (
        (torch.optim.Adam([w]), "no second moments before its first step"),
        (torch.optim.Adagrad([w]), "no sum of squares before its first step"),
        (torch.optim.RMSprop([w]), "known for RMSprop"),
        (torch.optim.SGD([other], lr=0.1), "over parameters that the optimizer does not hold"),
        (torch.optim.SGD([w], lr=0.0), "learning rate is 0"),
        (torch.optim.SGD([w], lr=0.1, maximize=True), "maximizes"),
        (torch.optim.SGD([{"params": [w]}, {"params": [other], "momentum": 0.9}], lr=0.1), "different momentum"),
    ):
        asked = [w, other] if "different" in words else [w]
        found = sharpness(lambda: w.square().sum(), asked, optimizer)
        assert words in found.missing and found.share is None and found.value == pytest.approx(2)


def test_what_cannot_be_read_is_refused_by_name():
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"0-d tensor with a graph, got the shape \(2,\)"):
        sharpness(lambda: w * 2, [w])
    with pytest.raises(ValueError, match="without a graph"):
        sharpness(lambda: w.detach().sum(), [w])
    with pytest.raises(ValueError, match="0-d tensor with a graph, got a dict"):
        sharpness(lambda: {"loss": w.sum()}, [w])
    with pytest.raises(TypeError, match=r"pass a function, such as lambda: .* not a Tensor"):
        sharpness(w.sum(), [w])
    with pytest.raises(ValueError, match="got none"):
        sharpness(lambda: w.sum(), [torch.ones(1)])
    with pytest.raises(ValueError, match="iterations is at least 1"):
        sharpness(lambda: w.sum(), [w], iterations=0)

    # fused attention, as it stands without the plain kernel, has a first derivative alone
    x = torch.randn(2, 1, 2, 5, 4, requires_grad=True)
    fused = nn.functional.scaled_dot_product_attention(x[0], x[0], x[1]).square().sum()
    with pytest.raises(ValueError, match=r"cannot be differentiated twice .*fused kernels"):
        sharpness(lambda: fused, [x])
    assert sharpness(lambda: nn.functional.scaled_dot_product_attention(x[0], x[0], x[1]).square().sum(), [x]).value > 0


def test_a_loss_that_is_no_number_gives_no_number():
    w = torch.tensor([float("nan")], requires_grad=True)
    assert math.isnan(sharpness(lambda: w.pow(3).sum(), [w]).value)
