"""transformers.Trainer: one callback for methods, penalties and watching, with records where `report_to` says."""

from __future__ import annotations

import copy

import pytest
import torch
from test_trainer import rows, trainer
from tiny_models import FAMILIES

import headwise
from headwise import DropHead, EntropyPenalty

transformers = pytest.importorskip("transformers")

METHODS = (DropHead(p=0.5), EntropyPenalty(strength=0.5))
WATCHED = {"every": 1, "on_alert": None, "statistics": ["entropy_share"]}


def run(folder, model, callback, steps=4, resume=None, **settings):
    """Train with one callback, with a checkpoint after two steps; return the Trainer."""
    made = trainer(
        model, rows(4), folder, max_steps=steps, save_strategy="steps", save_steps=2, gradient_accumulation_steps=1,
        cls=lambda **options: transformers.Trainer(**options, callbacks=[callback]), **{"report_to": [], **settings},
    )  # fmt: skip
    made.train(resume_from_checkpoint=resume)
    return made


def events(folder):
    """Return by tag the steps and values of scalars, and by tag the steps of images, of all event files below a
    folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars, images = {}, {}
    for place in {path.parent for path in folder.rglob("events.out.tfevents.*")}:
        seen = EventAccumulator(str(place))
        seen.Reload()
        scalars |= {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}
        images |= {tag: [e.step for e in seen.Images(tag)] for tag in seen.Tags()["images"]}
    return scalars, images


def test_one_callback_trains_as_the_handle_does_reports_to_tensorboard_and_resumes(tmp_path, monkeypatch):
    plain = FAMILIES["Llama"].build().train()
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "whole" / "events"))
    whole, callback = copy.deepcopy(plain), headwise.HeadwiseCallback(*METHODS, watch=WATCHED, seed=3)
    run(tmp_path / "whole", whole, callback, report_to=["tensorboard"])

    by_hand = copy.deepcopy(plain)
    handle = headwise.regularize(by_hand, *METHODS, seed=3)
    trainer(by_hand, rows(4), tmp_path / "hand", handle, max_steps=4, gradient_accumulation_steps=1).train()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole.parameters(), by_hand.parameters()))
    assert not any(torch.allclose(a, b) for a, b in zip(whole.parameters(), plain.parameters()) if a.dim() == 2)

    scalars, images = events(tmp_path / "whole")
    site = callback.watch.records()[0]["site"]
    records = [r for r in callback.watch.records() if r["site"] == site]
    for step, value in scalars[f"train/health/entropy_share/{site}"]:
        found = [r["value"] for r in records if r["step"] == step]
        assert value == pytest.approx(sum(found) / len(found))
    assert [step for step, _ in scalars[f"train/health/entropy_share/{site}"]] == [0, 1, 2, 3]
    assert images["health/map/entropy_share"] == [0, 1, 2, 3] and "train/loss" in scalars

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "resumed" / "events"))
    resumed, callback = copy.deepcopy(plain), headwise.HeadwiseCallback(*METHODS, watch=WATCHED, seed=3)
    kept = str(tmp_path / "whole" / "checkpoint-2")
    run(tmp_path / "resumed", resumed, callback, resume=kept, report_to=["tensorboard"])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole.parameters(), resumed.parameters()))
    again, _ = events(tmp_path / "resumed")
    tag = f"train/health/entropy_share/{site}"
    assert again[tag] == [(step, pytest.approx(value, abs=1e-5)) for step, value in scalars[tag][2:]]


def test_draws_that_follow_torchs_generators_resume(tmp_path):
    plain = FAMILIES["Llama"].build().train()

    def trained(name, draws, resume=None):
        model, callback = copy.deepcopy(plain), headwise.HeadwiseCallback(DropHead(p=0.5), draws=draws)
        run(tmp_path / name, model, callback, resume=resume)
        assert callback.regularized.state()["draws"] == draws
        return list(model.parameters())

    whole, counted = trained("whole", "torch"), trained("counted", "counter")
    resumed = trained("resumed", "torch", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, resumed))
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, counted))


def test_a_callback_that_comes_too_late_is_refused_with_the_remedy(tmp_path):
    late = trainer(FAMILIES["Llama"].build(), rows(1), tmp_path)
    late.add_callback(headwise.HeadwiseCallback(*METHODS))
    with pytest.raises(RuntimeError, match=r"added after the Trainer was made: .*callbacks=\[HeadwiseCallback"):
        late.train()


def searching(folder, callback, make=None, **options):
    """Return a Trainer that makes its models itself."""
    made = []

    def model_init(trial=None):
        torch.manual_seed(0)
        made.append(make() if make else FAMILIES["Llama"].build().train())
        return made[-1]

    one = trainer(None, rows(2), folder, max_steps=2, gradient_accumulation_steps=1, cls=lambda model, **given: (
        transformers.Trainer(model_init=model_init, callbacks=[callback], **given, **options)
    ))  # fmt: skip
    return one, made


def test_each_model_that_the_trainer_makes_is_regularized_and_its_penalties_count_once(tmp_path):
    callback = headwise.HeadwiseCallback(*METHODS, watch=WATCHED, seed=3)
    one, made = searching(tmp_path / "made", callback)
    one.train()
    handles = [headwise.handle(model) for model in made]
    assert len(made) == 2 and callback.regularized is handles[1] and one.model is made[1]
    assert [handle.step for handle in handles] == [0, 2]
    assert len(callback.watch.records()) > 0
    one.train()
    assert [handle.step for handle in map(headwise.handle, made)] == [0, 2, 2]

    torch.manual_seed(0)
    given, alone = FAMILIES["Llama"].build().train(), headwise.HeadwiseCallback(*METHODS, seed=3)
    trainer(given, rows(2), tmp_path / "given", max_steps=2, gradient_accumulation_steps=1,
        cls=lambda **options: transformers.Trainer(**options, callbacks=[alone])).train()  # fmt: skip
    for model in made[1:]:
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), given.parameters(), strict=True))
    for model in (*made, given):
        headwise.handle(model).remove()


def test_a_hyperparameter_search_regularizes_the_model_of_each_trial(tmp_path):
    pytest.importorskip("optuna")
    callback = headwise.HeadwiseCallback(headwise.GatedOutput(), EntropyPenalty(strength=0.5))
    one, made = searching(tmp_path, callback, eval_dataset=rows(2))
    best = one.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
        n_trials=2, backend="optuna", direction="minimize",
    )  # fmt: skip
    assert best.hyperparameters["learning_rate"] > 0
    handles = [headwise.handle(model) for model in made]
    assert [handle.step for handle in handles] == [0, 2, 2]
    for handle in handles:
        handle.remove(discard=True)


@pytest.mark.parametrize("method", [headwise.SigmaReparam(), headwise.GatedOutput(), DropHead(p=0.2)], ids=repr)
def test_a_checkpoint_is_loaded_with_its_methods(method, tmp_path):
    callback = headwise.HeadwiseCallback(method, seed=3)
    model = FAMILIES["Llama"].build().train()
    run(tmp_path, model, callback, steps=2)
    again = FAMILIES["Llama"].build()
    handle = headwise.load_pretrained(again, tmp_path / "checkpoint-2")
    assert handle.methods == [method] and handle.step == 2 and handle.shared.seed == 3
    theirs = again.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    for one in (handle, callback.regularized):
        one.remove(discard=True)


def test_the_trainers_own_loss_function_is_the_base(tmp_path):
    calls = []

    def base(outputs, labels, num_items_in_batch=None):
        calls.append(num_items_in_batch)
        return 0.0 * outputs["logits"].sum()

    model, callback = FAMILIES["Llama"].build().train(), headwise.HeadwiseCallback(EntropyPenalty(strength=1.0))
    before = copy.deepcopy(model)
    cls = lambda **given: transformers.Trainer(**given, callbacks=[callback], compute_loss_func=base)
    trainer(model, rows(2), tmp_path, cls=cls).train()
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters())]
    assert calls and any(moved), "the penalty alone moves the weights"
    callback.regularized.remove()
