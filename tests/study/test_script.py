"""A training script as a study: its arms, what it tells, how it fails, how it goes on, and whether its runs are
pairs."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from small_studies import Silent, carry
from test_engines import headwise, wait_for

from headwise.lab.comparing.choosing import choose_study, started
from headwise.lab.comparing.request import Request, check
from headwise.lab.engines.remote_runs import MetricStreams
from headwise.lab.engines.slurm_cluster import SlurmEngine
from headwise.lab.engines.slurm_options import SlurmOptions
from headwise.lab.experiments.script import command_line, given_arguments
from headwise.lab.files.script_run import Told
from headwise.lab.training import script_process
from headwise.lab.training.job import ScriptOrder
from headwise.lab.training.script_process import last_lines, raised_in
from headwise.lab.training.script_result import Telling
from headwise.lab.training.script_run import Run
from headwise_verdict.files.errors import StudyError
from headwise_verdict.reporting import write
from headwise_verdict.reporting.export import figures as drawn
from headwise_verdict.reporting.numbers import study_of_numbers
from headwise_verdict.results.analysis import analyse

SCRIPT = Path(__file__).with_name("scripted.py")
COMMAND = f"{sys.executable} {SCRIPT}"
ARM = "baseline | lr=0.3"


def request_of(command=COMMAND, methods=(ARM,), **changes):
    given = {"seeds": 1, "outcomes": ("accuracy:higher",)} | changes
    return Request(script=command, methods=tuple(methods), **given)


def carry_script(out, command=COMMAND, methods=(ARM,), engine=None, listener=None, options=None, **changes):
    request = request_of(command, methods, **changes)
    check(request)
    more = {
        "script": started(request),
        "trials": request.trials,
        "require_pairs": request.require_pairs,
        "rehearse": request.plan,
    } | (options or {})
    return carry(choose_study(request), out, engine, listener, **more)


def figures(results):
    return {(result["arm"], result["seed"]): result["metrics"]["test/accuracy"] for result in results}


@pytest.fixture(autouse=True)
def source(monkeypatch):
    """Let the script find headwise and the tests' modules, whatever folder it is started in."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def test_arms_are_arguments_and_every_run_is_kept_like_any_other(tmp_path):
    results = carry_script(tmp_path, seeds=2)
    found = figures(results)
    assert [found[ARM, seed] - found["baseline", seed] for seed in (0, 1)] == pytest.approx([0.2, 0.2])
    assert found["baseline", 0] != found["baseline", 1]
    (folder,) = (
        path.parent
        for path in tmp_path.glob("runs/*/result.json")
        if '"baseline | lr=0.3"' in path.read_text() and '"seed": 1' in path.read_text()
    )
    assert json.loads((folder / "config.json").read_text())["settings"]["lr"] == 0.3
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and all(line["metrics"]["train/loss"] > 0 for line in lines)
    assert "step 4 of baseline | lr=0.3" in (folder / "output.log").read_text()
    # nothing runs twice
    before = folder.stat().st_mtime_ns, (folder / "result.json").stat().st_mtime_ns
    assert figures(carry_script(tmp_path, seeds=2)) == found
    assert before[1] == (folder / "result.json").stat().st_mtime_ns


def test_outcomes_have_the_names_that_trackers_give_them(tmp_path):
    carry_script(tmp_path, COMMAND + " --wrong slash", seeds=2, outcomes=("eval/loss:lower:nats", "val acc@1:higher"))
    write(tmp_path)
    analysis = analyse(tmp_path)
    assert list(analysis.outcomes) == ["test/eval/loss", "test/val acc@1"]
    assert [one.label for one in analysis.outcomes.values()] == ["eval/loss", "val acc@1"]
    assert analysis.metric.unit == "nats" and analysis.metric.higher_is_better is False
    assert analysis.compared[0].differences["test/eval/loss"].mean == pytest.approx(0.2)
    assert not study_of_numbers(tmp_path / "runs.csv", ["eval/loss:lower:nats"], "baseline", tmp_path / "table")


def test_an_outcome_is_found_by_the_name_that_a_trainer_prints(tmp_path):
    """`evaluate` prints eval_accuracy, and the callback records accuracy."""
    carry_script(tmp_path, seeds=2, outcomes=("eval_accuracy:higher",))
    write(tmp_path)
    analysis = analyse(tmp_path)
    assert analysis.metric.label == "eval accuracy" and analysis.compared[0].differences["test/eval_accuracy"].n == 2


