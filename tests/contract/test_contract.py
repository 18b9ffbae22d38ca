"""The contract of every method on every host: neutral, strong, removal, folding, gradients, copies, state."""

import pytest
from grids import part_of_grid
from small_models import HOSTS, fresh

import headwise
from headwise.attend import methods as shelf
from headwise.attend.core.method import REGISTRY
from headwise.testing import check_method, contract, on_models
from headwise.testing.contract import CHECKS

OF_CALLS, OF_MODELS = ({check.__name__ for check in family} for family in (contract.OF_CALLS, contract.OF_MODELS))
NAMES = list(shelf.__all__)
# Where a method has no meaning and says so by name; everything else must fit.
MEANINGLESS = {(name, host) for name in ("FeatScale", "LSA") for host in ("own-causal", "llama", "llama-left-padded")}
# one of each kind: on weights, on logits, on values, on branches, penalties, with parameters, after each step
KEPT = (
    "DropHead",
    "DropKey",
    "NeuTRENO",
    "BranchDrop",
    "EntropyPenalty",
    "GatedOutput",
    "SigmaReparam",
    "QKClip",
    "LSA",
)
# hosts that every round of tests asks about each of them; the variants of these hosts, about two
WIDELY, VARIANTS = ("llama", "bert-padded", "torch"), ("DropKey", "NeuTRENO")
PAIRS = [(method, host) for method in NAMES for host in HOSTS if (method, host) not in MEANINGLESS]


def on(*hosts):
    """Pairs of every method with these hosts: each method on the first, one of each kind on the next, and two on their
    variants, in every round of tests."""
    pairs = [(method, host) for method, host in PAIRS if host in hosts]
    kept = [
        (method, host)
        for method, host in pairs
        if host == "own" or method in VARIANTS or (method in KEPT and host in WIDELY)
    ]
    return part_of_grid(pairs, kept)


@pytest.mark.parametrize(("name", "reason"), [("FeatScale", "causal"), ("LSA", "sees only itself")])
@pytest.mark.parametrize("host", ["own-causal", "llama"])
def test_a_method_without_meaning_says_why(host, name, reason):
    model = fresh(HOSTS[host])
    with pytest.raises(ValueError, match=reason):
        headwise.regularize(model, REGISTRY[name](), example=HOSTS[host].example())


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on(*HOSTS))
def test_a_neutral_setting_changes_nothing(name, host):
    on_models.neutral_changes_nothing(REGISTRY[name], HOSTS[host])


@pytest.mark.parametrize(("name", "host"), on(*HOSTS))
def test_a_strong_setting_visibly_acts(name, host):
    on_models.strong_setting_acts(REGISTRY[name], HOSTS[host])


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on(*HOSTS))
def test_removal_before_any_step_gives_back_the_same_bits_and_keys(name, host):
    on_models.removal_leaves_no_trace(REGISTRY[name], HOSTS[host])


@pytest.mark.parametrize(("name", "host"), on("own", "llama", "bert-padded", "torch"))
def test_every_gradient_is_finite_and_training_steps_work(name, host):
    on_models.training_steps_work(REGISTRY[name], HOSTS[host])


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on("own", "llama", "torch"))
def test_folding_keeps_the_bits_of_the_eval_model(name, host):
    on_models.folding_keeps_the_bits(REGISTRY[name], HOSTS[host])


@pytest.mark.bits
@pytest.mark.parametrize(("name", "host"), on("own", "llama", "torch"))
def test_a_deep_copy_and_a_state_dict_carry_everything(name, host):
    on_models.copied_models_stand_alone(REGISTRY[name], HOSTS[host])


# On call kinds and models that any method is checked on, autocast, losses, text and copies among them.
@pytest.mark.bits
@pytest.mark.parametrize("name", part_of_grid(NAMES, ("DropKey", "EntropyPenalty", "SigmaReparam", "LSA")))
def test_the_method_keeps_the_contract_that_strangers_are_asked_for(name):
    checked = check_method(REGISTRY[name])
    assert [one.name for one in checked] == [check for check in CHECKS if check != "compiles"]
    refused = {(one.name, model) for one in checked for model in one.refused if one.name in OF_MODELS}
    causal = {(check, "a causal model") for check in OF_MODELS - {"compiles"}}
    assert refused == (causal if (name, "own-causal") in MEANINGLESS else set())
    in_the_call = REGISTRY[name]().touches_call()
    # Both read the call, and stand on the weights of a layer, which a call alone has not.
    assert {one.name for one in checked if one.name in OF_CALLS and one.on} == (
        OF_CALLS if in_the_call and name not in ("QKClip", "QKRates") else set()
    )
