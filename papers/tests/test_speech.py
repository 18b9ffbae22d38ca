"""Speech: CTC's frames, SpecAugment, error rates against jiwer, what cannot be learned refused by name, and a run."""

import itertools
import random

import jiwer
import pytest
import torch
from headwise_papers.tasks.ctc import BLANK, best_path, frames_needed
from headwise_papers.tasks.error_rates import count_errors, edits, finish_errors
from headwise_papers.tasks.spec_augment import spec_augment
from headwise_papers.tasks.speech import LETTERS, Speech, labels_of, spell
from headwise_papers.tasks.speech_encoder import SpeechEncoder, shorter
from made_up_data import WORDS, write_an4
from small_studies import carry
from torch import nn

from headwise.lab.experiments.arm import read_arm
from headwise.lab.training.phases import carry_over
from headwise.study import Phase, Study, StudyError

PLACE = "headwise_papers.tasks.speech:Speech"
TINY = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 16, "stride": 2, "tokens_per_batch": 400}


@pytest.fixture
def folder(tmp_path):
    return write_an4(tmp_path)


def sentences(count, seed):
    draw = random.Random(seed)
    return ["".join(draw.choice("AB C") for _ in range(draw.randint(3, 12))).strip() or "A" for _ in range(count)]


def test_error_rates_are_those_of_jiwer():
    said, meant = sentences(40, 0), sentences(40, 1)
    said[3] = ""
    found = finish_errors(count_errors(said, meant))
    plain = jiwer.Compose([jiwer.RemoveMultipleSpaces(), jiwer.Strip(), jiwer.ReduceToListOfListOfWords()])
    words = jiwer.wer(meant, said, reference_transform=plain, hypothesis_transform=plain)
    assert float(found["word_error"]) == pytest.approx(words)
    assert float(found["letter_error"]) == pytest.approx(sum(map(edits, said, meant)) / sum(map(len, meant)))
    assert edits("KITTEN", "SITTING") == 3 and edits("", "ABC") == 3 and edits("ABC", "") == 3
    assert float(found["letter_error"]) == pytest.approx(jiwer.cer(meant, said), abs=0.02)


def test_errors_of_parts_add_up_to_those_of_the_whole():
    said, meant = sentences(10, 2), sentences(10, 3)
    parts = [count_errors(said[at : at + 5], meant[at : at + 5]) for at in (0, 5)]
    whole = count_errors(said, meant)
    assert all(parts[0][name] + parts[1][name] == whole[name] for name in whole)


def test_frames_needed_are_the_least_that_ctc_can_use():
    for labels in ([1], [1, 2], [1, 1], [2, 2, 2, 1, 1]):
        losses = {}
        for frames in range(1, 10):
            scores = torch.zeros(frames, 1, 3).log_softmax(-1)
            losses[frames] = float(
                nn.functional.ctc_loss(
                    scores, torch.tensor([labels]), torch.tensor([frames]), torch.tensor([len(labels)])
                )
            )
        assert min(frames for frames, loss in losses.items() if loss < float("inf")) == frames_needed(labels)


def test_the_best_path_drops_repeats_then_blanks_and_stops_at_the_last_frame():
    path = torch.tensor([[1, 1, BLANK, 1, 2, 2, BLANK, 3]])
    scores = nn.functional.one_hot(path, 4).float()
    assert best_path(scores, torch.tensor([8])) == [[1, 1, 2, 3]]
    assert best_path(scores, torch.tensor([5])) == [[1, 1, 2]]


@pytest.mark.parametrize(("count", "stride"), [*itertools.product((1, 5, 6, 7, 40), (1, 2, 3, 5))])
def test_frames_after_the_convolution_are_counted_as_it_makes_them(count, stride):
    model = SpeechEncoder(13, "AB", dim=8, depth=1, heads=2, mlp_dim=8, norm="post", stride=stride)
    lengths = torch.tensor([count])
    assert model(torch.randn(1, count, 13), lengths).shape[1] == int(shorter(lengths, stride))


@pytest.mark.parametrize("norm", ["pre", "post", "deep"])
def test_padding_changes_no_score(norm):
    torch.manual_seed(0)
    model = SpeechEncoder(13, LETTERS, dim=16, depth=2, heads=2, mlp_dim=16, norm=norm, stride=3).eval()
    features, lengths = torch.randn(2, 30, 13), torch.tensor([30, 18])
    features[1, 18:] = 0
    together = model(features, lengths)[1, :6]
    torch.testing.assert_close(together, model(features[1:, :18], lengths[1:])[0], atol=1e-5, rtol=1e-5)