def test_the_report_of_a_script_names_what_it_has(tmp_path):
    carry_script(tmp_path, COMMAND + " --steps 8", seeds=2)
    write(tmp_path)
    # of the page without the code of its charts
    page = re.sub(
        r"<script(?! type=.application/json).*?</script>", "", (tmp_path / "report.html").read_text(), flags=re.S
    )
    curves = next(chart for name, chart in drawn(tmp_path).items() if name.startswith("learning-curve"))
    points = {row["x"] for rows in curves["datasets"].values() for row in rows if "split" in row}
    assert points == set(range(1, 9)) and '"title": "step"' in json.dumps(curves) and "epoch" not in json.dumps(curves)
    assert "Mean over seeds of every step" in page and "its steps (metrics.jsonl)" in page
    assert "baseline, train" in page and "validation" not in re.sub("divergence_.*", "", page)
    assert ">memory<" not in page and ">time per step<" in page
    lines = (tmp_path / "epochs.csv").read_text().splitlines()
    assert lines[0].startswith("arm,seed,run,point,phase,step,") and len(lines) == 1 + 4 * 8
    assert "| time per step | runs |" in (tmp_path / "table.md").read_text()


def test_a_name_that_is_no_keyword_is_asked_for_as_python_writes_it(tmp_path):
    with pytest.raises(StudyError, match=r"Call run\.record\(\*\*\{'eval/f1': \.\.\.\}\), or change --outcome"):
        carry_script(tmp_path, COMMAND + " --wrong slash", outcomes=("eval/f1:higher",))


@pytest.mark.parametrize(
    ("form", "words", "environment"),
    [
        ("argparse", ["train.py", "--lr", "0.0003", "--opt.name", "sgd", "--amp"], {}),
        ("hydra", ["train.py", "lr=0.0003", "opt.name=sgd", "amp=true", "+note='a, b'"], {}),
        ("environment", ["train.py"], {"lr": "0.0003", "opt.name": "sgd", "amp": "true"}),
    ],
)
def test_changes_are_handed_over_in_the_form_that_was_asked_for(tmp_path, form, words, environment):
    settings = {
        "script": "train.py",
        "arguments": form,
        "divergence_factor": None,
        "lr": 3e-4,
        "opt.name": "sgd",
        "amp": True,
    } | ({"+note": "a, b"} if form == "hydra" else {})
    assert command_line(settings, tmp_path) == (words, environment)


def test_a_changed_yaml_file_is_a_copy_that_the_command_names(tmp_path, monkeypatch):
    yaml = pytest.importorskip("yaml")
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text("optim:\n  lr: 0.1\n  name: sgd\n")
    settings = {"script": "train.py --config=train.yaml", "arguments": "yaml:train.yaml", "optim.lr": 3e-4}
    words, _ = command_line(settings, tmp_path / "run")
    assert words[0] == "train.py" and words[1].startswith("--config=")
    assert yaml.safe_load(Path(words[1].partition("=")[2]).read_text()) == {"optim": {"lr": 3e-4, "name": "sgd"}}
    assert yaml.safe_load(Path("train.yaml").read_text())["optim"]["lr"] == 0.1
    with pytest.raises(StudyError, match=r"does not name train.yaml"):
        command_line(settings | {"script": "train.py"}, tmp_path / "run")


