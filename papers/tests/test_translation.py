"""Translation: BLEU against sacrebleu, DeepNorm against its table, byte pairs that repeat, refusals by name, and a
run."""

import pytest
import sacrebleu
import torch
from headwise_papers.tasks.bleu import count_bleu, finish_bleu
from headwise_papers.tasks.byte_pairs import BEGIN, END, PAD, BytePairs
from headwise_papers.tasks.deep_norm import encoder_alone, encoder_and_decoder, initialise
from headwise_papers.tasks.transformer_layers import DecoderLayer, EncoderLayer, Residual
from headwise_papers.tasks.translation import Translation
from headwise_papers.tasks.translator import Translator, greedy
from made_up_data import write_multi30k
from small_studies import carry

import headwise
from headwise.lab.experiments.arm import read_arm
from headwise.lab.training.phases import carry_over
from headwise.study import Phase, Study, StudyError

PLACE = "headwise_papers.tasks.translation:Translation"
TINY = {"dim": 16, "depth": 1, "heads": 2, "mlp_dim": 32, "vocabulary": 280, "tokens_per_batch": 200, "longest": 40}


@pytest.fixture
def folder(tmp_path):
    return write_multi30k(tmp_path)


def test_bleu_of_parts_is_that_of_sacrebleu_on_the_whole():
    meant = [
        "A man in a red shirt is sitting.",
        "Two dogs play.",
        "A girl runs on the grass, smiling.",
        "Nobody's here",
    ]
    good = ["A man in a blue shirt sits there.", "Two dogs run and play.", "A girl runs on the grass.", ""]
    # no four words in a row are right, where sacrebleu smooths
    poor = ["A man and a red dog sit.", "Dogs play.", "A girl on grass runs and smiles.", "Nobody is here"]
    for said in (good, poor):
        parts = [count_bleu(said[at : at + 2], meant[at : at + 2]) for at in (0, 2)]
        sums = {name: parts[0][name] + parts[1][name] for name in parts[0]}
        assert 100 * finish_bleu(sums) == pytest.approx(sacrebleu.corpus_bleu(said, [meant]).score, abs=1e-9)
        assert finish_bleu(sums) > 0.01
    assert finish_bleu(count_bleu(meant, meant)) == pytest.approx(1.0)
    assert finish_bleu(count_bleu([""], ["A man."])) == 0.0
    with pytest.raises(ValueError, match="2 sentences were written for 1 references"):
        count_bleu(["A man.", "A dog."], ["A man."])


# Wang et al. 2022, arXiv 2203.00555, Figure 2: alpha and beta of encoders, decoders and both
@pytest.mark.parametrize("layers", [6, 18, 50])
def test_deep_norm_has_the_published_constants(layers):
    both = layers**5
    encoder, decoder = encoder_and_decoder(layers, layers)
    assert encoder.alpha == pytest.approx(0.81 * both ** (1 / 16)) and encoder.beta == pytest.approx(
        0.87 * both ** (-1 / 16)
    )
    assert decoder.alpha == pytest.approx((3 * layers) ** 0.25) and decoder.beta == pytest.approx(
        (12 * layers) ** -0.25
    )
    alone = encoder_alone(layers)
    assert alone.alpha == pytest.approx((2 * layers) ** 0.25) and alone.beta == pytest.approx((8 * layers) ** -0.25)


def test_deep_norm_draws_values_outputs_and_mlp_smaller_and_leaves_queries_and_keys():
    torch.manual_seed(0)
    layer = DecoderLayer(64, 4, 64, "deep", scale=2.0)
    initialise(layer, 0.5)
    layer.requires_grad_(False)
    plain = (2 / (64 + 64)) ** 0.5
    for attention in (layer.self_attn, layer.multihead_attn):
        q, k, v = attention.in_proj_weight.chunk(3)
        assert float(q.std()) == pytest.approx(plain, rel=0.05) and float(k.std()) == pytest.approx(plain, rel=0.05)
        assert float(v.std()) == pytest.approx(plain / 2, rel=0.05)
        assert float(attention.out_proj.weight.std()) == pytest.approx(plain / 2, rel=0.05)
    assert all(float(layer.mlp[at].weight.std()) == pytest.approx(plain / 2, rel=0.05) for at in (0, 2))


