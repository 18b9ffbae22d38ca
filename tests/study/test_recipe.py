"""The recipe: its settings, the optimizers it builds, the learning rate of every step, decay by group."""

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from study.small_studies import carry, tiny_study
from torch import nn

import headwise
from headwise.lab.experiments.arm import read_arm, refuse_equal_arms
from headwise.lab.experiments.recipe import OPTIMIZERS, SCHEDULES, Recipe
from headwise.lab.experiments.task import Task
from headwise.lab.experiments.task_source import build_task
from headwise.lab.training.optimizer import _ATTACHED, BY_HEAD, KINDS, LARS, LearningRate, build_optimizer, share_at
from headwise_verdict.files.errors import StudyError

CPU = torch.device("cpu")


def encoder():
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd", "betas": (0.9, 0.98)}, "optimizer sgd has no betas. Its settings: momentum, nesterov"),
        ({"momentum": 0.9}, "optimizer adamw has no momentum. Its settings: betas, eps. Leave momentum out"),
        ({"final_learning_rate": 1e-5}, "schedule constant has no final_learning_rate. Its settings: none"),
        ({"optimizer": "adamx"}, "adamw.*lars"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Recipe(**settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_built_with_its_settings_and_moves_every_group(name):
    model = encoder()
    # these two fix norms, which leaves a decay nothing to do
    attention, mlp = 0.0 if name in _ATTACHED else 0.2, 0.0 if name == "muon-hyperball" else 0.3
    recipe = Recipe(
        optimizer=name, learning_rate=0.1, weight_decay=0.1, attention_weight_decay=attention, mlp_weight_decay=mlp
    )
    optimizer = build_optimizer(recipe, model, torch.randn(2, 3, 8), CPU)
    assert type(optimizer) is (headwise.Muon if name in BY_HEAD else KINDS[name])
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"attention": attention, "mlp": mlp, "undecayed": 0.0}
    for setting, value in recipe.optimizer_settings().items():
        # of muon each setting belongs to one of the two, and both have an eps
        kinds = [("betas" in g) == (setting in ("betas", "eps")) for g in optimizer.param_groups]
        asked = [g for g, own in zip(optimizer.param_groups, kinds, strict=True) if not name.startswith("muon") or own]
        assert asked and all(group[setting] == value for group in asked)
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(2, 3, 8)).square().sum().backward()
    optimizer.step()
    moved = [not torch.equal(before[k], v) for k, v in model.state_dict().items()]
    assert all(moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["cosine", "plateau"])
def test_parameters_that_methods_add_have_a_learning_rate_of_their_own(name, schedule):
    model, example = encoder(), torch.randn(2, 3, 8)
    handle = headwise.regularize(model, headwise.FeatScale(), example=example)
    decay = 0.0 if name in _ATTACHED else 0.01
    recipe = Recipe(optimizer=name, learning_rate=0.01, method_rate=20, schedule=schedule, warmup=2, weight_decay=decay)
    added = {id(parameter) for parameter in handle.parameters()}
    optimizer = build_optimizer(recipe, model, example, CPU, handle.parameters())
    rates = LearningRate(recipe, optimizer, steps=10)
    rates.before_step(0)
    for group in optimizer.param_groups:
        kinds = {id(parameter) in added for parameter in group["params"]}
        assert len(kinds) == 1
        assert group["lr"] == pytest.approx(0.1 if kinds == {True} else 0.005)
    assert rates.value == pytest.approx(0.005)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len([*model.parameters()])
    alike = recipe.model_copy(update={"method_rate": 1.0})
    same = build_optimizer(alike, model, example, CPU, handle.parameters())
    assert {group["lr"] for group in same.param_groups} == {0.01}


