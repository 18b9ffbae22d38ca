"""What is written down of a run: heads on held-out data, divergence, costs, alerts, failures beside finished runs."""

import json
import math

import pytest
import torch
from small_studies import PLACE, Silent, all_numbers, carry, orders, study_of, tiny_study

from headwise.lab.comparing.claim_check import canonical_claims
from headwise.lab.experiments.task_source import load_task
from headwise.lab.training.course import Course
from headwise.lab.training.divergence import Smoothed
from headwise.lab.training.execution import execute
from headwise.study import Claim, ClaimTest
from headwise_verdict.files.errors import StudyError
from headwise_verdict.results.records import Divergence


def test_statistics_of_heads_on_held_out_examples_are_outcomes(tmp_path):
    import headwise

    names = ("attention_entropy", "token_cosine", "spectral_norm_qk")
    study = tiny_study(head_statistics=names, epochs=1)
    (order,) = orders(study, tmp_path)
    metrics = execute(order, lambda event: None).metrics
    heads = {name: value for name, value in metrics.items() if name.startswith("heads/")}
    # the same model, read by hand as watch reads it, in a training forward without its dropout
    from headwise.lab.training.checkpoint import load_checkpoint

    model = study.task.model()[1]
    tensors = load_checkpoint(order.folder, pytest.fail).tensors
    model.load_state_dict({k.removeprefix("model.1."): t for k, t in tensors.items() if k.startswith("model.1.")})
    watch = headwise.watch(model, every=1, statistics=list(names), on_alert=None)
    model.train()(study.task.data("test")[0])
    watch.step()
    read = watch.records()
    watch.remove()
    entropy = {(r["depth"], r["head"]): r["value"] for r in read if r["statistic"] == "attention_entropy"}
    for (depth, head), value in entropy.items():
        assert heads[f"heads/attention_entropy/layer {depth} head {head}"] == pytest.approx(value, rel=1e-5)
    assert heads["heads/attention_entropy/layer 1"] == pytest.approx((entropy[1, 0] + entropy[1, 1]) / 2)
    # little entropy is the worrying side, much likeness of tokens is
    assert heads["heads/attention_entropy/worst"] == pytest.approx(min(entropy.values()))
    cosine = [r["value"] for r in read if r["statistic"] == "token_cosine"]
    assert heads["heads/token_cosine/worst"] == pytest.approx(max(cosine), rel=1e-5)
    assert "heads/token_cosine/layer 0 head 0" not in heads and "heads/spectral_norm_qk/layer 0 head 1" in heads


def test_the_residual_stream_is_read_on_held_out_examples_too(tmp_path):
    study = tiny_study("Still", head_statistics=("stream_cosine", "final_cosine"), epochs=1)
    (order,) = orders(study, tmp_path)
    metrics = execute(order, lambda event: None).metrics
    from headwise.lab.training.checkpoint import load_checkpoint

    model, streams = study.task.model(), []
    tensors = load_checkpoint(order.folder, pytest.fail).tensors
    model.load_state_dict({k.removeprefix("model."): t for k, t in tensors.items() if k.startswith("model.")})
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: streams.append((args[0], output)))
    with torch.no_grad():
        model.eval()(study.task.data("test")[0])
    read = [streams[0][0], streams[1][0], streams[1][1]]
    cosines = []
    for tokens in read:
        unit = torch.nn.functional.normalize(tokens, dim=-1)
        pairs = unit @ unit.transpose(1, 2)
        count = tokens.shape[1]
        cosines.append(((pairs.sum((1, 2)) - count) / (count * (count - 1))).mean().item())
    names = ("stream_cosine/layer 0", "stream_cosine/layer 1", "final_cosine/layer 1")
    assert [metrics[f"heads/{name}"] for name in names] == pytest.approx(cosines, rel=1e-4)


@pytest.mark.parametrize("watch", [False, True])
def test_reading_heads_leaves_the_numbers_of_the_run(tmp_path, watch):
    found = []
    for names in ((), ("attention_entropy",)):
        study = tiny_study(methods=("DropHead(p=0.3)",), head_statistics=names)
        carry(study, tmp_path / str(len(names)), watch=watch)
        runs = all_numbers(tmp_path / str(len(names))).values()
        assert all(any("heads/" in k for k in r["metrics"]) == bool(names) for _, r in runs)
        found.append([({k: v for k, v in r["metrics"].items() if "heads/" not in k}, lines) for lines, r in runs])
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))