def test_what_a_command_gives_by_name_is_known():
    assert given_arguments("python t.py --lr 0.1 --amp --name=x optim.lr=2") == {
        "lr": "0.1",
        "name": "x",
        "optim.lr": "2",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcomes": ()}, "--script needs --outcome: .*--outcome accuracy:higher"),
        ({"outcomes": ("accuracy",)}, "'accuracy' does not say which direction is good"),
        ({"outcomes": ("a:higher", "a:lower")}, "--outcome a is given twice"),
        ({"methods": ()}, "there is nothing to compare. Give arms: --method"),
        ({"command": "python nowhere.py"}, "names nowhere.py, which does not exist in"),
        ({"command": "python 'a.py"}, "No closing quotation. Close the quote"),
        ({"arguments": "toml"}, "--arguments 'toml' is not known. Forms: argparse, hydra, environment, yaml:PATH"),
        ({"epochs": 3}, r"--epochs applies to tasks only. A script takes its own arguments"),
        ({"task": "a.py:B"}, "two ways to say what is trained"),
        ({"methods": ("baseline | script=x",)}, "has no setting 'script'"),
        ({"timeout": 0.0}, "--timeout 0: give seconds above 0"),
        ({"processes": 2}, "a script starts its own processes: .*torchrun"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(tmp_path, changes, message):
    with pytest.raises(StudyError, match=message):
        carry_script(tmp_path, **changes)
    assert not (tmp_path / "runs").exists()


def test_options_of_scripts_are_refused_of_tasks():
    with pytest.raises(StudyError, match="--outcome, --require-pairs belongs to --script"):
        check(Request(task="a.py:B", outcomes=("a:higher",), require_pairs=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nothing", r"it ended without an outcome. Call run.record\(accuracy=...\).*step 4 of"),
        ("twice", r"exit code 1: ValueError: run.record\(.*called twice.* \(line \d+ of scripted.py, in <module>\)"),
        ("nan", r"exit code 1: ValueError: run.record\(accuracy=nan\) cannot be compared"),
        (
            "other",
            r"it recorded test/f1, and the study asks for test/accuracy. Call run.record\(accuracy=...\), or change "
            r"--outcome",
        ),
        ("exits", r"exit code 1. Its last lines \(.*output.log\):.*step 4 of .*the disk of the script is on fire"),
    ],
)
def test_a_script_that_fails_is_told_with_its_last_lines_and_nothing_is_lost(tmp_path, wrong, message):
    with pytest.raises(StudyError, match=rf"(?s)baseline \| wrong={wrong}, seed 0, could not continue: .*{message}"):
        carry_script(tmp_path, methods=(f"baseline | wrong={wrong}", ARM))
    assert {json.loads(path.read_text())["arm"] for path in tmp_path.glob("runs/*/result.json")} == {"baseline", ARM}


def test_every_outcome_that_is_asked_for_is_recorded(tmp_path):
    outcomes = ("accuracy:higher", "f1:higher")
    with pytest.raises(StudyError, match=r"it recorded test/accuracy, test/loss, and the study asks for test/f1. Call"):
        carry_script(tmp_path, outcomes=outcomes)


def test_runs_that_fail_alike_are_told_once_and_the_others_are_not_tried(tmp_path):
    with pytest.raises(StudyError) as caught:
        carry_script(tmp_path, f"{COMMAND} --wrong nan", seeds=6)
    told = str(caught.value)
    assert "(the same in 2 other runs) Its last lines (" in told and told.count("Its last lines") == 1
    assert "3 runs failed" in told and str(tmp_path / "failures.log") in told
    assert (tmp_path / "failures.log").read_text().count("Its last lines") == 3
    assert len(list(tmp_path.glob("runs/*"))) == 3


def test_what_a_process_of_a_launcher_raised_is_the_cause():
    raised = ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", "MemoryError: no room"]
    other = [line.replace("Memory", "Connection").replace("no room", "reset") for line in raised]
    launcher = ["Traceback (most recent call last):", "torch.distributed.elastic.multiprocessing.ChildFailedError: "]
    ranks = [f"[rank0]: {line}" for line in raised] + [f"[rank1]: {line}" for line in other]
    assert raised_in(["step 1", *ranks, *launcher, "=====", "train.py FAILED"]) == (raised[-1], "\n".join(raised))
    # of an exception while another was handled, the last one ended the script
    assert raised_in([*raised, "", "During handling of the above exception:", "", *other])[0] == other[-1]
    assert raised_in(["nothing of the kind"]) == ("", "")


def test_configuration_files_that_the_command_names_are_part_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text("lr: 0.1\n")
    request = request_of(f"{COMMAND} --config=train.yaml")
    before, again = (choose_study(request).configurations()[0] for _ in range(2))
    Path("train.yaml").write_text("lr: 0.2\n")
    after = choose_study(request).configurations()[0]
    assert before.identity == again.identity != after.identity and list(after.data) == ["train.yaml"]


def test_a_script_that_hangs_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StudyError, match=r"(?s)printed and logged nothing for 6 s and was ended.*--timeout.*step 4 of"):
        carry_script(tmp_path / "out", methods=("baseline | wrong=spawns",), timeout=6.0)
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_loss_that_is_no_number_is_a_divergence_and_ends_the_run(tmp_path):
    diverges, normal = "baseline | wrong=diverges", "baseline"
    results = {result["arm"]: result for result in carry_script(tmp_path, methods=(diverges,))}
    assert results[diverges]["status"] == "diverged" and results[diverges]["divergence"]["step"] == 3
    assert results[diverges]["metrics"]["test/accuracy"] is None and results[normal]["status"] == "finished"


def test_a_loss_that_rose_too_far_diverges_by_the_studys_rule(tmp_path):
    settings = ("divergence_factor=1.0001", "divergence_smoothing=0")
    results = carry_script(tmp_path, f"{COMMAND} --steps 8", methods=("baseline | steps=40",), settings=settings)
    assert {result["status"] for result in results} == {"diverged"}
    assert results[0]["divergence"]["why"] == "loss rose"


def test_a_script_that_is_edited_while_the_study_runs_is_refused(tmp_path):
    script = tmp_path / "edited.py"
    script.write_text("import headwise\nheadwise.run().record(accuracy=1)\nopen(__file__, 'a').write('# again')\n")
    with pytest.raises(StudyError, match=r"edited.py changed while the study runs. Start the command again"):
        carry_script(tmp_path / "out", f"{sys.executable} {script}")


def test_a_killed_run_goes_on_and_ends_with_the_numbers_of_one_never_interrupted(tmp_path):
    killed = "baseline | wrong=killed"
    with pytest.raises(StudyError, match=r"ended by signal 9 \(9 often means: out of memory\)"):
        carry_script(tmp_path / "cut", methods=(killed,))
    cut = carry_script(tmp_path / "cut", methods=(killed,))
    whole = carry_script(tmp_path / "whole", methods=("baseline | wrong=whole",))
    assert [result["metrics"]["test/accuracy"] for result in cut] == [
        result["metrics"]["test/accuracy"] for result in whole
    ]
    assert cut[1]["steps"] == whole[1]["steps"] == 4 and cut[1]["epochs"] == 4
    # the first process showed two batches, and these are the same
    assert cut[1]["evidence"] == {key: whole[1]["evidence"][key] for key in ("data/1", "data/2")}


def test_a_study_that_is_stopped_ends_its_script_and_goes_on_where_it_was(tmp_path):
    script = f"{COMMAND} --steps 12"
    command = ["compare", "--script", script, "--method", ARM, "--outcome", "accuracy:higher"]
    command += ["--seeds", "1", "--no-rehearsal", "--out", str(tmp_path / "out")]
    # no script goes beyond its second step, however late the signal comes
    process = headwise(*command, env=os.environ | {"HOLD": "1"})
    wait_for(lambda: list(tmp_path.glob("out/runs/*/own/step.txt")) or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    (told,) = tmp_path.glob("out/runs/*/told/1.json")
    # the number is written after the script has started
    number = wait_for(lambda: json.loads(told.read_text()).get("process"))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 143 and "stopped; nothing is lost" in said, said
    assert not psutil.pid_exists(number) or psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    cut, _ = carry_script(tmp_path / "out", script)
    assert cut["steps"] == 12 and len(list(tmp_path.glob("out/runs/*/told/2.json"))) == 1


def test_a_sweep_is_of_an_argument():
    study = choose_study(request_of(methods=(), sweeps=("baseline | optim.weight-decay={0.1,0.01}",)))
    assert study.arms == ("baseline", "baseline | optim.weight-decay=0.01", "baseline | optim.weight-decay=0.1")


def test_damage_of_a_finished_run_is_seen_and_repaired(tmp_path):
    before = figures(carry_script(tmp_path))
    stream = next(tmp_path.glob("runs/*/metrics.jsonl"))
    stream.write_text(stream.read_text()[:-30])
    (stream.parent / "own" / "left").touch()
    listener = Silent()
    assert figures(carry_script(tmp_path, listener=listener)) == before
    assert any("metrics.jsonl is not what the run wrote; the run starts again" in said for said in listener.said)
    # no checkpoint of what was damaged is gone on with
    assert not (stream.parent / "own" / "left").exists()


def test_arms_that_saw_other_data_are_not_paired_and_are_judged_so(tmp_path):
    command = f"{COMMAND} --wrong order"
    carry_script(tmp_path, command, seeds=6)
    analysis = analyse(tmp_path)
    found = analysis.compared[0].differences["test/accuracy"]
    assert not found.paired and found.verdict_text == "better, not paired" and found.how.startswith("Welch's t")
    assert "is not paired with baseline (seed 0: their first batches differ)" in analysis.warnings[0]


def test_a_script_that_ignores_its_seed_has_no_verdict(tmp_path):
    carry_script(tmp_path, f"{COMMAND} --wrong seed", seeds=6)
    analysis = analyse(tmp_path)
    found = analysis.compared[0].differences["test/accuracy"]
    assert found.verdict == "undecided" and found.p_corrected is None
    assert found.copies == "seeds 0, 1, 2, 3, 4 and 5 have the same curve"
    assert analysis.warnings[0].startswith(f"baseline and {ARM}: seeds 0, 1, 2, 3, 4 and 5 have the same curve.")


def test_pairs_may_be_required(tmp_path):
    with pytest.raises(
        StudyError,
        match=r"lr=0.3 and baseline, seed 0, are not paired: their first batches differ. Seed the script with run.seed",
    ):
        carry_script(tmp_path, f"{COMMAND} --wrong order", require_pairs=True)


def test_pairs_shown_by_the_script_are_judged_as_pairs(tmp_path):
    carry_script(tmp_path, seeds=6)
    analysis = analyse(tmp_path)
    found = analysis.compared[0].differences["test/accuracy"]
    assert found.paired and found.verdict == "better" and found.mean == pytest.approx(0.2) and not analysis.warnings


def test_trials_are_judged_on_validation_alone(tmp_path):
    results = carry_script(tmp_path, f"{COMMAND} --lr 0.1", methods=("baseline | steps=5",), trials=3)
    study = json.loads((tmp_path / "study.json").read_text())
    trials = [json.loads(path.read_text()) for path in tmp_path.glob("trials/*/result.json")]
    assert len(trials) == 6 and all(trial["metrics"]["test/accuracy"] is None for trial in trials)
    assert len({trial["metrics"]["validation/accuracy"] for trial in trials}) > 2
    assert len(results) == 2 and "3 trials on validation chose" in study["notes"][0]


def test_a_search_without_a_learning_rate_is_refused(tmp_path):
    with pytest.raises(StudyError, match="--tune searches the learning rate, and the command of --script names none"):
        carry_script(tmp_path, methods=("baseline | steps=5",), trials=2)


def test_a_plan_starts_every_arm_and_ends_it_after_its_third_step(tmp_path):
    command = f"{COMMAND} --wrong slow --steps 300"
    trying, first, baseline, changed, *rest = planned(tmp_path, command, seeds=3)
    assert trying == "trying 2 arms for three steps before the first run ..."
    assert first == "plan:   6 runs, each arm tried for three steps" and "baseline | lr=0.3: " in changed
    told = " ".join(line.strip() for line in rest)
    assert re.fullmatch(
        r"time:   about [\d.]+ (min|h) in total if each run has 1,000 steps; run.regularize\(model, steps=N\) "
        r"gives the total for N",
        told,
    )
    assert "ms a step" in baseline and not (tmp_path / "runs").exists() and not (tmp_path / "study.json").exists()


def planned(out, command=COMMAND, **changes):
    listener = Silent()
    assert carry_script(out, command, listener=listener, options={"plan_only": True}, **changes) == []
    return listener.said


# it logs nothing, and keeps a checkpoint from which it would go on
QUIET = """
import torch, headwise
run = headwise.run()
torch.manual_seed(run.seed)
model = torch.nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
handle = run.regularize(model, steps=4000)
optimizer = torch.optim.AdamW(model.parameters())
if (run.folder / "done").exists():
    raise SystemExit("begun from a checkpoint of another start")
(run.folder / "done").touch()
for step in range(4000):
    (model(torch.randn(2, 3, 8)).square().mean() + handle.loss()).backward()
    optimizer.step()
    handle.after_step()
run.record(accuracy=0.5)
"""


FORGETS = """
import torch, headwise
run = headwise.run()
torch.manual_seed(run.seed)
model = torch.nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, batch_first=True)
handle = run.regularize(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(50):
    (model(torch.randn(2, 3, 8)).square().mean(){loss}).backward()
    optimizer.step(){after}
    run.log(step=step + 1, loss=1.0)
run.record(accuracy=0.5)
"""


@pytest.mark.parametrize(
    ("method", "loss", "after", "told"),
    [
        ("EntropyPenalty(strength=0.1)", "", "; handle.after_step()", r"regularized\.loss\(\) was never read"),
        ("QKClip(threshold=1.0)", " + handle.loss()", "", r"regularized\.after_step\(\) was not called"),
    ],
)
def test_a_forgotten_call_fails_before_the_study(tmp_path, method, loss, after, told):
    (tmp_path / "train.py").write_text(FORGETS.format(loss=loss, after=after))
    with pytest.raises(StudyError, match=rf"(?s){told}.*Nothing was trained"):
        carry_script(
            tmp_path / "out", f"{sys.executable} {tmp_path / 'train.py'}", methods=(method,), options={"rehearse": True}
        )
    assert not list((tmp_path / "out").glob("runs/*"))


@pytest.mark.grid
def test_a_script_that_logs_nothing_is_ended_after_its_third_step_and_its_minutes_are_told(tmp_path):
    script = tmp_path / "quiet.py"
    script.write_text(QUIET)
    for _ in range(2):
        said = planned(tmp_path / "out", f"{sys.executable} {script}", methods=("DropHead(p=0.5)",))
    assert re.search(r"DropHead\(p=0.5\): 1 layer, [\d.]+ ms a step, [\d.]+ (s|min) a run", said[3]), said
    assert re.search(r"time:   about [\d.]+ (s|min) of training", said[4]), said
    assert "record" not in "".join(path.read_text() for path in tmp_path.glob("out/rehearsal/*/told/*.jsonl"))


def test_a_script_that_shows_no_step_is_told_what_would(tmp_path):
    (tmp_path / "bare.py").write_text("import headwise\nheadwise.run().record(accuracy=0.5)\n")
    assert planned(tmp_path / "out", f"{sys.executable} {tmp_path / 'bare.py'}")[-2:] == [
        "time:   not known: no step was seen. run.log(step=..., loss=...) after each step",
        "        shows them",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", r"it ended and recorded nothing: it never called headwise.run\(\).*\n    hello"),
        ("import headwise; headwise.run()", r"it ended without an outcome. Call run.record\(accuracy=...\)"),
    ],
)
def test_a_script_that_tells_nothing_is_told_before_the_first_run(tmp_path, text, message):
    (tmp_path / "bare.py").write_text(text)
    listener = Silent()
    with pytest.raises(StudyError, match=rf"(?s)^baseline; {re.escape(ARM)}: {message}"):
        carry_script(
            tmp_path / "out", f"{sys.executable} {tmp_path / 'bare.py'}", listener=listener, options={"rehearse": True}
        )
    # a script without headwise is named before it trains to its end
    noted = any("does not mention headwise" in " ".join(said.split()) for said in listener.said)
    assert noted == ("headwise" not in text)


def test_a_plan_counts_what_is_left_and_takes_its_time_from_what_is_finished(tmp_path):
    carry_script(tmp_path)
    assert planned(tmp_path) == ["plan:   0 runs: all are finished"]
    said = planned(tmp_path, seeds=3)
    assert said[0] == "plan:   4 runs, as finished ones took" and "ms a step" in said[1]
    assert said[3].startswith("time:   about") and said[3].endswith("of training, without evaluations")


def test_a_plan_on_slurm_says_where_arms_can_be_tried(tmp_path):
    pytest.importorskip("submitit")
    listener, engine = Silent(), SlurmEngine(SlurmOptions(executor="local"), 2)
    assert carry_script(tmp_path, engine=engine, listener=listener, options={"plan_only": True}) == []
    said = " ".join(line.strip() for line in listener.said)
    assert said.startswith("plan:   2 runs; nothing was tried") and "without --engine and --slurm" in said


def test_a_long_silence_is_told_once_with_the_option_that_ends_one(tmp_path, monkeypatch):
    monkeypatch.setattr(script_process, "LONG_SILENCE", 0.3)
    listener = Silent()
    with pytest.raises(StudyError, match=r"nothing for 4 s and was ended"):
        carry_script(tmp_path, f"{COMMAND} --wrong hangs", timeout=4, listener=listener)
    one = [said for said in listener.said if said.startswith("baseline, seed 0, has been silent for 0.3 s.")]
    assert len(one) == 1 and "--timeout" not in one[0] and "output.log" in one[0]


def test_arms_that_begin_differently_with_one_seed_are_told_before_the_study(tmp_path):
    def told(command):
        listener = Silent()
        carry_script(tmp_path, command, listener=listener, options={"plan_only": True})
        return " ".join(" ".join(listener.said).split())

    said = told(f"{COMMAND} --wrong order")
    assert f"note: {ARM} and baseline do not start alike with the same seed: their first batches differ." in said
    assert "torch.manual_seed(run.seed)" in said
    assert "note:" not in told(COMMAND)


def test_an_arm_that_cannot_be_is_told_before_the_first_run(tmp_path):
    with pytest.raises(
        StudyError, match=r"(?s)^baseline \| wrong=early: it ended with exit code 1.*--wrong early.*Nothing was trained"
    ):
        carry_script(tmp_path, methods=("baseline | wrong=early",), options={"rehearse": True})


@pytest.mark.grid
def test_jobs_of_slurm_carry_out_a_script(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.LocalJob, "_results_timeout_s", 0)
    engine = SlurmEngine(SlurmOptions(executor="local"), 2)
    try:
        found = figures(carry_script(tmp_path / "slurm", engine=engine))
    finally:
        engine.close()
    assert found == figures(carry_script(tmp_path / "here"))


def test_a_cluster_tells_the_step_of_a_script(tmp_path):
    listener = Silent()
    carry_script(tmp_path, listener=listener)
    configurations = choose_study(request_of()).configurations()
    folders = {json.loads((path / "config.json").read_text())["arm"]: path for path in tmp_path.glob("runs/*")}
    order = ScriptOrder(configurations[0], folders["baseline"], "")
    streams = MetricStreams()
    (event,) = streams.progress(order)
    assert event["step"] == 4 and event["figures"]["loss"] > 0 and not list(streams.progress(order))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"step": None, "loss": 0.1},
            r"run.log\(step=None\): the step must be a whole number. Pass the optimizer step, counted from 1",
        ),
        ({"step": 1, "loss": "low"}, r"run.log\(loss=...\) got str, which is not a number. Pass one figure"),
    ],
)
def test_a_point_that_is_none_is_told_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        Told(None).log(given["step"], {"loss": given["loss"]})


