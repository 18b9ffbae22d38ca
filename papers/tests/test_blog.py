"""The blog's studies: its block to the letter, who memorises, text with padding and in order, and each study end to
end."""

import json

import numpy as np
import pytest
import torch
from headwise_papers.blog_stopped import StoppedBlogImages
from headwise_papers.data import sst2, wikitext2
from headwise_papers.tasks.blog_images import ACTING, BlogImages
from headwise_papers.tasks.blog_text import CLASS, PAD, UNKNOWN, NextWord, Sentiment, WordModel
from small_studies import carry
from tiny_cifar import write_binary
from torch.nn import functional as F

from headwise.lab.comparing.choosing import choose_study
from headwise.lab.comparing.request import Request
from headwise.lab.studies.registry import Installed
from headwise.study import VisionTransformer
from headwise_verdict.results.analysis import analyse


def test_the_block_is_the_blogs_norm_before_the_mlp_alone_no_bias_and_no_position_on_the_class_token():
    torch.manual_seed(0)
    model = VisionTransformer(
        classes=10, image_size=32, patch=8, dim=32, depth=2, heads=5, head_dim=8, mlp_dim=24, norm="mlp"
    )
    held = model.state_dict()
    images = torch.randn(3, 3, 32, 32)
    x = (
        F.conv2d(images, held["patch.weight"], held["patch.bias"], stride=8).flatten(2).transpose(1, 2)
        + held["positions"]
    )
    x = torch.cat([held["class_token"].expand(3, 1, 32), x], 1)
    for at in range(2):
        weight = {name.removeprefix(f"blocks.{at}."): value for name, value in held.items() if f"blocks.{at}." in name}
        q, k, v = (x @ weight["attn.qkv.weight"].T).view(3, 17, 3, 5, 8).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / 8**0.5).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).reshape(3, 17, 40) @ weight["attn.proj.weight"].T
        normed = F.layer_norm(x, (32,), weight["norm2.weight"], weight["norm2.bias"])
        inner = F.gelu(normed @ weight["mlp.0.weight"].T + weight["mlp.0.bias"])
        x = x + inner @ weight["mlp.2.weight"].T + weight["mlp.2.bias"]
    last = F.layer_norm(x[:, 0], (32,), held["norm.weight"], held["norm.bias"])
    torch.testing.assert_close(model(images), last @ held["head.weight"].T + held["head.bias"], rtol=1e-4, atol=1e-5)
    # drawn from N(0, 1): 16 · 32 figures
    assert abs(float(held["positions"].std()) - 1) < 0.1 and held["positions"].shape == (1, 16, 32)
    assert not any("attn" in name and "bias" in name for name in held)


@pytest.mark.parametrize(("name", "classes"), [("blog-cifar10", 10), ("blog-cifar100", 100)])
def test_the_paper_scale_is_the_blogs(name, classes):
    study = choose_study(Request(study=name, studies=Installed(), scale="paper", device="cpu"))
    wanted = {"epochs": 25, "batch_size": 256, "learning_rate": 1e-3, "depth": 6, "heads": 5, "patch": 4, "dim": 128}
    wanted |= {"head_dim": 64, "mlp_dim": 128, "train_size": None, "test_size": None, "norm": "mlp", "dtype": "float32"}
    wanted |= {"schedule": "constant", "warmup": 0, "betas": None, "optimizer": "adamw", "curve": True}
    assert wanted.items() <= study.task.model_dump().items()
    model = study.task.model()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, classes) and len(model.blocks) == 6
    assert len(study.arms) == 9 and study.scale == "paper"


@pytest.mark.parametrize("name", ["blog-cifar10", "blog-cifar100", "blog-text-sst2", "blog-text-wikitext2"])
def test_the_small_scale_is_the_default_with_nine_arms_and_ten_seeds_and_all_claims_name_what_is_there(name):
    study = choose_study(Request(study=name, studies=Installed(), device="cpu"))
    assert (len(study.arms), study.seeds, study.scale) == (9, 10, "small")
    assert all(claim.tests for claim in study.claims) and len(study.claims) >= 9


