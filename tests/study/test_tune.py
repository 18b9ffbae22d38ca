"""Tuning: equal budgets, validation only, resumable, the same whatever the number of jobs."""

import json
import math

import pytest
from small_studies import Silent, all_numbers, carry, tiny_study

from headwise.lab.comparing.tune import FACTOR, TRIAL_SEED
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.records import RunResult

METHODS = ("DropHead(p=0.3)", 'QKNorm(norm="rms")', "NeuTRENO(strength=0.5) + RelaxedAttention(gamma=0.4)")


def trials(out):
    return [json.loads((folder / "config.json").read_text()) for folder in sorted((out / "trials").iterdir())]


def test_every_arm_gets_the_same_number_of_trials_and_never_sees_the_test_split(tmp_path):
    log, listener = tmp_path / "log", Silent()
    study = tiny_study(methods=METHODS, epochs=1, log=str(log))
    carry(study, tmp_path / "out", listener=listener, trials=3)
    assert listener.plans == [(12, 0), (4, 0)]
    trained = log.read_text().split()
    # twelve trials, four final runs, and each arm once before them
    assert trained.count("train") == 12 + 4 + 4
    # only the four final runs ask for it
    assert trained.count("test") == 4 and "test" not in trained[: -4 * 3]
    ends = [order.configuration for order in listener.ends if order.configuration.purpose == "trial"]
    kinds = [tuple(method["name"] for method in configuration.methods) for configuration in ends]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        (): 3,
        ("DropHead",): 3,
        ("QKNorm",): 3,
        ("NeuTRENO", "RelaxedAttention"): 3,
    }
    assert {configuration.seed for configuration in ends} == {TRIAL_SEED}


def test_the_first_trial_is_the_written_setting_and_all_stay_in_range(tmp_path):
    study, listener = tiny_study(methods=METHODS[:1], epochs=1), Silent()
    carry(study, tmp_path, listener=listener, trials=6)
    tried = [
        (order.configuration.methods[0]["settings"]["p"], order.configuration.settings["learning_rate"])
        for order in listener.ends
        if order.configuration.purpose == "trial" and order.configuration.methods
    ]
    assert tried[0] == (0.3, 1e-3)
    assert all(len(set(searched)) == 6 for searched in zip(*tried, strict=True))
    # 4 × 0.3 is no probability: the range ends where the method refuses
    assert all(0.3 / FACTOR <= p <= 0.9 and 1e-3 / FACTOR <= rate <= 1e-3 * FACTOR for p, rate in tried)


def test_the_seeds_run_at_the_best_setting_on_validation(tmp_path):
    study = tiny_study(methods=METHODS[:1], epochs=2)
    results = carry(study, tmp_path, trials=4)
    found = [json.loads((folder / "result.json").read_text()) for folder in (tmp_path / "trials").iterdir()]
    for result in results:
        arm = [r for r in found if bool(r["config"]["methods"]) == bool(result["config"]["methods"])]
        best = max(r["metrics"]["validation/accuracy"] for r in arm)
        chosen = [r for r in arm if r["metrics"]["validation/accuracy"] == best]
        assert (result["arm"], result["config"]["settings"]) in [(r["arm"], r["config"]["settings"]) for r in chosen]
    described = json.loads((tmp_path / "study.json").read_text())
    assert described["arms"] == [result["arm"] for result in results]
    assert any(
        note.startswith("DropHead(p=0.3): 4 trials on validation chose DropHead(p=") for note in described["notes"]
    )
    assert all(r["metrics"]["test/accuracy"] is None for r in found)


def test_a_stopped_tuning_goes_on_to_the_same_choice(tmp_path, monkeypatch):
    import headwise.lab.engines.local as here

    study = tiny_study(methods=METHODS[:1], epochs=1)
    carry(study, tmp_path / "whole", trials=4)
    for stop_at in (1, 2, 3):
        carried, count = here.carry_out, [0]

        def carry_and_stop(order, tell, carried=carried, count=count, stop_at=stop_at):
            if count[0] == stop_at:
                raise KeyboardInterrupt
            count[0] += 1
            return carried(order, tell)

        with monkeypatch.context() as patch:
            patch.setattr(here, "carry_out", carry_and_stop)
            with pytest.raises(KeyboardInterrupt):
                carry(study, tmp_path / "stopped", trials=4)
    carry(study, tmp_path / "stopped", trials=4)
    assert [t["settings"] for t in trials(tmp_path / "stopped")] == [t["settings"] for t in trials(tmp_path / "whole")]
    assert all_numbers(tmp_path / "stopped") == all_numbers(tmp_path / "whole")