def test_of_a_bar_the_last_state_is_shown(tmp_path):
    (tmp_path / "output.log").write_bytes(b"reading\n" + b"\r".join(b"%d%%" % at for at in range(99)) + b"\nno space\n")
    assert last_lines(tmp_path).endswith("\n    reading\n    98%\n    no space")


# make test holds the numbers of a script against those of the script alone: test_own_script.py
@pytest.mark.grid
def test_the_digits_study_as_a_script_gives_the_same_differences_to_the_bit(tmp_path):
    from headwise.lab.studies.digits import STUDY

    arm, sizes = "DropHead(p=0.4) + EntropyPenalty(strength=0.02)", {"epochs": 2, "train_size": 75, "test_size": 200}
    task = STUDY.task.model_copy(update=sizes)
    carry(STUDY.model_copy(update={"task": task, "methods": (arm,), "seeds": 1}), tmp_path / "task")
    command = f"{sys.executable} {SCRIPT.with_name('digits_script.py')} 2 75 200"
    carry_script(tmp_path / "script", command, methods=(arm,), outcomes=("accuracy:higher:%",))
    found = [analyse(tmp_path / name).compared[0].differences["test/accuracy"].by_seed for name in ("task", "script")]
    assert found[0] == found[1] and found[0]["0"] != 0


