"""A task of a user's own: the example of the documentation runs, and is the example."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwise.comparing.task_source import load_task
from headwise.files.errors import StudyError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "char_lm_task.py"


def test_the_example_trains_on_any_text_through_the_command_line(tmp_path):
    (tmp_path / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    command = [
        sys.executable,
        "-m",
        "headwise.cli",
        "compare",
        "--task",
        f"{EXAMPLE}:CharLM",
        "--seeds",
        "1",
        "--epochs",
        "2",
    ]
    command += ["--method", "DropHead(p=0.2) + RelaxedAttention()", "--jobs", "1", "--out", "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("runs/*/result.json")]
    assert sorted(result["arm"] for result in results) == [
        "DropHead(p=0.2) + RelaxedAttention(gamma=0.1)",
        "baseline",
    ]
    for result in results:
        assert result["config"]["data"].keys() == {"input.txt"} and result["config"]["task"] == "char_lm_task.py:CharLM"
        # better than guessing among 28 characters, in nats
        assert result["metrics"]["test/loss"] < 3.2


def test_the_example_is_the_one_in_the_documentation_and_has_forty_lines():
    source = EXAMPLE.read_text()
    assert source.strip() in (ROOT / "docs" / "your_own_task.md").read_text()
    assert len(source.splitlines()) <= 40


def test_splits_of_the_example_do_not_overlap_and_targets_are_the_next_characters(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("".join(chr(300 + n) for n in range(900)))
    task = load_task(f"{EXAMPLE}:CharLM")(text=str(text), context=8)
    seen = [set(task.data(split)[1].flatten().tolist()) for split in ("train", "validation", "test")]
    assert all(seen) and not (seen[0] & seen[1] or seen[1] & seen[2] or seen[0] & seen[2])
    inputs, targets = task.data("train")
    assert (targets == inputs + 1).all()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1 +", "could not be loaded: SyntaxError"),
        ("import no_such_module", "could not be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("class Mine: ...", "has no task 'Mine'; a task subclasses headwise.study.Task. Tasks there: none"),
        (
            "from headwise.study import Task\nclass Mine(Task):\n    def data(self, split): ...",
            r"task Mine lacks model\(\). Add it to",
        ),
    ],
)
def test_a_task_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(StudyError, match=message):
        load_task(f"{tmp_path / 'mine.py'}:Mine")


def test_a_method_in_the_task_file_is_known_by_its_name(tmp_path):
    from small_studies import PLACE

    from headwise.comparing.command import Request, choose_study

    source = Path(PLACE).read_text() + (
        "\n\nfrom headwise import Method\n\n\nclass DoNothingHere(Method):\n"
        '    """Scales outputs."""\n\n    strength: float = 1.0\n\n'
        "    def output(self, o, call):\n        return o * self.strength\n"
    )
    (tmp_path / "mine.py").write_text(source)
    study = choose_study(Request(task=f"{tmp_path / 'mine.py'}:Tiny", methods=("DoNothingHere()",), device="cpu"))
    assert study.arms == ("baseline", "DoNothingHere(strength=1.0)")
    assert study.configuration(study.arms[1], 0).methods == [{"name": "DoNothingHere", "settings": {"strength": 1.0}}]
    from headwise.method import REGISTRY

    del REGISTRY["DoNothingHere"]