@pytest.mark.parametrize(
    ("losses", "step", "why"),
    [
        ([1.0, 0.5, 0.5, 0.9, 0.9], None, ""),
        ([1.0, 0.5, 0.5, 2.0, 2.0], 4, "loss rose"),
        ([1.0, 0.5, math.nan], 3, "not finite"),
        # a loss that may be negative has no factor over its minimum
        ([-1.0, -2.0, 5.0], None, ""),
    ],
)
def test_a_run_diverges_at_the_first_bad_step_however_its_losses_are_cut(losses, step, why):
    task = load_task(f"{PLACE}:Tiny")(divergence_factor=1.5, divergence_smoothing=0.5)
    whole = Smoothed().first_bad(task, losses, 10)
    cut, pieces = Smoothed(), None
    for at, loss in enumerate(losses):
        pieces = pieces or cut.first_bad(task, [loss], 10 + at)
    assert whole == pieces
    assert (whole.step - 10, whole.why) == (step, why) if step else whole is None


def test_by_default_only_a_loss_that_is_no_number_is_a_divergence():
    task = load_task(f"{PLACE}:Tiny")()
    assert Smoothed().first_bad(task, [0.001, 100.0], 0) is None
    assert Smoothed().first_bad(task, [0.001, math.inf], 5) == Divergence(step=7, detail="the loss was inf")


def test_a_rise_of_the_loss_ends_the_run_with_its_step_and_words(tmp_path):
    study = tiny_study(
        "Still", optimizer="sgd", learning_rate=30.0, epochs=4, divergence_factor=1.3, divergence_smoothing=0.5
    )
    (result,) = carry(study, tmp_path)
    assert result["status"] == "diverged" and result["divergence"]["why"] == "loss rose"
    assert "times its minimum" in result["divergence"]["detail"] and result["steps"] == result["divergence"]["step"]
    assert result["metrics"]["test/accuracy"] is None


def test_steps_to_a_goal_and_spikes_are_counted_by_hand_however_the_losses_are_cut():
    # 60 losses around 2, of which the 55th is a spike; then a fall below the goal
    losses = [2.0 + 0.01 * (at % 3) for at in range(60)]
    losses[54] = 3.0
    losses += [0.5] * 10
    smoothed, reached = losses[0], None
    for at, loss in enumerate(losses[1:], 2):
        smoothed = 0.8 * smoothed + 0.2 * loss
        reached = reached or (at if smoothed <= 1.0 else None)
    assert 60 < reached < 70
    for cut in (0, 30, 54, 65, 70):
        first, second = Course(1.0, 0.8), Course(1.0, 0.8)
        first.add(losses[:cut])
        second.load_state(json.loads(json.dumps(first.state())))
        second.add(losses[cut:])
        # of the seventy losses twenty have fifty before them
        assert second.outcomes() == {"training/steps_to_goal": reached, "training/spikes": 1000 * 1 / 20}
    early = Course(0.1, 0.8)
    early.add(losses[:40])
    assert early.outcomes() == {"training/steps_to_goal": 41}


def test_a_run_counts_its_steps_to_the_goal_and_a_claim_of_them_needs_one(tmp_path):
    study = tiny_study(
        methods=("DropHead(p=0.5)",), epochs=6, loss_goal=1.3, divergence_smoothing=0.5, learning_rate=0.03
    )
    counted = [result["metrics"]["training/steps_to_goal"] for result in carry(study, tmp_path)]
    steps = 6 * 5
    assert 1 < counted[0] <= steps and 1 < counted[1] <= steps + 1
    test = ClaimTest(arm="DropHead(p=0.5)", outcome="training/steps_to_goal", says="higher")
    claim = Claim(text="It is slower.", source="ours", tests=(test,))
    canonical_claims(study.model_copy(update={"claims": (claim,)}))
    aimless = tiny_study(methods=("DropHead(p=0.5)",)).model_copy(update={"claims": (claim,)})
    with pytest.raises(StudyError, match="needs a goal"):
        canonical_claims(aimless)


def test_operations_are_those_of_the_matrix_products_and_inference_takes_time(tmp_path):
    from headwise.lab.training.measuring import counter

    study = tiny_study(epochs=1)
    (result,) = carry(study, tmp_path)
    task = study.task
    model, batch = task.model(), task.data("train")[0][:8]
    with counter() as counted:
        model(batch)
    forward = counted.get_total_flops()
    # by hand, without attention's own products: patches, q, k, v, o and the MLP of two layers on five tokens, the head
    tokens, per_token = 8 * 5, 2 * (4 * 8 * 8 + 2 * 8 * 8)
    by_hand = 2 * (8 * 4 * 4 * 8 + tokens * per_token + 8 * 8 * 4)
    assert forward >= by_hand
    # backward is two products for each of forward's, but none for the gradient of the images
    assert 2.5 * forward < result["metrics"]["cost/flops_per_step"] <= 3.6 * forward
    assert result["metrics"]["cost/inference_seconds_per_example"] > 0