def test_the_three_places_of_a_norm_are_their_formulas():
    torch.manual_seed(0)
    x, linear = torch.randn(2, 3, 8), torch.nn.Linear(8, 8)

    def norm(y):
        return torch.nn.functional.layer_norm(y, (8,))

    torch.testing.assert_close(Residual(8, "pre")(x, linear), x + linear(norm(x)))
    torch.testing.assert_close(Residual(8, "post")(x, linear), norm(x + linear(x)))
    torch.testing.assert_close(Residual(8, "deep", 3.0)(x, linear), norm(3 * x + linear(x)))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_layers_are_those_of_torch(norm):
    torch.manual_seed(0)
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm == "pre")
    mine = EncoderLayer(8, 2, 16, norm)
    mine.self_attn.load_state_dict(theirs.self_attn.state_dict())
    mine.mlp[0].load_state_dict(theirs.linear1.state_dict())
    mine.mlp[2].load_state_dict(theirs.linear2.state_dict())
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = theirs(x, src_key_padding_mask=padding)
    torch.testing.assert_close(mine(x, padding)[~padding], expected[~padding], atol=1e-5, rtol=1e-5)


def test_layer_drop_leaves_branches_out_of_training_alone():
    layer, x = EncoderLayer(8, 2, 16, "pre", layer_drop=1.0), torch.randn(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    assert torch.equal(layer(x, padding), x)
    assert not torch.equal(layer.eval()(x, padding), x)


def translator(norm="post", **changes):
    torch.manual_seed(0)
    shape = {"dim": 16, "depth": 2, "heads": 2, "mlp_dim": 16, "norm": norm}
    return Translator(20, torch.zeros(4, dtype=torch.long), **shape | changes)


@pytest.mark.parametrize("norm", ["pre", "post", "deep"])
def test_a_token_sees_neither_what_follows_nor_padding(norm):
    model = translator(norm).eval()
    source, target = torch.randint(3, 20, (1, 6)), torch.randint(3, 20, (1, 5))
    whole = model(source, target)
    torch.testing.assert_close(model(source, target[:, :3]), whole[:, :3], atol=1e-5, rtol=1e-5)
    padded = torch.cat([source, torch.full((1, 4), PAD)], 1)
    torch.testing.assert_close(model(padded, target), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(source, target, model(source)), whole, atol=1e-5, rtol=1e-5)


def entropies(model, *batches):
    """Return the mean entropy of each layer and head over the tokens of several batches of one step."""
    watch = headwise.watch(model, every=1, closer=None, on_alert=None, statistics=["attention_entropy"])
    for source, target in batches:
        model(source, target)
    watch.step()
    found = {(record["site"], record["head"]): record["value"] for record in watch.records()}
    watch.remove()
    return found


def test_what_is_behind_a_sentence_counts_in_no_entropy_of_the_decoder():
    model, lengths = translator(), (6, 3)
    source, target = torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 6))
    target[:, 0], target[1, 3], target[1, 4:], source[1, 4:] = BEGIN, END, PAD, PAD
    alone = [(source[at : at + 1, : (6, 4)[at]], target[at : at + 1, : lengths[at]]) for at in (0, 1)]
    found = entropies(model, (source, target))
    assert len(found) == 6 * 2
    assert found == pytest.approx(entropies(model, *alone), rel=1e-4)


class Script(torch.nn.Module):
    """Score the next token of a fixed text the highest."""

    def forward(self, source, target=None, memory=None):
        text = torch.tensor([[5, END, 7, 7], [6, 6, 6, END]])
        return source if target is None else torch.nn.functional.one_hot(text[:, : target.shape[1]], 9).float()


def test_greedy_decoding_begins_stops_and_pads():
    source = torch.ones(2, 3, dtype=torch.long)
    assert greedy(Script(), source, 9).tolist() == [[5, END, PAD, PAD], [6, 6, 6, END]]
    assert greedy(Script(), source, 2).tolist() == [[5, END], [6, 6]]


def test_byte_pairs_repeat_and_give_sentences_back(folder):
    lines = ["Zwei junge weiße Männer sind im Freien.", "Ein Hund läuft."] * 5
    one, two = BytePairs(lines, 280), BytePairs(lines, 280)
    assert one.encode(lines) == two.encode(lines) and torch.equal(one.digest, two.digest)
    assert not torch.equal(one.digest, BytePairs([*lines, "Andere Wörter"] * 2, 280).digest)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in one.encode(lines[:2])], True, PAD)
    assert one.decode(tokens) == lines[:2]
    assert min(min(ids) for ids in one.encode(lines)) == END and BEGIN not in tokens