def terms(tmp_path, **more):
    path = tmp_path / "told" / "1.json"
    path.parent.mkdir(exist_ok=True)
    given = {"arm": "baseline", "seed": 3, "folder": str(tmp_path / "own"), "methods": []}
    path.write_text(json.dumps(given | more))
    return path


def told(path):
    stream = path.with_suffix(".jsonl")
    return [json.loads(line) for line in stream.read_text().splitlines()] if stream.exists() else []


def test_only_the_first_process_records(tmp_path, monkeypatch):
    path = terms(tmp_path)
    monkeypatch.setenv("RANK", "1")
    run = Run(Told(str(path)))
    run.saw([1.0])
    run.log(step=1, loss=0.5)
    run.record(accuracy=0.5)
    assert run.seed == 3 and not told(path)
    monkeypatch.setenv("RANK", "0")
    Run(Told(str(path))).record(accuracy=0.5)
    assert [line["told"] for line in told(path)] == ["begin", "record"]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({}, "got no figures"),
        ({"accuracy": float("inf")}, "cannot be compared"),
        ({"accuracy": "good"}, "which is not a number"),
    ],
)
def test_what_is_no_outcome_is_refused_where_it_is_recorded(figures, message):
    with pytest.raises(ValueError, match=message):
        Run(Told(None)).record(**figures)