def test_costs_beside_parallel_runs_are_marked(tmp_path):
    from headwise.lab.engines.local import HereEngine

    class Beside(HereEngine):
        parallel = True

    marks = [
        carry(tiny_study(epochs=1), tmp_path / e.__name__, engine=e())[0]["cost_is_indicative"]
        for e in (HereEngine, Beside)
    ]
    assert marks == [False, True]


PARTLY = """
from tiny_task import Tiny
from headwise.study import Task

calls = []

class Partly(Task):
    epochs: int = 1
    batch_size: int = 8
    way: str = ""
    bears: int = 0
    log: str | None = None
    model, data = Tiny.model, Tiny.data
    def loss(self, output, targets):
        if self.way == "broken":
            calls.append(1)
            if len(calls) > self.bears:
                raise RuntimeError("the loss is broken")
        return Task.loss(self, output, targets)
"""


def test_a_failed_run_lets_the_others_finish_and_is_told_by_name(tmp_path):
    (tmp_path / "partly.py").write_text(PARTLY)
    # it bears the two batches of the rehearsal, which says of itself what breaks at once
    arms = ("baseline | way='broken', bears=2", "DropHead(p=0.2)")
    study, listener = study_of(f"{tmp_path / 'partly.py'}:Partly", arms, 2), Silent()
    with pytest.raises(
        StudyError,
        match=r"way=.?broken.?, seed 0, could not continue.*the loss is broken.*the same in 1 other run(.|\n)*2 runs "
        r"failed",
    ):
        carry(study, tmp_path / "out", listener=listener)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("out/runs/*/result.json")]
    assert sorted((r["arm"], r["seed"]) for r in results) == [
        ("DropHead(p=0.2)", 0),
        ("DropHead(p=0.2)", 1),
        ("baseline", 0),
        ("baseline", 1),
    ]
    told = [text for text in listener.said if "failed; the others continue: " in text]
    assert len(told) == 2 and all("the loss is broken" in text for text in told)


def test_what_breaks_at_once_is_told_with_its_arm_before_any_run(tmp_path):
    (tmp_path / "partly.py").write_text(PARTLY)
    study = study_of(f"{tmp_path / 'partly.py'}:Partly", ("baseline | way='broken'", "DropHead(p=0.2)"), 2)
    with pytest.raises(StudyError, match=r"the loss is broken(.|\n)*way=.?broken.? cannot be trained for one batch"):
        carry(study, tmp_path / "out", listener=Silent())
    assert not list(tmp_path.glob("out/runs/*/result.json"))


def test_where_every_run_fails_alike_the_rest_is_not_tried(tmp_path):
    (tmp_path / "partly.py").write_text(PARTLY)
    study, listener = study_of(f"{tmp_path / 'partly.py'}:Partly", (), 9, way="broken"), Silent()
    with pytest.raises(StudyError, match="3 runs failed"):
        carry(study, tmp_path / "out", listener=listener)


def test_study_json_says_which_metrics_evaluations_and_arms_there_are(tmp_path):
    carry(study_of(PLACE.replace("tiny_task.py", "core_tasks.py") + ":Segment", epochs=1), tmp_path)
    found = json.loads((tmp_path / "study.json").read_text())
    assert (found["primary"], found["arms"], found["evaluations"]) == (
        "test/miou",
        ["baseline"],
        ["train", "validation", "test"],
    )
    assert [(m["name"], m["failure"]) for m in found["metrics"]] == [("miou", 1 / 9), ("loss", None)]


def test_a_gradient_of_the_cost_changes_nothing_for_the_next_run(tmp_path):
    study = tiny_study(methods=("SigmaReparam()",), epochs=1)
    first, second = orders(study, tmp_path)
    execute(first, lambda event: None)
    before = torch.random.get_rng_state()
    again = execute(orders(study, tmp_path / "again")[1], lambda event: None)
    torch.random.set_rng_state(before)
    assert again.metrics["test/loss"] == execute(second, lambda event: None).metrics["test/loss"]