def test_sizes_of_a_vocabulary_that_cannot_be_are_refused():
    with pytest.raises(StudyError, match="vocabulary=100 holds fewer than the 259"):
        BytePairs(["one two"], 100)
    with pytest.raises(StudyError, match="vocabulary=2000, and the training text has only"):
        BytePairs(["one two"] * 9, 2000)


def test_a_sentence_longer_than_the_limit_is_refused_with_its_line(folder):
    path = folder / "multi30k" / "train.de"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[16] = " ".join(["sieben"] * 60)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(
        StudyError, match="1 sentences of the source of train have more than longest=40 tokens, first in line 17"
    ):
        Translation(**TINY).located(folder).data("train")


def test_a_pair_larger_than_a_batch_is_refused(folder, tmp_path):
    with pytest.raises(StudyError, match="more than tokens_per_batch=5"):
        carry(a_study(folder, tokens_per_batch=5), tmp_path / "out", data=folder)


def test_a_checkpoint_of_another_vocabulary_is_refused():
    mine, other = translator(), translator()
    other.digest += 1
    with pytest.raises(StudyError, match="`digest` differs from this model's"):
        carry_over(Phase("adapt"), mine, other.state_dict(), "a folder")
    larger = Translator(21, mine.digest, dim=16, depth=2, heads=2, mlp_dim=16, norm="post")
    with pytest.raises(StudyError, match=r"words.weight is \(21, 16\), the model's \(20, 16\)"):
        carry_over(Phase("adapt"), mine, larger.state_dict(), "a folder")
    carry_over(Phase("adapt"), mine, translator().state_dict(), "a folder")


def test_smoothing_is_of_training_alone(folder):
    task = Translation(**TINY).located(folder)
    batch = task.batch(task.data("test"), None)
    assert batch.inputs["target"][:, 0].eq(BEGIN).all() and torch.equal(
        batch.inputs["target"][:, 1:], batch.targets[:, :-1]
    )
    scores = 5 * torch.randn(*batch.targets.shape, 280)
    sums = task.count(scores, batch.targets)
    plain = task.model_copy(update={"label_smoothing": 0.0}).loss(scores, batch.targets)
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(float(plain), rel=1e-5)
    assert float(task.loss(scores, batch.targets)) != pytest.approx(float(plain), rel=1e-3)


def test_steps_follow_from_the_depth_where_their_product_is_given():
    task = Translation(**TINY, layer_steps=600)
    assert task.steps == 600
    assert read_arm("baseline | depth=18", task).task(task).steps == 33
    assert read_arm("baseline | depth=18, steps=7", Translation(**TINY)).task(Translation(**TINY)).steps == 7
    fewer = Translation(**TINY, layer_steps=600, deep_layer_steps=180)
    assert [read_arm(f"baseline | depth={depth}", fewer).task(fewer).steps for depth in (6, 20, 30)] == [100, 30, 6]


def a_study(folder, methods=(), **settings):
    task = Translation(**TINY | settings).located(folder)
    arms = tuple(read_arm(text, task).text for text in methods)
    return Study(name="translation", title="T", question="Q?", task=task, task_place=PLACE, methods=arms, seeds=1)


@pytest.mark.grid
def test_a_small_translator_learns_to_count(tmp_path):
    folder = write_multi30k(tmp_path, count=120)
    study = a_study(
        folder,
        ('SigmaReparam(layers="all") | norm=deep',),
        epochs=20,
        learning_rate=1e-2,
        warmup=20,
        translated=50,
        head_statistics=("attention_entropy",),
    )
    for result in carry(study, tmp_path / "out", data=folder):
        metrics = result["metrics"]
        # an untrained one has 0 and log(280) = 5.6 nats
        assert metrics["test/greedy/bleu"] > 0.03, result["arm"]
        assert metrics["test/loss"] < 2.0
        # in nats, of the encoder's, the decoder's own and its cross attention
        entropies = [name for name in metrics if name.startswith("heads/attention_entropy/") and "head " not in name]
        assert len(entropies) == 5 and all(0 <= metrics[name] < 4 for name in entropies), entropies