def test_plateau_keeps_the_ratio_of_rates_where_torch_skips_a_tiny_reduction():
    model, example = encoder(), torch.randn(2, 3, 8)
    handle = headwise.regularize(model, headwise.FeatScale(), example=example)
    recipe = Recipe(learning_rate=1e-3, method_rate=50, schedule="plateau", patience=0, factor=0.1)
    optimizer = build_optimizer(recipe, model, example, CPU, handle.parameters())
    rates = LearningRate(recipe, optimizer, steps=100)
    rates.before_step(0)
    for epoch in range(12):
        rates.after_epoch(epoch, 1.0)
        assert {round(group["lr"] / rates.value, 6) for group in optimizer.param_groups} == {1.0, 50.0}
    assert rates.value < 2e-8
    again = LearningRate(recipe, build_optimizer(recipe, model, example, CPU, handle.parameters()), steps=100)
    again.load_state(rates.state())
    assert [g["lr"] for g in again._optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("arm", ["baseline", "DropHead(p=0.1)", "XSA()", "SpectralNorm()"])
def test_a_rate_for_parameters_that_no_method_adds_is_refused(arm, tmp_path):
    with pytest.raises(StudyError, match="no method of the arm adds parameters, so that method_rate changes nothing"):
        carry(tiny_study(methods=(f"{arm} | method_rate=10",)), tmp_path)


def test_a_rate_that_changes_nothing_makes_no_other_arm():
    task = tiny_study().task
    equal = [read_arm(text, task) for text in ("FeatScale()", "FeatScale() | method_rate=1")]
    with pytest.raises(StudyError, match="same arm"):
        refuse_equal_arms(equal, task)


def test_a_decay_for_weights_that_are_not_there_is_refused_and_a_common_one_is_not():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(StudyError, match=r"attention_weight_decay=0\.5.*no attention layer"):
        build_optimizer(Recipe(attention_weight_decay=0.5), plain, torch.randn(2, 4), CPU)
    groups = build_optimizer(Recipe(), plain, torch.randn(2, 4), CPU).param_groups
    assert [(g["name"], len(g["params"]), g["weight_decay"]) for g in groups] == [
        ("other", 2, 0.01),
        ("undecayed", 2, 0),
    ]


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_follows_its_formula_and_leaves_vectors_to_sgd(nesterov):
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4))
    rate, decay, trust, momentum = 0.5, 0.1, 0.02, 0.9
    lars = LARS([matrix, vector], lr=rate, momentum=momentum, trust=trust, weight_decay=decay, nesterov=nesterov)
    twin = nn.Parameter(vector.detach().clone())
    sgd = torch.optim.SGD([twin], lr=rate, momentum=momentum, weight_decay=decay, nesterov=nesterov)
    expected, summed = matrix.detach().clone(), torch.zeros(3, 4)
    for _ in range(3):
        gradients = torch.randn(3, 4), torch.randn(4)
        matrix.grad, vector.grad = gradients
        twin.grad = gradients[1].clone()
        local = trust * expected.norm() / (gradients[0].norm() + decay * expected.norm())
        step = rate * local * (gradients[0] + decay * expected)
        summed = momentum * summed + step
        expected = expected - (momentum * summed + step if nesterov else summed)
        lars.step()
        sgd.step()
    torch.testing.assert_close(matrix.detach(), expected)
    torch.testing.assert_close(vector.detach(), twin.detach())


def test_lars_moves_weights_that_are_all_zero():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.1).step()
    assert torch.equal(weight.detach(), torch.full((2, 2), -0.1))


def rates(recipe, steps, optimizer=None):
    optimizer = optimizer or torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=recipe.learning_rate)
    rate, found = LearningRate(recipe, optimizer, steps), []
    for step in range(steps):
        rate.before_step(step)
        found.append(rate.value)
    return found


def torchs(scheduler, steps, rate, **settings):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=rate)
    made, found = scheduler(optimizer, **settings), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_the_schedules_agree_with_torchs_own():
    from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

    cosine = Recipe(learning_rate=0.2, schedule="cosine", final_learning_rate=0.05)
    assert rates(cosine, 10) == pytest.approx(torchs(CosineAnnealingLR, 10, 0.2, T_max=10, eta_min=0.05))
    linear = Recipe(learning_rate=0.2, schedule="linear", final_learning_rate=0.05)
    settings = {"start_factor": 1.0, "end_factor": 0.25, "total_iters": 10}
    assert rates(linear, 10) == pytest.approx(torchs(LinearLR, 10, 0.2, **settings))
    assert rates(Recipe(learning_rate=0.2), 3) == [0.2] * 3


def test_warm_up_ends_at_the_full_rate_whether_it_is_steps_or_a_share():
    by_steps = rates(Recipe(learning_rate=1.0, warmup=4, schedule="linear"), 8)
    assert by_steps == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])
    assert rates(Recipe(learning_rate=1.0, warmup=0.5, schedule="linear"), 8) == by_steps
    root = rates(Recipe(learning_rate=1.0, warmup=4, schedule="inverse_sqrt"), 16)
    assert root[3] == 1 and root[15] == pytest.approx(0.5)
    assert share_at(Recipe(schedule="inverse_sqrt"), 3, 8) == pytest.approx(math.sqrt(1 / 4))


