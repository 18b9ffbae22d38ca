"""The command line: fast to start, an exact list of options, clear errors, a table at the end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_studies import PLACE, orders, tiny_study

from headwise_verdict.files import is_for_users

ROOT = Path(__file__).parents[2]


def asked(**changes):
    """Return a request as the command line makes it."""
    from headwise.lab.comparing.request import Request
    from headwise.lab.studies.registry import Installed

    return Request(studies=Installed(), **changes)


def headwise(*arguments, **options):
    command = [sys.executable, "-m", "headwise.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def here(*arguments):
    """Run the command in this process, where what it imports is there already."""
    from typer.testing import CliRunner

    from headwise.cli import app

    return CliRunner().invoke(app, list(map(str, arguments)))


def test_help_starts_without_the_heavy_libraries():
    heavy = ("torch", "pydantic", "rich.progress", "accelerate", "numpy", "optuna", "ray", "scipy", "sklearn")
    code = (
        "import sys; sys.argv = ['headwise', '--help']\nfrom headwise.cli import main\n"
        f"try: main()\nfinally: print('imported:', [name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "imported: []" in done.stdout, done.stdout + done.stderr


# make test asks which libraries it imports, above
@pytest.mark.grid
def test_help_takes_less_computing_than_importing_torch():
    def seconds(*arguments):
        code = f"import resource, subprocess, sys; subprocess.run([sys.executable, *{arguments!r}], stdout=-3);"
        code += "use = resource.getrusage(resource.RUSAGE_CHILDREN); print(use.ru_utime + use.ru_stime)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300).stdout)

    # the least of three: other work on the machine slows each
    ours, torch = (
        min(seconds(*what) for _ in range(3)) for what in (("-m", "headwise", "--help"), ("-c", "import torch"))
    )
    assert ours / torch < 0.7


OPTIONS = {
    "compare": "--arguments --compile --data --device --engine --epochs --graphs --help --jobs --json --method "
    "--no-rehearsal --out --outcome --plan --processes --ray-address --require-pairs "
    "--scale --script --seeds --set --slurm --sweep --task --test-size --timeout --train-size --tune --watch",
    "report": "--arm --baseline --export --help --json --out --outcome --seed-column --settings",
    "league": "--data --device --help --json --minutes --out --page --plan --premises --source --worlds",
    "methods": "--for --help",
    "studies": "--help --minutes --source",
    "alarms": "--help --json --map --run --step",
    "audit": "--fail-on --help --images --json --out --text",
    "judge": "--against --alpha --arguments --arm --baseline --bound --budget --calibrate --candidate --change "
    "--diverged --first-seed --floor --help --json --ledger --margin --markdown --metric --out --script --seed-column "
    "--step --target --timeout",
    "replay": "--help",
}


def test_the_command_line_does_not_grow():
    import typer.main

    from headwise.cli import app

    commands = typer.main.get_command(app).commands
    found = {
        name: " ".join(
            sorted({option for p in command.params for option in p.opts if option.startswith("-")} | {"--help"})
        )
        for name, command in commands.items()
    }
    assert found == OPTIONS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["compare", "digit"],
            r"there is no study 'digit'. Did you mean 'digits'\? `headwise studies` lists them; or give "
            r"FILE.py:STUDY, or --task FILE.py:CLASS",
        ),
        (["compare", "--engine", "dask"], "--engine 'dask' is not known. Engines: local, ray, slurm"),
        (["compare", "--graphs", "maybe"], "--graphs 'maybe' is not known. Choices: auto, on, off"),
        (["compare", "--graphs", "on", "--device", "cpu"], "--graphs on: CUDA graphs need a CUDA device"),
        (["compare", "--compile", "maybe"], "--compile 'maybe' is not known. Choices: off, step"),
        (
            ["compare", "--compile", "step", "--graphs", "on"],
            "--graphs on --compile step: a compiled step is not captured",
        ),
        (["compare", "--compile", "step", "--script", "python a.py"], "--compile step: a script takes its own steps"),
        (["compare", "--ray-address", "auto"], "--ray-address auto needs --engine ray"),
        (["compare", "--slurm", "partition=a"], "--slurm partition=a needs --engine slurm"),
        (
            ["compare", "--engine", "slurm", "--slurm", "partitoin=a"],
            "no option 'partitoin'. Did you mean 'partition'. Options: executor, name, timeout_min",
        ),
        (["compare", "--out", __file__], "test_cli.py is a file. Choose a folder"),
        (["compare", "--data", __file__], "--data .*test_cli.py .*is a file. Choose the folder of the data set"),
        (["compare", "digits", "--task", f"{PLACE}:Tiny"], "digits is a study and --task .*: pass one of the two"),
    ],
)
def test_a_wrong_request_is_refused_at_once_with_the_remedy(arguments, message):
    done = here(*arguments)
    assert done.exit_code == 1 and is_for_users(done.exception) and re.search(message, str(done.exception)), done
    # no study was announced, and no arm tried
    assert done.stdout == ""


def test_a_refusal_is_one_line_without_a_traceback():
    done = headwise("compare", "--graphs", "on", "--device", "cpu")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done
    assert done.stderr.startswith("error: --graphs on: CUDA graphs need a CUDA device")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"methods": ("DropHed(p=0.1)",)},
            r"--method 'DropHed\(p=0.1\)': There is no method 'DropHed'. Did you mean 'DropHead'",
        ),
        ({"methods": ("DropHead(p=1.5)",)}, r"--method 'DropHead\(p=1.5\)': DropHead.*1.5"),
        (
            {"methods": ("DropHead(p=0.1)", "DropHead(p=0.10)")},
            r"--method 'DropHead\(p=0.1\)' and 'DropHead\(p=0.10\)' are the same arm, DropHead\(p=0.1\). Give one",
        ),
        ({"device": "cuda"}, "--device cuda: torch finds no CUDA device here"),
        ({"device": "tpu"}, "--device 'tpu' is not known. Devices: cpu, cuda"),
        ({"task": "nowhere.py:Mine"}, "there is no file nowhere.py"),
        ({"task": "nowhere:Mine"}, "the module nowhere could not be imported .*No module named 'nowhere'"),
        ({"task": "nowhere.txt:Mine"}, "the module nowhere.txt could not be imported .*Give FILE.py:CLASS"),
        ({"task": "some/where.txt:Mine"}, "some/where.txt is not a Python file. Give FILE.py:CLASS"),
        ({"task": "..tasks:Mine"}, "..tasks is not a Python file"),
        ({"task": PLACE}, "names no class. Write FILE:CLASS"),
        ({"task": f"{PLACE}:Tony"}, "has no task 'Tony'.*Tasks there: Tiny, Exploding"),
        ({"task": f"{PLACE}:Tiny", "train_size": 0}, "Tiny does not take these settings: train_size"),
        (
            {"settings": ("lerning_rate=1",)},
            r"--set 'lerning_rate=1': Digits has no setting .*Did you mean 'learning_rate'",
        ),
        ({"settings": ("epochs=many",)}, r"--set 'epochs=many': epochs=many: Input should be a valid integer"),
        ({"settings": ("epochs=1",), "epochs": 2}, r"--set 'epochs=1': epochs is given twice on the command line"),
        (
            {"scale": "paper"},
            r"--scale paper: digits has no such scale. The study has none; change its settings with --set",
        ),
        ({"sweeps": ("DropHead(p=0.1)",)}, r"--sweep 'DropHead\(p=0.1\)' needs one setting with values in braces"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_the_reason(change, message):
    import torch

    from headwise.lab.comparing.choosing import choose_study
    from headwise_verdict.files.errors import StudyError

    if change == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(StudyError, match=message):
        choose_study(asked(**change))


def test_a_request_changes_what_it_names_and_nothing_else():
    from headwise.lab.comparing.choosing import choose_study

    plain = choose_study(asked(device="cpu"))
    assert plain.name == "digits" and plain.seeds == 10 and len(plain.arms) == 9 and plain.threads == 1
    methods = ("DropHead(p=0.1)+RelaxedAttention()", "baseline")
    other = choose_study(asked(device="cpu", methods=methods, seeds=3, epochs=2))
    assert other.arms == ("baseline", "DropHead(p=0.1) + RelaxedAttention(gamma=0.1)")
    assert other.task.model_dump() == plain.task.model_dump() | {"epochs": 2} and other.seeds == 3


@pytest.mark.grid
def test_the_default_study_runs_end_to_end_and_prints_a_table(tmp_path):
    done = headwise("compare", "--seeds", 1, "--epochs", 1, "--method", "DropHead()", "--watch", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stdout and "DropHead(p=0.2), seed 0: test accuracy" in done.stdout
    before, _, after = done.stdout.partition("2 runs\n")
    assert "seeds:  1, a verdict needs 6" in before and f"folder: {tmp_path}"[:40] in before
    assert "difference" in after and "verdict" in after
    assert all(len(line) <= 80 for line in after.splitlines() if "/" not in line), after
    described = json.loads((tmp_path / "study.json").read_text())
    assert described["arms"] == ["baseline", "DropHead(p=0.2)"] and described["command"].startswith(
        "headwise compare --seeds 1"
    )
    assert described["versions"]["torch"] and described["hardware"]["processor"]
    for name in ("report.html", "table.md", "table.csv", "analysis.json"):
        assert (tmp_path / name).stat().st_size > 100
    health = [
        json.loads(line) for path in tmp_path.glob("runs/*/health.jsonl") for line in path.read_text().splitlines()
    ]
    assert {record["step"] for record in health} >= {0, 6}
    (tmp_path / "report.html").unlink()
    done = headwise("report", tmp_path)
    assert done.returncode == 0 and str(tmp_path / "report.html") in done.stdout
    assert (tmp_path / "report.html").exists()


def test_methods_lists_the_registry():
    from headwise.attend import methods  # noqa: F401
    from headwise.attend.core.method import REGISTRY

    done = headwise("methods")
    assert done.returncode == 0
    ours = [method for method in REGISTRY.values() if method.__module__.startswith("headwise.")]
    assert ours
    for method in ours:
        assert repr(method()) in done.stdout and method.summary() in done.stdout


def test_watching_changes_no_number_and_its_stream_is_repaired_on_resume(tmp_path, monkeypatch):
    from small_studies import all_numbers, carry
    from test_resume import stopped_after

    study = tiny_study(methods=("DropHead(p=0.3)",), epochs=4)
    carry(study, tmp_path / "plain")
    carry(study, tmp_path / "watched", watch=True)
    plain, watched = all_numbers(tmp_path / "plain"), all_numbers(tmp_path / "watched")
    for _, result in watched.values():
        # what only a watched run can say
        result["metrics"] = {k: v for k, v in result["metrics"].items() if not k.startswith("alerts/")}
    assert plain == watched
    order = orders(study, tmp_path / "resumed", watch=True)[1]
    stopped_after(order, 2, monkeypatch)
    with open(order.folder / "health.jsonl", "a") as stream:
        stream.write('{"step": 12, "statistic": "of a step that was lost"}\n{"step": 1')
    carry(study, tmp_path / "resumed", watch=True)

    def health(out):
        lines = (tmp_path / out / "runs" / order.folder.name / "health.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if "alert" not in record]

    assert health("resumed") == health("watched")


def test_a_study_of_findings_is_carried_out_by_its_own_module_and_reported(tmp_path, monkeypatch):
    import types

    import headwise.lab.comparing.command as command
    from headwise.lab.comparing.request import NoStudies, Request
    from headwise_verdict.files.errors import StudyError

    asked = {}

    def run(out, *, seeds, jobs, device, progress):
        progress("half way")
        asked.update(seeds=seeds, jobs=jobs, device=device)
        return {
            "kind": "findings",
            "name": "x",
            "title": "X",
            "question": "?",
            "paragraphs": ["It is so."],
            "tables": [],
            "charts": [],
        }

    studies = NoStudies()
    object.__setattr__(studies, "load", lambda name: types.SimpleNamespace(TITLE="X", run=run))
    request = Request(
        study="x", studies=studies, seeds=3, jobs=1, device="cpu", out=tmp_path, command="headwise compare x"
    )
    command.run_findings(request)
    assert asked == {"seeds": 3, "jobs": 1, "device": "cpu"}
    found = json.loads((tmp_path / "findings.json").read_text())
    assert (
        found["paragraphs"] == ["It is so."] and found["command"] == "headwise compare x" and found["versions"]["torch"]
    )
    assert "It is so." in (tmp_path / "report.html").read_text()
    with pytest.raises(StudyError, match=r"for which --method, --epochs has no meaning\. It takes --seeds, --jobs"):
        command.run_findings(Request(study="x", studies=studies, methods=("A()",), epochs=3, out=tmp_path))
    command.run_findings(
        Request(study="x", studies=studies, scale="small", seeds=3, jobs=1, device="cpu", out=tmp_path)
    )
    with pytest.raises(StudyError, match=r"x has one scale: small\. Leave --scale paper out"):
        command.run_findings(Request(study="x", studies=studies, scale="paper", out=tmp_path))


def test_a_plan_of_a_study_without_arms_says_how_long_its_kept_run_took(capsys, monkeypatch):
    import types

    import headwise.lab.comparing.command as command
    from headwise.lab.studies.registry import Installed
    from headwise_verdict.files.errors import StudyError

    monkeypatch.setattr(Installed, "load", lambda self, name: types.SimpleNamespace(TITLE="Alarms", run=pytest.fail))
    command.run(asked(study="alarms", plan=True))
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("study: alarms: Alarms folder:") and "Its kept run took 63 min" in said
    with pytest.raises(StudyError, match="for which --method has no meaning"):
        command.run(asked(study="alarms", plan=True, methods=("A()",)))


def test_every_installed_study_states_its_total_or_that_nothing_is_known():
    from headwise.lab.studies.registry import Installed, catalogue

    for name, entry in catalogue()["studies"].items():
        for scale in ("default", *entry.get("scales", {})):
            took = Installed().took(name, scale)
            assert bool(took) == bool(entry["measured"]) and ("min on another machine" in took) == bool(took)
    assert "at --scale small took 178 min" in Installed().took("blog-sizes", "paper")
    assert Installed().took("blog-sizes", "small").startswith("Its 32 kept runs took 178 min")


@pytest.mark.parametrize("data", [None, Path("somewhere")])
def test_data_that_cannot_be_written_is_a_message_that_names_the_option(tmp_path, monkeypatch, data):
    from headwise.lab.comparing import choosing, command
    from headwise.lab.comparing.request import Request
    from headwise_verdict.files.errors import StudyError

    class Refuses:
        folder = None

        def located(self, folder):
            return self

        def data_sets(self):
            return []

        def prepare(self, tell):
            raise PermissionError(13, "Permission denied", "/data/cifar")

    study = tiny_study()
    object.__setattr__(study, "task", Refuses())
    monkeypatch.setattr(choosing, "choose_study", lambda request: study)
    monkeypatch.setattr(command, "choose_folder", lambda request, study: tmp_path)
    with pytest.raises(StudyError, match=r"/data/cifar cannot be written: Permission denied.*choose another --data"):
        command.run_comparison(Request(data=data, out=tmp_path), None)


def test_what_the_file_system_refuses_is_shown_without_a_traceback(tmp_path):
    (tmp_path / "study.json").mkdir()
    (tmp_path / "findings.json").write_text("{}")
    (tmp_path / "report.html").mkdir()
    done = headwise("report", tmp_path)
    assert done.returncode == 1 and "report.html" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_settings_sweeps_and_scales_of_the_command_line_make_the_study():
    from headwise.lab.comparing.choosing import choose_study
    from headwise.lab.experiments.study import Scale
    from headwise.lab.studies.digits import STUDY

    settings = ("optimizer=sgd, momentum=0.5", "weight_decay=0")
    study = choose_study(asked(device="cpu", settings=settings, sweeps=("DropHead(p={0.2,0.1})",)))
    assert study.arms == ("baseline", "DropHead(p=0.1)", "DropHead(p=0.2)")
    changed = {"optimizer": "sgd", "momentum": 0.5, "weight_decay": 0.0}
    assert study.task.model_dump() == STUDY.task.model_dump() | changed
    assert [axis.name for axis in study.axes] == ["p"]
    both = choose_study(asked(device="cpu", methods=("DropHead(p=0.1)", "same"), sweeps=("DropHead(p={0.2,0.1})",)))
    assert both.arms == ("baseline", "DropHead(p=0.1)", "same", "DropHead(p=0.2)")

    import types

    from headwise.lab.comparing.request import NoStudies, Request

    scaled = STUDY.model_copy(update={"scales": {"paper": Scale(settings={"epochs": 99}, seeds=3)}})
    studies = NoStudies()
    object.__setattr__(studies, "load", lambda name: types.SimpleNamespace(STUDY=scaled))
    found = choose_study(Request(studies=studies, device="cpu", scale="paper", settings=("depth=1",)))
    assert (found.seeds, found.task.epochs, found.task.depth) == (3, 99, 1)


def test_the_help_of_a_study_at_a_scale_lists_what_it_has_there(monkeypatch, capsys):
    from types import SimpleNamespace

    from headwise.lab.comparing.choosing import describe_request
    from headwise.lab.experiments.study import Scale
    from headwise_verdict.files.errors import StudyError
    from headwise_verdict.results.records import Claim, ClaimTest

    test = ClaimTest(arm="DropHead(p=0.2)", outcome="test/accuracy", says="higher")
    claim = Claim(text="It helps.", source="Somebody 2020", tests=(test,))
    scales = {
        "small": Scale(settings={"epochs": 2}),
        "paper": Scale(settings={"epochs": 90, "batch_size": 64}, seeds=3),
    }
    study = tiny_study(methods=("DropHead(p=0.2)",)).model_copy(update={"claims": (claim,), "scales": scales})
    studies = SimpleNamespace(load=lambda name: SimpleNamespace(STUDY=study))
    plain, paper = (describe_request("tiny", None, scale, studies) for scale in (None, "paper"))
    assert "  epochs=3 " in plain and "  epochs=90 " in paper and "  batch_size=64 " in paper
    assert "tiny: Tiny, at the scale paper, 3 seeds" in paper and "tiny: Tiny, 1 seeds" in plain
    for text in (plain, paper):
        assert "Arms:\n  baseline\n  DropHead(p=0.2)" in text
        assert "It helps. (Somebody 2020)\n    DropHead(p=0.2): higher in test/accuracy against baseline" in text
        assert "--scale small: epochs=2\n" in text and "--scale paper: epochs=90, batch_size=64, 3 seeds" in text
        assert max(map(len, text.splitlines())) <= 80
    with pytest.raises(StudyError, match=r"--scale papr: tiny has no such scale\. Did you mean 'paper'\?"):
        describe_request("tiny", None, "papr", studies)
    assert here("compare", "digits", "--scale=none", "--help").exit_code == 1


def test_the_help_of_a_study_lists_its_settings():
    done = here("compare", "digits", "--help")
    assert done.exit_code == 0 and "--sweep" in done.stdout
    for line in ("Settings of Digits", "  mlp_dim=96", "  train_size=200  ", "  optimizer=adamw", "adamw | adam | sgd"):
        assert line in done.stdout, line
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    own = here("compare", "--task", f"{PLACE}:Tiny", "--help")
    assert "Settings of Tiny" in own.stdout and "  pause=0.0" in own.stdout
    plain = here("compare", "--help")
    assert "Settings of" not in plain.stdout


def test_what_will_be_compared_is_said_before_anything_trains():
    from headwise.lab.comparing.command import announce

    study = tiny_study(methods=("DropHead(p=0.1)",), seeds=2)
    lines = announce(study, Path("results/tiny"), trials=3)
    assert lines == [
        "study:  tiny: Tiny",
        "arms:   2: baseline; DropHead(p=0.1)",
        "seeds:  2, a verdict needs 6: --seeds 6",
        "trials: 3 per arm, scored on validation data before the seeds",
        "folder: results/tiny",
    ]
    many = tiny_study(methods=tuple(f"DropHead(p=0.{i}) + RelaxedAttention(gamma=0.{i})" for i in range(1, 9)), seeds=6)
    lines = announce(many, Path("results/tiny"), trials=0)
    assert max(map(len, lines)) <= 80 and "seeds:  6, enough for a verdict" in lines


def test_a_folder_holds_one_study(tmp_path):
    from small_studies import carry

    from headwise.lab.comparing.compare import free_folder
    from headwise_verdict.files.errors import StudyError

    study = tiny_study(methods=("DropHead(p=0.1)",), seeds=2, epochs=1)
    out = tmp_path / "tiny"
    assert free_folder(out, study, 0) == out
    carry(study, out)
    written = (out / "study.json").read_bytes()
    others = {
        r"the study tiny with DropHead\(p=0.1\) and without DropHead\(p=0.2\)": {"methods": ("DropHead(p=0.2)",)},
        r"the study tiny without same": {"methods": ("DropHead(p=0.1)", "same")},
        r"the study tiny with other settings \(epochs 1\)": {"task": study.task.model_copy(update={"epochs": 2})},
        r"2 seeds of this study, and --seeds 1 would leave some out": {"seeds": 1},
    }
    for message, update in others.items():
        other = study.model_copy(update=update)
        with pytest.raises(StudyError, match=rf"holds {message}.*choose another --out, or delete"):
            carry(other, out)
        beside = free_folder(out, other, 0)
        assert (beside == out) == ("seeds" in update) and beside.parent == tmp_path
    with pytest.raises(StudyError, match="holds the study tiny with other settings"):
        carry(study, out, trials=1)
    assert (out / "study.json").read_bytes() == written
    more = study.model_copy(update={"seeds": 3, "name": "tiny"})
    assert free_folder(out, more, 0) == out
    assert len(carry(more, out)) == 6
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "study.json").write_text('{"name": "digits", "methods": ["baseline"]}')
    with pytest.raises(StudyError, match="holds the study digits with other settings"):
        carry(study, tmp_path / "old")
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "findings.json").write_text('{"name": "low-rank-toy"}')
    with pytest.raises(StudyError, match="holds the findings of the study low-rank-toy"):
        carry(study, tmp_path / "found")


def test_a_run_is_the_same_wherever_its_task_is_imported_from(tmp_path):
    import shutil

    from headwise.lab.experiments.study import Study
    from headwise.lab.studies.digits import STUDY

    moved = STUDY.model_copy(update={"task_place": "headwise.elsewhere:Digits"})
    assert moved.configuration("baseline", 0).identity == STUDY.configuration("baseline", 0).identity
    copied = Path(shutil.copy(PLACE, tmp_path / "renamed.py"))
    study = tiny_study()
    other = Study(**{**study.__dict__, "task_place": f"{copied}:Tiny"})
    assert other.configuration("baseline", 0).identity == study.configuration("baseline", 0).identity
    copied.write_text(copied.read_text() + "\n# edited\n")
    assert other.configuration("baseline", 0).identity != study.configuration("baseline", 0).identity


def test_comparing_knows_no_built_in_study():
    import ast

    for path in (ROOT / "src/headwise/lab/comparing").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.startswith("headwise.lab.studies") for name in names), path


@pytest.mark.bits
def test_the_processor_is_told_with_the_instruction_set_that_torch_takes():
    from headwise.files.provenance import hardware

    taken = torch.backends.cpu.get_cpu_capability()
    assert taken in hardware()["processor"] or not taken.startswith(("AVX", "DEFAULT"))


VERBS = set(
    "Add Allow Assume Audit Call Capture Change Compare Compile Count Describe Exit Judge Keep Kill List Pass Print "
    "Read Record Repeat Replay Report Request Retry Run Set Show Start Stop Take Test Time Train Try Tune Use "
    "Write".split()
)


def test_the_help_of_every_option_is_a_plain_imperative_sentence():
    import typer.main

    from headwise.cli import app

    texts = {
        (name, parameter.name): parameter.help or ""
        for name, command in typer.main.get_command(app).commands.items()
        for parameter in command.params
    }
    wrong = {}
    for place, text in texts.items():
        sentence = text.split(": ", 1)[1] if text.startswith(("For a table: ", "With --run: ")) else text
        first = sentence.split(" ")[0]
        if (
            first not in VERBS | {verb.lower() for verb in VERBS} | {"Also"}
            or not text.endswith((".", "..."))
            or len(text) > 170
        ):
            wrong[place] = text
    assert len(texts) > 60 and not wrong, wrong