def test_alone_a_script_is_the_baseline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Run(Told(None))
    assert (run.arm, run.seed, run.resumed, run.in_study) == ("baseline", 0, False, False)
    run.log(step=1, loss=0.1)
    run.record(accuracy=0.5)
    assert not list(tmp_path.iterdir())


def encoder():
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def dropping(tmp_path, arm="DropHead(p=0.5)"):
    return Run(Told(str(terms(tmp_path, arm=arm, methods=[{"name": "DropHead"}]))))


def test_the_arm_is_fitted_after_the_weights_were_fingerprinted(tmp_path):
    import torch

    run, model = dropping(tmp_path), encoder()
    handle = run.regularize(model)
    loss = model(torch.randn(2, 4, 16)).square().mean() + handle.loss()
    loss.backward()
    handle.after_step()
    run.record(accuracy=0.5)
    lines = {line["told"]: line for line in told(tmp_path / "told" / "1.json")}
    assert lines["regularized"]["layers"] == ["layers.0.self_attn", "layers.1.self_attn"] and "acted" in lines
    again = Run(Told(str(terms(tmp_path / "..", folder=str(tmp_path)))))
    again._told.path.with_suffix(".jsonl").unlink(missing_ok=True)
    plain = again.regularize(encoder())
    assert told(again._told.path)[-2]["digest"] == lines["weights"]["digest"]
    assert float(plain.loss()) == 0 and plain.parameters() == []