def test_plateau_lowers_the_rate_when_the_loss_stays_and_goes_on_from_its_state():
    recipe = Recipe(learning_rate=1.0, schedule="plateau", patience=1, factor=0.5, warmup=2)

    def run(losses, state=None):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        rate, found = LearningRate(recipe, optimizer, 100), []
        first = 0
        if state is not None:
            rate.load_state(state)
            first = 10
        for epoch, loss in enumerate(losses):
            rate.before_step(first + epoch)
            found.append(rate.value)
            rate.after_epoch(first + epoch + 1, loss)
        return found, rate.state()

    losses = [9, 8, 7, 7, 7, 7, 7, 7]
    whole, _ = run(losses)
    assert whole == [0.5, 1, 1, 1, 1, 0.5, 0.5, 0.25]
    import json

    begun, state = run(losses[:5])
    rest, _ = run(losses[5:], json.loads(json.dumps(state)))
    assert begun + rest == whole


def test_every_schedule_has_its_settings_in_the_recipe():
    for table in (OPTIMIZERS, SCHEDULES):
        assert {name for settings in table.values() for name in settings} <= set(Recipe.model_fields)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs: Input should be greater than or equal to 1"),
        ({"learning_rate": -1.0}, "learning_rate: Input should be greater than 0"),
        ({"schedule": "cosin"}, "schedule: Input should be 'constant', 'cosine'"),
    ],
)
def test_a_task_with_defaults_of_its_own_keeps_the_limits(settings, message):
    class Own(Task):
        epochs: int = 2
        learning_rate: float = 0.1
        schedule: str = "linear"

        def model(self):
            raise NotImplementedError

        def data(self, split):
            raise NotImplementedError

    with pytest.raises(StudyError, match=message):
        build_task(Own, settings)


def test_muon_moves_hidden_matrices_and_adamw_the_rest_as_the_two_would_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 8), *encoder(), nn.Linear(8, 3))
    twin, tokens = copy.deepcopy(model), torch.randint(5, (2, 3))
    both = build_optimizer(Recipe(optimizer="muon", learning_rate=0.01, weight_decay=0.1), model, tokens, CPU)
    hidden = [p for name, p in twin.named_parameters() if p.ndim == 2 and name.startswith("1.")]
    named = [name for name, p in twin.named_parameters() if any(p is one for one in hidden)]
    assert named == [
        "1.self_attn.in_proj_weight",
        "1.self_attn.out_proj.weight",
        "1.linear1.weight",
        "1.linear2.weight",
    ]
    rest = [p for p in twin.parameters() if not any(p is one for one in hidden)]
    vectors = [p for p in rest if p.ndim < 2]
    alone = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([p for p in rest if p.ndim == 2], lr=0.01, weight_decay=0.1),
        torch.optim.AdamW(vectors, lr=0.01, weight_decay=0.0),
    ]
    for step in range(3):
        for net, optimizers in ((model, [both]), (twin, alone)):
            net.zero_grad()
            net(tokens).square().sum().backward()
            for one in optimizers:
                one.step()
        if step == 1:
            both.load_state_dict(copy.deepcopy(both.state_dict()))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_muon_without_a_matrix_of_its_own_is_refused():
    with pytest.raises(StudyError, match=r"optimizer=muon moves the matrices of attention layers.*Use optimizer=adamw"):
        build_optimizer(Recipe(optimizer="muon"), nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), CPU)


@pytest.mark.parametrize("name", BY_HEAD)
def test_an_optimizer_by_head_in_a_model_without_attention_is_refused(name):
    with pytest.raises(StudyError, match=f"optimizer={name}: Muon moves the matrices of attention.*has none"):
        build_optimizer(Recipe(optimizer=name), nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), CPU)


@pytest.mark.parametrize("name", _ATTACHED)
def test_a_decay_of_weights_whose_size_is_fixed_is_refused(name):
    with pytest.raises(StudyError, match=rf"optimizer={name}: .*weight_decay=0\.01 cannot change: set it to 0"):
        build_optimizer(Recipe(optimizer=name), encoder(), torch.randn(2, 3, 8), CPU)
