"""A task of a user's own: the example of the documentation runs, and is the example."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from headwise.lab.experiments.task_source import load_task
from headwise_verdict.files.errors import StudyError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "char_lm_task.py"
TRANSLATION = ROOT / "examples" / "translation_task.py"
SENTENCES = ROOT / "examples" / "sst2_task.py"


@pytest.mark.grid
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
    assert sorted(result["arm"] for result in results) == ["DropHead(p=0.2) + RelaxedAttention(gamma=0.1)", "baseline"]
    for result in results:
        assert result["config"]["data"].keys() == {"input.txt"} and result["config"]["task"] == "CharLM"
        # better than guessing among 28 characters, in nats
        assert result["metrics"]["test/loss"] < 3.2


OWN_STUDY = """
from char_lm_task import *
from headwise.study import Study

class Mine(CharLM):
    epochs: int = 1

mine = Study(
    name="own", title="Own", question="?", task=Mine(), task_place="my_study.py:Mine",
    methods=("DropHead(p=0.1)",), seeds=1, margin=0.02,
)
"""


@pytest.mark.grid
def test_a_study_of_a_file_is_compared_by_its_name(tmp_path):
    (tmp_path / "input.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "my_study.py").write_text(OWN_STUDY)

    def compare(*arguments):
        paths = os.pathsep.join([str(EXAMPLE.parent), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", "headwise.cli", "compare", *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
        )

    # in processes of their own, which build the task again
    done = compare("own/my_study.py:mine", "--jobs", "2", "--no-rehearsal")
    assert done.returncode == 0, done.stderr
    analysis = json.loads((tmp_path / "results" / "mine" / "analysis.json").read_text())
    assert [arm["label"] for arm in analysis["arms"]] == ["baseline", "DropHead(p=0.1)"]
    assert analysis["seeds"] == [0] and analysis["margin"] == 0.02
    told = compare("own/my_study.py:mine", "--help").stdout
    assert told.strip().startswith("own: Own, 1 seeds") and "Settings of Mine" in told
    assert "own/my_study.py has no study 'his'. Studies there: mine." in compare("own/my_study.py:his").stderr
    assert "there is no file nowhere.py" in compare("nowhere.py:mine").stderr


def test_the_example_is_the_one_in_the_documentation_and_has_forty_lines():
    source = EXAMPLE.read_text()
    assert source.strip() in (ROOT / "docs" / "tasks.md").read_text()
    assert len(source.splitlines()) <= 40


def fragments():
    """Return the parts of tasks that the documentation shows, by their names."""
    found = {}
    for block in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8"), re.DOTALL
    ):
        exec(block, found)
    return found


def test_the_metric_of_the_documentation_is_the_mean_over_the_classes_of_the_whole_split():
    made = fragments()["Segmentation"]
    task = type("Made", (made,), {"model": lambda self: nn.Identity(), "data": lambda self, split: None})(classes=3)
    targets = torch.tensor([[[0, 1], [2, 2]], [[0, 1], [1, 2]]])
    guessed = torch.tensor([[[0, 1], [1, 2]], [[0, 0], [1, 2]]])
    output = nn.functional.one_hot(guessed, 3).permute(0, 3, 1, 2).float()
    halves = [task.count(output[half], targets[half])["confusion"] for half in (slice(0, 1), slice(1, 2))]
    # classes 0 to 2: 2 of 3 places, 2 of 4, 2 of 3
    assert task.finish({"confusion": halves[0] + halves[1]})["miou"] == pytest.approx((2 / 3 + 2 / 4 + 2 / 3) / 3)
    fog, scales = task.evaluations()
    assert (fog.name, fog.split, scales.name, scales.split) == ("test/fog", "fog", "multi-scale", "test")
    assert torch.equal(scales.output(lambda x: torch.ones_like(x), output), torch.ones_like(output))


def test_the_settings_that_the_documentation_shows_are_written_as_a_class_takes_them():
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+: [^`]+ = [^`]+)` \|", text, re.MULTILINE)
    assert len(shown) >= 5
    lines = ["from headwise.study import Task", "class Shown(Task):", *(f"    {line}" for line in shown)]
    exec("\n".join(lines), made := {})
    assert {line.split(":")[0] for line in shown} <= {*made["Shown"].model_fields}


def test_the_phases_of_the_documentation_are_two_and_the_second_learns_the_head():
    made = fragments()["Probed"]
    task = type("Made", (made,), {"model": lambda self: nn.Identity(), "data": lambda self, split: None})()
    first, second = task.phases()
    assert (first.name, first.methods, second.name, second.methods) == ("contrast", True, "probe", False)
    assert (second.carry, second.learn) == (("encoder.*",), ("head.*",))
    assert {*second.changes} <= {*type(task).model_fields}


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
        (
            "from headwise.study import Task\nclass Mine(Task):\n    epochs = 3",
            r"could not be loaded: the setting epochs has no type: write epochs: int = \.\.\.$",
        ),
        (
            "from headwise.study import Task\nclass Mine(Task):\n    head_statistics = ('token_cosine',)",
            r"the setting head_statistics has no type: write head_statistics: tuple\[str, \.\.\.\] = \.\.\.$",
        ),
        (
            "from headwise.study import Task\nclass Mine(Task):\n    letters = 8",
            r"the setting letters has no type: write letters: int = \.\.\., or ClassVar",
        ),
    ],
)
def test_a_task_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(StudyError, match=message):
        load_task(f"{tmp_path / 'mine.py'}:Mine")


def test_a_method_in_the_task_file_is_known_by_its_name(tmp_path):
    from small_studies import PLACE

    from headwise.lab.comparing.choosing import choose_study
    from headwise.lab.comparing.request import Request

    source = Path(PLACE).read_text() + (
        "\n\nfrom headwise import Method\n\n\nclass DoNothingHere(Method):\n"
        '    """Scales outputs."""\n\n    strength: float = 1.0\n\n'
        "    def output(self, o, call):\n        return o * self.strength\n"
    )
    (tmp_path / "mine.py").write_text(source)
    study = choose_study(Request(task=f"{tmp_path / 'mine.py'}:Tiny", methods=("DoNothingHere()",), device="cpu"))
    assert study.arms == ("baseline", "DoNothingHere(strength=1.0)")
    assert study.configuration(study.arms[1], 0).methods == [{"name": "DoNothingHere", "settings": {"strength": 1.0}}]
    from headwise.attend.core.method import REGISTRY

    del REGISTRY["DoNothingHere"]


WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four", "und": "and", "nicht": "not", "mehr": "more"}


def write_corpus(folder):
    """Write sentences of two to six words and their translations, word by word."""
    import random

    draw = random.Random(0)
    for name, count in (("train", 400), ("val", 20), ("test", 30)):
        lines = [draw.choices(list(WORDS), k=draw.randint(4, 7)) for _ in range(count)]
        (folder / f"{name}.de").write_text("\n".join(" ".join(line) for line in lines))
        (folder / f"{name}.en").write_text("\n".join(" ".join(WORDS[word] for word in line) for line in lines))


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_the_translation_example_learns_to_translate_and_has_at_most_120_lines(tmp_path):
    pytest.importorskip("tokenizers")
    from small_studies import carry, study_of

    assert len(TRANSLATION.read_text().splitlines()) <= 120
    write_corpus(tmp_path)
    settings = {"vocabulary": 280, "dim": 32, "depth": 1, "tokens_per_batch": 300}
    settings |= {"epochs": 14, "warmup": 20, "learning_rate": 5e-3}
    study = study_of(f"{TRANSLATION}:Translation", ("baseline | norm=pre",), 1, **settings)
    study.task.located(tmp_path)
    post, pre = carry(study, tmp_path / "out", data=tmp_path)
    assert post["metrics"]["test/greedy/bleu"] > 0.5 and pre["metrics"]["test/greedy/bleu"] > 0.5
    assert post["metrics"] != pre["metrics"] and pre["config"]["settings"]["norm"] == "pre"
    assert 0 < pre["metrics"]["test/loss"] < 0.5


def test_bleu_of_the_example_follows_its_formula(tmp_path):
    import torch

    pytest.importorskip("tokenizers")
    load_task(f"{TRANSLATION}:Translation")
    module = next(m for name, m in sys.modules.items() if name.startswith("headwise_task_translation_task"))

    def bleu(*pairs):
        found = {"words": torch.tensor([sum(len(a.split()) for a, _ in pairs), sum(len(b.split()) for _, b in pairs)])}
        for n in range(1, 5):
            counts = [(module.ngrams(a.split(), n), module.ngrams(b.split(), n)) for a, b in pairs]
            found[f"{n}-grams"] = torch.tensor(
                [sum((a & b).total() for a, b in counts), sum(a.total() for a, _ in counts)]
            )
        return float(module.finish_bleu(found)["bleu"])

    assert bleu(("a b c d e", "a b c d e")) == pytest.approx(1)
    # 5/6, 3/5, 2/4 and 1/3 of the n-grams are there, and nothing is too short
    assert bleu(("a b c d x f", "a b c d e f")) == pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    # all are there, and a word of five is missing: exp(1 - 5/4)
    assert bleu(("a b c d", "a b c d e")) == pytest.approx(2.718281828 ** (-1 / 4), rel=1e-6)
    assert bleu(("a a a a a", "a b c d e")) == 0


def test_a_corpus_whose_sides_differ_or_whose_sentences_are_too_long_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    write_corpus(tmp_path)
    kind = load_task(f"{TRANSLATION}:Translation")
    with pytest.raises(ValueError, match=r"a sentence of train has \d+ tokens; set longest=\d+"):
        kind(vocabulary=280, longest=3).located(tmp_path).data("train")
    (tmp_path / "val.en").write_text("one")
    with pytest.raises(ValueError, match="validation has 20 and 1 lines"):
        kind(vocabulary=280).located(tmp_path).data("validation")


def test_the_sentence_example_trains_a_model_of_transformers_with_masks(tmp_path):
    import random

    pytest.importorskip("transformers")
    from small_studies import carry, study_of

    draw = random.Random(0)
    for name, count in (("train", 300), ("dev", 20), ("test", 60)):
        lines = []
        for _ in range(count):
            filler = draw.choices(["the", "film", "is", "a", "story"], k=draw.randint(1, 12))
            label = draw.randint(0, 1)
            filler.insert(draw.randint(0, len(filler)), ("dull", "moving")[label])
            lines.append(f"{' '.join(filler)}\t{label}")
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    place = f"{SENTENCES}:SST2"
    settings = {"words": 20, "layers": 1, "dim": 32, "epochs": 8, "learning_rate": 5e-3}
    study = study_of(place, ("DropHead(p=0.1)",), 1, **settings)
    study.task.located(tmp_path)
    for result in carry(study, tmp_path / "out", data=tmp_path):
        assert result["metrics"]["test/accuracy"] > 0.9 > result["metrics"]["train/loss"], result["arm"]
    task = load_task(place)(words=20).located(tmp_path)
    examples = task.data("train")
    first = {name: tensor[:4] for name, tensor in examples.items()}
    batch = task.batch(first, None)
    longest = int(first["attention_mask"].sum(1).max())
    assert batch.inputs["input_ids"].shape == (4, longest) < tuple(first["input_ids"].shape)
    assert (batch.targets == first["labels"]).all()


def test_sst2_takes_the_labelled_test_file_before_one_without_labels(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na dull film\t0\na moving film\t1\n")
    (tmp_path / "test.tsv").write_text("index\tsentence\n0\ta film\n")
    (tmp_path / "test-labeled.tsv").write_text("sentence\tlabel\na moving film\t1\n")
    task = load_task(f"{SENTENCES}:SST2")(words=20).located(tmp_path)
    assert task.data("test")["labels"].tolist() == [1]
    assert [path.name for path in task.files()] == ["train.tsv", "dev.tsv", "test-labeled.tsv"]