def test_spec_augment_hides_what_it_says_within_each_length():
    generator = torch.Generator().manual_seed(0)
    features, lengths = torch.ones(400, 60, 13), torch.tensor([60, 20] * 200)
    settings = {"bands": 0, "band": 3, "stretches": 1, "stretch": 10, "share": 0.25}
    shown = spec_augment(features, lengths, generator, **settings)
    hidden = (shown == 0).all(-1).sum(1)
    # up to 10 frames, and up to a quarter of 20
    assert int(hidden[::2].max()) == 10 and int(hidden[1::2].max()) == 5 and int(hidden.min()) == 0
    assert bool((shown[1::2, 20:] == 1).all())
    assert float(hidden[::2].float().mean()) == pytest.approx(5, abs=0.7)
    bands = spec_augment(features, lengths, generator, **settings | {"bands": 2, "stretches": 0})
    gone = (bands == 0).all(1).sum(1)
    assert int(gone.max()) > 3 and int(gone.max()) <= 6
    same = [spec_augment(features, lengths, torch.Generator().manual_seed(5), **settings) for _ in range(2)]
    assert torch.equal(*same)


def test_masks_are_of_training_alone(folder):
    task = Speech(**TINY, stretches=3, stretch=20, stretch_share=0.5).located(folder)
    examples = task.data("train")
    plain = task.batch(examples, None).inputs["features"]
    assert not torch.equal(task.batch(examples, torch.Generator().manual_seed(0)).inputs["features"], plain)
    assert torch.equal(task.batch(examples, None).inputs["features"], plain)


def test_each_coefficient_is_normalised_over_an_utterance(folder):
    examples = Speech(**TINY).located(folder).data("train")
    one = examples["features"][0, : int(examples["lengths"][0])]
    torch.testing.assert_close(one.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(one.std(0, correction=0), torch.ones(13), atol=1e-4, rtol=0)
    assert spell(labels_of("A B'Z")) == "A B'Z"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transcripts": ["YES", "AÄ", "NO"]}, "1 with letters that the vocabulary lacks \\('Ä'\\): utterance-1"),
        ({"transcripts": ["YES", "NO", "NO"], "frames": [40, 900, 40]}, "more than 700: utterance-1"),
        ({"transcripts": ["YES", "AAAA", "NO"], "frames": [40, 12, 40]}, "cannot reach in its frames: utterance-1"),
        ({"transcripts": ["YES", " ", "NO"]}, "utterance-1"),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name(tmp_path, change, words):
    folder = write_an4(tmp_path, split=["train", "train", "test"], **change)
    with pytest.raises(StudyError, match=words):
        Speech(**TINY).located(folder).data("train")


def test_a_label_just_within_reach_is_taken(tmp_path):
    folder = write_an4(tmp_path, ["YES", "AAAA", "NO"], frames=[40, 13, 40], split=["train", "train", "test"])
    # 13 frames make 7, which "AAAA" needs
    assert len(Speech(**TINY).located(folder).data("train")["labels"]) == 2


def test_a_checkpoint_of_other_letters_is_refused():
    shape = {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8, "norm": "post", "stride": 2}
    mine, other = SpeechEncoder(13, "AB", **shape), SpeechEncoder(13, "AC", **shape)
    before = mine.head.weight.clone()
    with pytest.raises(StudyError, match="`letters` differs from this model's"):
        carry_over(Phase("adapt"), mine, other.state_dict(), "a folder")
    assert torch.equal(mine.head.weight, before)
    with pytest.raises(StudyError, match=r"letters is \(3,\), the model's \(2,\)"):
        carry_over(Phase("adapt"), mine, SpeechEncoder(13, "ABC", **shape).state_dict(), "a folder")
    carry_over(Phase("adapt"), mine, SpeechEncoder(13, "AB", **shape).state_dict(), "a folder")


def test_longer_utterances_than_a_batch_holds_are_refused(folder, tmp_path):
    study = a_study(folder, tokens_per_batch=30)
    with pytest.raises(StudyError, match="more than tokens_per_batch=30"):
        carry(study, tmp_path / "out", data=folder)


def a_study(folder, methods=(), **settings):
    task = Speech(**TINY | settings).located(folder)
    arms = tuple(read_arm(text, task).text for text in methods)
    return Study(name="speech", title="T", question="Q?", task=task, task_place=PLACE, methods=arms, seeds=1)


@pytest.mark.grid
def test_a_small_encoder_learns_to_write_down_what_it_hears(tmp_path):
    folder = write_an4(tmp_path, WORDS * 10)
    study = a_study(
        folder,
        ('SigmaReparam(init="one", layers="all") | norm=post',),
        norm="pre",
        epochs=30,
        batch_size=8,
        tokens_per_batch=None,
        learning_rate=1e-2,
        stretch=4,
        band=1,
        warmup=20,
    )
    results = carry(study, tmp_path / "out", data=folder)
    for result in results:
        metrics = result["metrics"]
        # a model that says nothing has 1 of both; the test split has the words of the training
        assert metrics["test/letter_error"] < 0.8 and metrics["test/word_error"] < 0.97, result["arm"]
        assert metrics["train/letter_error"] < 0.8