@pytest.mark.parametrize("fitted", [False, True])
def test_a_method_that_never_acted_fails_the_run_by_name(tmp_path, fitted):
    run = dropping(tmp_path)
    if fitted:
        run.regularize(encoder())
    with pytest.raises(RuntimeError, match=r"DropHead\(p=0.5\) was requested and never acted"):
        run.record(accuracy=0.5)


def test_an_arms_layers_are_those_of_the_script(tmp_path):
    run = dropping(tmp_path, "DropHead(p=0.5) @ 1")
    run.regularize(encoder())
    assert next(line for line in told(tmp_path / "told" / "1.json") if line["told"] == "regularized")["layers"] == [
        "layers.1.self_attn"
    ]
    with pytest.raises(StudyError, match=r"schedule.*run.regularize\(model, steps="):
        dropping(tmp_path, "DropHead(p=0 -> 0.5 over 20%)").regularize(encoder())


def test_weights_that_differ_in_one_number_have_another_digest():
    import torch

    from headwise.lab.training.script_run import of_weights

    one, other = encoder(), encoder()
    assert of_weights(one) == of_weights(other)
    with torch.no_grad():
        other.layers[1].linear2.bias[3] += 1e-6
    assert of_weights(one) != of_weights(other)


def test_a_watched_script_writes_the_health_of_its_heads(tmp_path):
    import torch

    from headwise_verdict.files.durable import read_lines

    health = tmp_path / "health.jsonl"
    run = Run(Told(str(terms(tmp_path, watch=True, health=str(health), watch_every=1))))
    model = encoder()
    run.regularize(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2, 3):
        model(torch.randn(2, 4, 16)).square().mean().backward()
        optimizer.step()
        run.log(step=step, loss=0.1)
    assert {record["step"] for record in read_lines(health) if "statistic" in record} == {0, 1, 2}
    run._watch.remove()