@pytest.fixture
def images(tmp_path):
    """Write CIFAR-10 files of 24 training and 8 test images each, whose class is their colour."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in (*(f"data_batch_{at}.bin" for at in range(1, 6)), "test_batch.bin"):
        labels = [at % 4 for at in range(8)]
        pixels = np.zeros((8, 3, 1024), np.uint8)
        for at, label in enumerate(labels):
            pixels[at, label % 3] = 100 + 50 * label + len(name) % 3
        write_binary(folder / name, pixels.reshape(8, 3072), labels)
    return tmp_path


def small(study, data, *settings, **changes):
    request = Request(study=study, studies=Installed(), settings=settings, device="cpu", data=data, **changes)
    chosen = choose_study(request)
    return chosen.model_copy(update={"task": chosen.task.located(data)})


IMAGES = (
    "train_size=40, test_size=8, depth=2, dim=16, heads=2, head_dim=8, mlp_dim=16, batch_size=8, epochs=12, "
    "learning_rate=0.01",
)


@pytest.mark.grid
def test_a_study_of_images_ends_with_every_training_image_memorised_and_its_claims_judged(tmp_path, images):
    study = small("blog-cifar10", images, *IMAGES, seeds=1)
    carry(study, tmp_path / "out", data=images)
    analysis = analyse(tmp_path / "out")
    plain = next(arm for arm in analysis.arms if arm.label == "baseline")
    # colours are learned by heart and hold for the test images too
    assert {name: plain.metrics[name].mean for name in ("train/memorised", f"{ACTING}/memorised", "test/accuracy")} == {
        "train/memorised": 1.0,
        f"{ACTING}/memorised": 1.0,
        "test/accuracy": 1.0,
    }
    assert len(analysis.arms) == 9 and plain.runs.finished == 1
    assert {claim.verdict for claim in analysis.claims} <= {"undecided", "not testable here"}


def test_the_methods_act_on_the_training_images_only_where_the_outcome_says_so(tmp_path, images):
    study = small("blog-cifar10", images, *IMAGES, methods=("DropHead(p=0.9)",), seeds=1)
    carry(study, tmp_path / "out", data=images)
    figures = {
        arm.label: {name: one.mean for name, one in arm.metrics.items()} for arm in analyse(tmp_path / "out").arms
    }
    plain, dropped = figures["baseline"], figures["DropHead(p=0.9)"]
    assert plain[f"{ACTING}/loss"] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert dropped[f"{ACTING}/loss"] > 1.01 * dropped["train/loss"]


@pytest.mark.grid
def test_the_sweeps_are_axes_of_the_classes_colours_and_begin_at_the_baseline_to_the_bit(tmp_path, images):
    study = small("blog-sweeps", images, *IMAGES, seeds=1)
    assert (len(study.arms), study.task.name, len(study.sweeps)) == (29, "cifar10", 6)
    carry(study, tmp_path / "out", data=images)
    analysis = analyse(tmp_path / "out")
    figures = {arm.label: {name: one.mean for name, one in arm.metrics.items()} for arm in analysis.arms}
    assert figures["baseline"]["train/accuracy"] == figures["baseline"]["test/accuracy"] == 1.0
    # strength 0 is the baseline, to the bit; the strongest penalty is another training
    for penalty in ("Decorrelation", "AttentionNormPenalty"):
        assert figures[f"{penalty}(strength=0.0)"]["train/loss"] == figures["baseline"]["train/loss"]
        assert figures[f"{penalty}(strength=10000.0)"]["train/loss"] != pytest.approx(
            figures["baseline"]["train/loss"], rel=0.05
        )
    assert {claim.verdict for claim in analysis.claims} <= {"undecided", "not testable here"} and len(
        analysis.claims
    ) == 8


def test_a_run_memorises_from_99_percent_on():
    task = BlogImages(name="cifar10")
    found = task.summary({"train/accuracy": 0.99, f"{ACTING}/accuracy": 0.9899, "test/accuracy": 1.0})
    assert found == {"train/memorised": 1.0, f"{ACTING}/memorised": 0.0}


@pytest.fixture
def text(tmp_path):
    """Write SST-2's files, whose sentiment is one word, and WikiText-2's, which count from one to six."""
    for source, names in ((sst2.SOURCE, ("train.tsv", "dev.tsv", "test-labeled.tsv")), (wikitext2.SOURCE, ())):
        (tmp_path / source.folder).mkdir()
        for name in names:
            rows = "".join(f"{'so ' * (at % 3)}{('bad', 'good')[at % 2]} film\t{at % 2}\n" for at in range(24))
            (tmp_path / source.folder / name).write_text("sentence\tlabel\n" + rows)
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / wikitext2.SOURCE.folder / name).write_text("one two three four five six " * 40)
    return tmp_path


TWO = ("DropHead(p=0.2)", "Decorrelation(strength=1.0)")
WORDS = "depth=1, dim=16, heads=2, head_dim=8, mlp_dim=16, batch_size=8, epochs=20, learning_rate=0.01, vocabulary=6"


def test_a_study_of_sentences_learns_the_one_word_that_tells(tmp_path, text):
    study = small("blog-text-sst2", text, f"{WORDS}, train_size=24, longest=8", methods=TWO, seeds=1)
    carry(study, tmp_path / "out", data=text)
    analysis = analyse(tmp_path / "out")
    assert {arm.metrics["test/accuracy"].mean for arm in analysis.arms} == {1.0}
    assert {claim.verdict for claim in analysis.claims} <= {"undecided", "not testable here"} and len(
        analysis.arms
    ) == 3


@pytest.mark.grid
def test_a_study_of_the_next_word_learns_to_count(tmp_path, text):
    study = small("blog-text-wikitext2", text, f"{WORDS}, train_size=20, test_size=10, longest=6", methods=TWO, seeds=1)
    carry(study, tmp_path / "out", data=text)
    (plain, *others) = analyse(tmp_path / "out").arms
    assert plain.metrics["test/accuracy"].mean == 1.0 and len(others) == 2
    # nats per word, of six words by heart
    assert plain.metrics["test/perplexity"].mean == pytest.approx(np.exp(plain.metrics["test/loss"].mean), rel=0.01)
    assert plain.metrics["test/perplexity"].mean < 1.2


def test_sentences_begin_with_the_class_word_and_rare_words_are_unknown(text):
    task = Sentiment(vocabulary=2, longest=6).located(text)
    found = task.data("test")
    # "film" is the most frequent word, then "so"
    assert found["words"][:3].tolist() == [
        [CLASS, UNKNOWN, 3, PAD, PAD, PAD],
        [CLASS, 4, UNKNOWN, 3, PAD, PAD],
        [CLASS, 4, 4, UNKNOWN, 3, PAD],
    ]
    assert found["labels"].tolist()[:3] == [0, 1, 0] and found["real"].sum(1).tolist()[:3] == [3, 4, 5]
    batch = task.batch({name: part[:2] for name, part in found.items()}, None)
    assert batch.inputs["words"].shape == (2, 4)


def test_the_next_word_is_the_one_that_follows_and_no_piece_shares_a_target(text):
    task = NextWord(vocabulary=6, longest=4).located(text)
    words, following = task.data("train")
    assert words[0].tolist() == [3, 4, 5, 6] and following[0].tolist() == [4, 5, 6, 7] and words[1, 0] == 7
    assert len(words) == (6 * 40 - 1) // 4


def model_of_words(causal):
    torch.manual_seed(0)
    shape = {"words": 9, "outputs": 5, "longest": 7, "dim": 16, "depth": 2, "heads": 2, "head_dim": 8, "mlp_dim": 16}
    return WordModel(**shape, causal=causal, norm="mlp").eval()


def test_padding_changes_no_sentence_and_a_real_word_does():
    model, words = model_of_words(False), torch.randint(3, 9, (2, 7))
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    changed = words.clone()
    changed[1, 4:] = PAD
    torch.testing.assert_close(model(changed, real), model(words, real), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model(words[1:, :4]), model(words, real)[1:], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(changed, real | True), model(words, real | True))


def test_no_word_sees_the_words_after_it():
    model, words = model_of_words(True), torch.randint(3, 9, (1, 7))
    changed = words.clone()
    changed[0, 4:] = (changed[0, 4:] - 3 + 1) % 6 + 3
    before, after = model(words), model(changed)
    torch.testing.assert_close(before[0, :4], after[0, :4], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[0, 4], after[0, 4])


@pytest.mark.grid
def test_every_number_of_images_is_trained_anew_and_measured_in_evaluation_mode(tmp_path, images):
    settings = IMAGES[0].replace("epochs=12", "epochs=3")
    study = small("blog-sizes", images, settings, "images=(8,40)", methods=("DropHead(p=0.9)",), seeds=1)
    (plain, dropped) = carry(study, tmp_path / "out", data=images)
    figures = plain["metrics"]
    assert plain["phases"] == ["8 images", "40 images"]
    # three epochs of one batch, then of five
    assert plain["steps"] == 3 * (1 + 5)
    for count in (8, 40):
        train, test = (figures[f"{count} images/{split}/accuracy"] for split in ("train", "test"))
        assert figures[f"{count} images/test/gap"] == pytest.approx(train - test)
    assert figures["40 images/test/accuracy"] == figures["test/accuracy"]
    assert 0 < figures["heads/head_redundancy/mean"] <= 1 + 1e-6
    assert dropped["metrics"]["40 images/train/loss"] != figures["40 images/train/loss"]


def test_with_equal_steps_the_change_from_more_images_to_fewer_is_kept_for_each_pair_of_numbers(tmp_path, images):
    settings = IMAGES[0].replace("epochs=12", "steps=6")
    study = small("blog-steps", images, settings, "images=(8,20,40)", methods=("DropHead(p=0.9)",), seeds=1)
    (plain, dropped) = carry(study, tmp_path / "out", data=images)
    assert plain["steps"] == dropped["steps"] == 3 * 6
    figures = plain["metrics"]
    for few, many in ((8, 20), (8, 40), (20, 40)):
        difference = figures[f"{few} images/test/accuracy"] - figures[f"{many} images/test/accuracy"]
        assert figures[f"{few} less {many} images/change"] == pytest.approx(difference)


def test_the_claim_on_limited_data_compares_gains_at_equal_steps():
    study = choose_study(Request(study="blog-steps", studies=Installed(), device="cpu"))
    (claim, *others) = study.claims
    assert claim.text.startswith("Especially with limited data") and len(others) == 3
    assert {(test.outcome, test.says) for test in claim.tests} == {("1000 less 10000 images/change", "higher")}
    assert (study.task.steps, study.task.images, study.seeds, len(study.arms)) == (3000, (1000, 3000, 10_000), 8, 3)


def test_early_stopping_takes_the_test_figures_of_the_least_validation_loss(tmp_path, images):
    study = small(
        "blog-stopped", images, IMAGES[0].replace("train_size=40", "train_size=20"), "validation_size=12", seeds=1
    )
    runs = carry(study, tmp_path / "out", data=images)
    assert len(runs) == 2
    for run in runs:
        lines = (tmp_path / "out" / "runs" / run["hash"] / "metrics.jsonl").read_text().splitlines()
        epochs = [json.loads(line)["metrics"] for line in lines]
        losses = [epoch["validation/loss"] for epoch in epochs]
        at = losses.index(min(losses))
        assert run["metrics"]["test when stopped/epoch"] == at + 1 and len(epochs) == 12
        for metric in ("accuracy", "loss"):
            assert run["metrics"][f"test when stopped/{metric}"] == epochs[at][f"test/{metric}"]
    assert {claim.verdict for claim in analyse(tmp_path / "out").claims} <= {"undecided", "not testable here"}


def test_validation_images_are_in_no_training(images):
    task = StoppedBlogImages(name="cifar10", validation_size=12).located(images)
    parts = {split: task.data(split)[0] for split in ("train", "validation", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 28, "validation": 12, "test": 8}
    assert torch.equal(torch.cat([parts["train"], parts["validation"]]), BlogImages.data(task, "train")[0])
