"""What regularize() and its handle refuse: a clear error, and the model untouched bit for bit and key for key."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from small_models import HOSTS
from torch import nn
from untouched import fresh, same, untouched

import headwise
from headwise import AttnScale, DropHead, DropKey, GatedOutput, NeuTRENO, QKClip, RelaxedAttention
from headwise.attend.attention import computation as core
from headwise.attend.attention import softmax
from headwise.attend.core.method import Method

LAYERS = r"blocks\.0\.attn, blocks\.1\.attn, blocks\.2\.attn"


class Exploding(Method):
    """Raises while it is built on the last layer."""

    no_neutral = "it never gets that far"
    learns = True

    def build(self, site, state):
        state.parameter("gain", torch.zeros(1))
        if site.depth == site.layers - 1:
            raise ValueError("no room left")


class Branching(Method):
    """Acts after an output projection."""

    no_neutral = "a test's own"

    def branch(self, y, call):
        return y


class WithoutProjection(nn.Module):
    """An attention layer that ends with its heads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv = 4, nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


REFUSED = {
    "no module": ((lambda m: "model", [DropHead()], {}), TypeError, "takes a torch module first, got str"),
    "no method": ((None, [], {}), ValueError, r"needs at least one method, such as headwise\.DropHead\(p=0\.2\)"),
    "a text": ((None, ["DropHead"], {}), TypeError, "takes methods, got 'DropHead'"),
    "a class": ((None, [DropHead], {}), TypeError, r"pass DropHead\(\) with parentheses"),
    "the same twice": (
        (None, [DropHead(p=0.2), DropHead(p=0.2)], {}),
        ValueError,
        r"DropHead\(p=0\.2\) is given twice",
    ),
    "an unknown layer": (
        (None, [DropHead()], {"where": ["blocks.1.atn"]}),
        ValueError,
        rf"There is no attention layer 'blocks\.1\.atn'\. Did you mean 'blocks\.1\.attn'\? Layers: {LAYERS}",
    ),
    "a far name": (
        (None, [DropHead()], {"where": "zebra"}),
        ValueError,
        rf"There is no attention layer 'zebra'\. Layers: {LAYERS}",
    ),
    "no layer left": (
        (None, [DropHead()], {"where": lambda site: False}),
        ValueError,
        r"no attention layer is left for DropHead\(p=0\.2\):\nblocks\.0\.attn: skipped: by where",
    ),
    "learning without an example": (
        (None, [AttnScale(), GatedOutput()], {}),
        ValueError,
        r"GatedOutput\(.*\) learns parameters whose shapes on blocks\.0\.attn cannot be known .*: pass "
        r"example=batch|AttnScale",
    ),
    "an example that does not fit": (
        (None, [DropHead()], {"example": torch.zeros(2, 3, 7)}),
        ValueError,
        r"the model did not run on example \(RuntimeError: .*Given normalized_shape=\[32\]",
    ),
    "building fails": ((None, [Exploding()], {"example": torch.randn(2, 5, 32)}), ValueError, "no room left"),
    "carrying to the first alone": (
        (None, [NeuTRENO()], {"where": ["blocks.0.attn"]}),
        ValueError,
        "changes nothing on the first self attention of a stack, and no layer above it was chosen",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_says_why_and_changes_nothing(case):
    (choose, methods, settings), kind, message = REFUSED[case]
    model = fresh()
    before = untouched(model)
    with pytest.raises(kind, match=message):
        headwise.regularize(choose(model) if choose else model, *methods, **settings)
    same(before, untouched(model))
    with pytest.raises(ValueError, match=r"Own is not regularized: call headwise\.regularize"):
        headwise.handle(model)
    # And nothing stands in the way of the right call.
    handle = headwise.regularize(model, DropHead(p=0.5))
    handle.remove()
    same(before, untouched(model))


@pytest.mark.parametrize("host", ["own", "llama", "bert-padded", "torch"])
def test_a_failure_half_way_changes_nothing_on_any_host(host):
    model = fresh(host)
    before = untouched(model)
    with pytest.raises(ValueError, match="no room left"):
        headwise.regularize(model, DropKey(), Exploding(), AttnScale(), example=HOSTS[host].example())
    same(before, untouched(model))


def test_a_missing_output_projection_is_named_and_nothing_stays():
    model = nn.Sequential(WithoutProjection(), WithoutProjection())
    x = torch.randn(2, 5, 32)
    before = untouched(model)
    with pytest.raises(ValueError, match="needs the output projection; 0 has no output projection"):
        headwise.regularize(model, Branching(), example=x)
    same(before, untouched(model))


def test_a_model_without_attention_says_what_was_looked_for():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    before = untouched(model)
    with pytest.raises(
        ValueError, match=r"Sequential has no attention layer that headwise can see: no nn\.MultiheadAttention"
    ):
        headwise.regularize(model, DropHead())
    same(before, untouched(model))


class ByHand(nn.Module):
    """Computes its softmax itself."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def test_a_softmax_by_hand_is_found_though_its_class_does_not_say_attention():
    model = nn.Sequential(ByHand())
    before = untouched(model)
    with pytest.raises(ValueError, match=r"0 \(ByHand\) cannot be reached: it computes its own attention"):
        headwise.regularize(model, DropHead())
    same(before, untouched(model))
    both = nn.Sequential(ByHand(), fresh().blocks[0])
    handle = headwise.regularize(both, DropHead())
    assert [(row.name, row.status) for row in handle.report().rows] == [("0", "unreachable"), ("1.attn", "regularized")]
    handle.remove()


@pytest.mark.bits
@pytest.mark.parametrize("host", ["own", "llama", "torch"])
def test_regularizing_twice_is_refused_and_leaves_the_first(host):
    model = fresh(host)
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    out, before = HOSTS[host].run(model), untouched(model)
    for again in (model, nn.Sequential(model), nn.ModuleDict({"inner": model})):
        with pytest.raises(
            ValueError, match=r"is regularized already with Regularized\(RelaxedAttention\(gamma=1\.0\), \d sites\)"
        ):
            headwise.regularize(again, DropHead())
    same(before, untouched(model))
    assert torch.equal(HOSTS[host].run(model), out)
    handle.remove()


@pytest.mark.parametrize("host", ["own", "llama", "torch"])
def test_regularizing_a_part_of_a_regularized_model_is_refused(host):
    model = fresh(host)
    handle = headwise.regularize(model, RelaxedAttention(gamma=1.0))
    before = untouched(model)
    part = model.get_submodule(handle.fitted[1].site.name.rpartition(".")[0])
    with pytest.raises(ValueError, match=r"is part of a model that is regularized already with Regularized\(Relaxed"):
        headwise.regularize(part, DropHead())
    same(before, untouched(model))
    handle.remove()
    part_handle = headwise.regularize(part, DropHead())
    part_handle.remove()


def test_a_method_named_for_a_layer_where_it_has_no_meaning_is_refused():
    model = fresh()
    before = untouched(model)
    model.blocks[1].attn.q_norm = nn.LayerNorm(8)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn: QKClip would change nothing: the host normalises"):
        headwise.regularize(model, QKClip(), where=["blocks.1.attn"])
    del model.blocks[1].attn.q_norm
    same(before, untouched(model))


def test_importing_headwise_routes_nothing():
    assert F.scaled_dot_product_attention is softmax.fused
    assert "headwise.attend.hosts.sdpa.adapter" in sys.modules
    assert Path(core.__file__).name == "computation.py"


def test_a_copy_of_a_regularized_model_is_refused_as_the_model_is():
    model = fresh()
    handle = headwise.regularize(model, DropHead(p=0.2))
    twin = copy.deepcopy(model)
    handle.remove()
    with pytest.raises(
        ValueError, match=re.escape("the model is regularized already with Regularized(DropHead(p=0.2), 3 sites)")
    ):
        headwise.regularize(twin, DropHead())
    headwise.handle(twin).remove()
    headwise.regularize(twin, DropHead()).remove()


@pytest.mark.parametrize("where", [[0], [None], ["blocks.0.attn", 1]], ids=str)
def test_layers_are_named_by_text(where):
    model = fresh()
    before = untouched(model)
    with pytest.raises(
        TypeError,
        match=r"where takes names of layers, got (0|None|1): write 'blocks\.0\.attn', or choose by depth, where=lambda",
    ):
        headwise.regularize(model, DropHead(p=0.2), where=where)
    same(before, untouched(model))


@pytest.mark.parametrize("reason", ["DropHead needs heads of equal size", "needs heads of equal size"])
def test_a_refusal_names_the_method_once(monkeypatch, reason):
    from headwise.attend.regularizing import plan

    monkeypatch.setattr(plan, "refusal", lambda method, site: reason)
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    with pytest.raises(ValueError, match=r"not applicable: DropHead needs heads of equal size"):
        headwise.regularize(model, DropHead(p=0.1))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers", r"no argument 'layers': choose layers with where="),
        ("target_modules", "choose layers with where="),
        ("batch", "pass a batch as example=batch"),
        ("method", "methods come after the model"),
        ("strength", "its arguments: model, methods, where, example, seed, allow_none, attention"),
    ],
)
def test_an_argument_of_another_name_is_told_with_the_one_that_serves(name, words):
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    with pytest.raises(TypeError, match=words):
        headwise.regularize(model, headwise.DropHead(p=0.2), **{name: 1})
    assert not hasattr(model, "headwise")


def test_layers_of_a_watch_and_of_a_callback_are_told_to_be_where():
    pytest.importorskip("transformers")
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    with pytest.raises(TypeError, match=r"watch\(\) has no argument 'layers': choose layers with where="):
        headwise.watch(model, layers=[0])
    with pytest.raises(TypeError, match=r"HeadwiseCallback\(\) has no argument 'layers': choose layers with where="):
        headwise.HeadwiseCallback(headwise.DropHead(p=0.2), layers=[0])
    with pytest.raises(TypeError, match=r"its arguments: model, every, .*, keep_in$"):
        headwise.watch(model, interval=5)


def test_a_handle_offers_what_users_call():
    handle = headwise.regularize(torch.nn.MultiheadAttention(16, 2, batch_first=True), headwise.DropHead(p=0.2))
    offered = {name for name in dir(handle) if not name.startswith("_")}
    assert {"loss", "after_step", "report", "set", "fold", "remove", "save_pretrained", "step", "fitted"} <= offered
    assert not {"aside", "checked", "hooks", "seen_training", "shared"} & offered


class UntoldShapes(torch.nn.Module):
    """Attends without a word about heads."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


def test_twelve_equal_layers_are_told_in_one_line():
    model = torch.nn.Sequential(*(UntoldShapes() for _ in range(12)))
    with pytest.raises(ValueError, match=r"^0 to 11 \(12 layers\): GatedOutput.*pass example=batch") as told:
        headwise.regularize(model, headwise.GatedOutput())
    assert len(str(told.value).splitlines()) == 1


def test_the_model_itself_is_named_where_it_is_the_layer():
    with pytest.raises(ValueError, match="the model: not applicable: DropHead always keeps one head"):
        headwise.regularize(torch.nn.MultiheadAttention(8, 1), headwise.DropHead())