@pytest.mark.parametrize("arm", ["baseline", "DropHead(p=0.5)"])
def test_the_order_of_data_goes_on_from_a_checkpoint(tmp_path, arm):
    torch = pytest.importorskip("torch")
    batches = [torch.full((2, 3), float(n)) for n in range(9)]

    def start(number, **more):
        path = terms(tmp_path, arm=arm, **more).rename(tmp_path / "told" / f"{number}.json")
        run = Run(Told(str(path)))
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        return run, run.regularize(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False))

    def evidence():
        return {name: digest for name, digest in Telling(tmp_path).evidence().items() if name != "weights"}

    run, _ = start(1)
    for batch in batches:
        run.saw(batch)
    whole = evidence()
    assert list(whole) == ["data/1", "data/2", "data/4", "data/8"] and len(set(whole.values())) == 4

    # killed after five batches, the last checkpoint after three
    (tmp_path / "told" / "1.jsonl").unlink()
    run, handle = start(1)
    for batch in batches[:3]:
        run.saw(batch)
    kept = json.loads(json.dumps(handle.state()))
    for batch in batches[5:3:-1]:
        run.saw(batch)
    assert evidence()["data/4"] != whole["data/4"]
    run, handle = start(2, resumed=True, counts=False)
    handle.load_state(kept)
    for batch in batches[3:]:
        run.saw(batch)
    assert evidence() == whole

    # without that state, the number of a batch is not known
    run, _ = start(3, resumed=True, counts=False)
    run.saw(batches[8])
    assert evidence() == whole


def test_the_order_of_another_training_does_not_go_on_here(tmp_path):
    torch = pytest.importorskip("torch")
    run = Run(Told(str(terms(tmp_path))))
    handle = run.regularize(torch.nn.Linear(2, 2))
    handle.load_state({"step": 0, "order": {"count": 5, "digest": "x"}})
    run.saw([1.0])
    assert list(Telling(tmp_path).evidence()) == ["weights", "data/1"]