def test_a_trial_that_finished_but_was_not_written_down_is_not_run_again(tmp_path, monkeypatch):
    from headwise.lab.comparing.tune import Search

    study, told = tiny_study(epochs=1), Search.tell

    def stop(self, result):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Search, "tell", stop)
        with pytest.raises(KeyboardInterrupt):
            carry(study, tmp_path, trials=2)
    listener = Silent()
    carry(study, tmp_path, listener=listener, trials=2)
    assert Search.tell is told and len(trials(tmp_path)) == 2
    assert [order.configuration.purpose for order in listener.ends] == ["trial", "final"]


def test_arms_that_differ_only_in_what_is_searched_are_refused(tmp_path):
    study = tiny_study(methods=("DropHead(p=0.1)", "DropHead(p=0.2)"))
    with pytest.raises(
        StudyError, match=r"DropHead\(p=0.1\) and DropHead\(p=0.2\) differ only in what --tune searches"
    ):
        carry(study, tmp_path, trials=2)


def test_tuning_without_a_validation_split_needs_held_out_examples(tmp_path):
    study = tiny_study("Unseen", held_out=0)
    with pytest.raises(StudyError, match=r"tuning needs a validation split: .*held_out is 0 of 16"):
        carry(study, tmp_path, trials=1)


@pytest.mark.grid
def test_every_arm_is_chosen_from_the_same_trials_whatever_was_tried_before(tmp_path):
    study = tiny_study(methods=METHODS[:1], epochs=1)
    carry(study, tmp_path, trials=4)
    wider = study.model_copy(update={"methods": METHODS[:2]})
    # another study, for which the folder is free once its record is gone; the journal of the trials stays
    (tmp_path / "study.json").unlink()
    carry(wider, tmp_path, trials=1)
    described = json.loads((tmp_path / "study.json").read_text())
    # one trial is the written setting itself
    assert described["arms"] == ["baseline", *METHODS[:2]]
    assert [note for note in described["notes"] if "trial" in note] == [
        f"{arm}: 1 trial on validation chose {arm} with learning rate 0.001." for arm in ("baseline", *METHODS[:2])
    ]


class Told:
    """Return an arm that counts `trials` results, told one after the other."""

    def __init__(self, tmp_path, text, trials):
        import optuna
        from small_studies import ENVIRONMENT

        from headwise.lab.comparing.comparison import Comparison
        from headwise.lab.comparing.tune import Search
        from headwise.lab.engines.local import HereEngine

        study = tiny_study(methods=(text,), epochs=1)
        comparison = Comparison(study, tmp_path, HereEngine(), None, trials=trials, environment=ENVIRONMENT)
        self.arm = Search(comparison, optuna.storages.InMemoryStorage(), text)
        self.tried = []

    def tell(self, status, value):
        self.tried.append(self.arm.next_order().configuration)
        metrics = {"validation/accuracy": value}
        self.arm.tell(RunResult(status=status, arm="", seed=0, hash="", metrics=metrics))


@pytest.mark.parametrize("failure", [("diverged", 0.9), ("diverged", None), ("finished", math.nan)])
def test_a_trial_that_failed_is_the_worst_whatever_its_figure(tmp_path, failure):
    told = Told(tmp_path, "DropHead(p=0.3)", trials=3)
    for result in (failure, ("finished", 0.2), failure):
        told.tell(*result)
    choice, note = told.arm.best()
    assert choice.label == told.tried[1].arm and f"3 trials on validation chose {choice.label}" in note
    assert told.arm.next_order() is None


@pytest.mark.parametrize(
    ("text", "field"),
    [("Decorrelation(strength=1)", "strength"), ('Disagreement(on="position", strength=0.5)', "strength")],
)
def test_the_strength_is_searched_wherever_it_stands_and_however_it_is_written(tmp_path, text, field):
    told = Told(tmp_path, text, trials=3)
    for value in (0.1, 0.2, 0.3):
        told.tell("finished", value)
    values = [configuration.methods[0]["settings"][field] for configuration in told.tried]
    assert len(set(values)) == 3 and values[0] in (1.0, 0.5)


def test_two_writings_of_one_strength_are_refused_as_twins(tmp_path):
    study = tiny_study(methods=("Decorrelation(strength=1)", "Decorrelation(strength=2.0)"))
    with pytest.raises(StudyError, match="differ only in what --tune searches"):
        carry(study, tmp_path, trials=2)
