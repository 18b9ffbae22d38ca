"""Packed and padding-free rows: every method, penalty, draw and statistic is that of the same sequences in a padded
batch."""

from __future__ import annotations

import copy
import itertools

import backend_functions
import pytest
import torch
import torch.nn.functional as F
from backend_functions import use
from grids import part_of_grid
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    CTRLConfig,
    CTRLModel,
    DataCollatorWithFlattening,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import headwise
from headwise import (
    LSA,
    BranchDrop,
    ContraNorm,
    Decorrelation,
    Disagreement,
    DropHead,
    DropKey,
    EntropyPenalty,
    FeatScale,
    InputNoise,
    NeuTRENO,
    RelaxedAttention,
    ValueResidual,
    ZLoss,
)
from headwise.attend.core.method import REGISTRY
from headwise.attend.core.packed import Packed
from headwise.health.statistics import STATISTICS

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
}
LENGTHS = (5, 9, 1, 3)
# Beside the strong setting of every class: the settings that make another computation.
MORE = [
    DropKey(p=0.5, unit="element"),
    Decorrelation(strength=10.0, probes=4),
    Disagreement(on="position"),
    Disagreement(on="values"),
    EntropyPenalty(strength=1.0, target=0.9, band=0.05),
    EntropyPenalty(strength=1.0, head_mean=True),
    InputNoise(scale=1.0, unit="mad", over="batch"),
    InputNoise(scale=1.0, unit="median"),
]
# Without a meaning on causal layers: tried on a bidirectional model.
BIDIRECTIONAL = [FeatScale(), LSA(), RelaxedAttention(gamma=0.7), ContraNorm(strength=1.0, norm=True), DropKey(p=0.5)]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    backend_functions.put_in_place(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return sharpened(LlamaForCausalLM(LlamaConfig(**SMALL)))


def sharpened(model):
    """Give a model weights under which logits, branches and values are far from 0."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def sequences():
    torch.manual_seed(1)
    return [torch.randint(1, 60, (n,)) for n in LENGTHS]


def padded():
    longest = max(LENGTHS)
    return {
        "input_ids": torch.stack([F.pad(s, (0, longest - len(s))) for s in sequences()]),
        "attention_mask": torch.stack([torch.arange(longest) < n for n in LENGTHS]).long(),
    }


def packed(bounds=False):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    batch = collator([{"input_ids": s.tolist()} for s in sequences()])
    return {name: x for name, x in batch.items() if name != "labels"}


def train(model, kind, methods, given, attention=None):
    """Make one step on a copy of a model: outputs at real tokens, loss with penalties, gradients, and the weights after
    the step."""
    twin = use(copy.deepcopy(model).train(), kind)
    handle = headwise.regularize(twin, *methods, attention=attention)
    out = twin(**given, use_cache=False)[0]
    mask = given.get("attention_mask")
    out = out[mask.bool()] if mask is not None and mask.dim() == 2 else out.flatten(0, 1)[: sum(LENGTHS)]
    loss = out.square().mean() + handle.loss()
    loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    handle.after_step()
    states = {name: x.detach() for name, x in twin.state_dict().items()}
    return out.detach(), loss.detach(), gradients, states


def same(found, expected, tolerance):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def every_method():
    strong = [cls(**cls.strong) for cls in REGISTRY.values() if cls.__module__.startswith("headwise.attend.methods")]
    return [m for m in [*strong, *MORE] if type(m) not in (FeatScale, LSA)]


EVERY = every_method()


def on_kernel(method):
    return not (method.overrides("logits") or method.overrides("weights"))


# one of each kind: on weights, on logits, a penalty, carried values, beside the call, in place of a weight
KINDS = ("DropHead", "DropKey", "EntropyPenalty", "NeuTRENO", "QKNorm", "SigmaReparam", "QKClip")


@pytest.mark.parametrize(
    "method", part_of_grid(EVERY, [method for method in EVERY if type(method).__name__ in KINDS]), ids=repr
)
def test_every_method_does_on_packed_rows_what_it_does_on_a_padded_batch(llama, method):
    # In fp64, where torch's own kernels leave nothing but rounding.
    model = copy.deepcopy(llama).double()
    kept = ("flash_attention_2", None) if on_kernel(method) else ("flash_attention_2", "headwise")
    for kind, attention in (("sdpa", None), kept):
        expected = train(model, kind, [method], padded(), attention)
        for bounds in (False, True) if kind != "sdpa" else (False,):
            same(train(model, kind, [method], packed(bounds), attention), expected, 1e-12)


@pytest.mark.grid
@pytest.mark.parametrize("method", every_method(), ids=repr)
@pytest.mark.parametrize(
    "kind", ["eager", "flash_attention_3", "flash_attention_4", "kernels-community/flash-attn2", "users_own"]
)
def test_every_method_on_every_implementation(llama, kind, method):
    # In fp64 too: a strong penalty has gradients of which fp32 rounds off more than an absolute tolerance allows.
    model = copy.deepcopy(llama).double()
    attention = None if on_kernel(method) else "headwise"
    expected = train(model, kind, [method], padded(), attention)
    # transformers' eager attention takes its softmax in fp32, whatever the model's dtype
    same(train(model, kind, [method], packed(), attention), expected, 5e-6 if kind == "eager" else 1e-12)


@pytest.mark.parametrize("method", BIDIRECTIONAL, ids=repr)
def test_methods_of_bidirectional_layers_stay_within_their_sequence(method):
    torch.manual_seed(0)
    config = BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=20)
    model = sharpened(BertModel(config, add_pooling_layer=False)).double()
    attention = None if on_kernel(method) else "headwise"
    found = []
    for given in (padded(), packed(bounds=True)):
        twin = use(copy.deepcopy(model).train(), "flash_attention_2")
        handle = headwise.regularize(twin, method, attention=attention)
        out = twin(**given)[0]
        out = out[given["attention_mask"].bool()] if "attention_mask" in given else out[0]
        (out.square().mean() + handle.loss()).backward()
        found.append((out.detach(), twin.encoder.layer[0].attention.self.value.weight.grad))
    same(found[1], found[0], 1e-12)


def records(model, kind, given, methods=()):
    twin = use(copy.deepcopy(model).train(), kind)
    if methods:
        headwise.regularize(twin, *methods)
    watch = headwise.watch(twin, every=1, statistics=list(STATISTICS))
    twin(**given, use_cache=False)
    watch.step()
    found = {(r["site"], r["head"], r["statistic"]): r["value"] for r in watch.records()}
    watch.remove()
    return found


@pytest.mark.parametrize("kind", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("methods", [(), (DropHead(p=0.5), NeuTRENO(strength=0.6))], ids=["alone", "with methods"])
def test_every_statistic_of_packed_rows_is_that_of_the_padded_batch(llama, kind, methods):
    expected, found = records(llama, kind, padded(), methods), records(llama, kind, packed(), methods)
    assert found.keys() == expected.keys()
    # Statistics of weights' products with rotary positions between them, and of windows, have no meaning on this model.
    assert len({name for _, _, name in found}) >= 20
    same(list(found.values()), list(expected.values()), 1e-5)


def test_flex_attention_itself_reads_and_edits_packed_rows_within_their_sequence(llama):
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("warnings.filters", [("ignore", None, UserWarning, None, 0)])
        for methods in ([ContraNorm(strength=1.0)], [ValueResidual(), DropHead(p=0.5)], [BranchDrop(p=0.5)]):
            outs = []
            for given in (padded(), packed()):
                twin = use(copy.deepcopy(llama).train(), "flex_attention")
                headwise.regularize(twin, *methods)
                out = twin(**given, use_cache=False).logits
                outs.append(out[given["attention_mask"].bool()] if "attention_mask" in given else out[0])
            same(outs[1], outs[0], 1e-5)


def test_windows_are_counted_within_each_sequence():
    torch.manual_seed(0)
    config = Gemma2Config(
        **SMALL, head_dim=8, sliding_window=3, attn_logit_softcapping=5.0, query_pre_attn_scalar=8, pad_token_id=0
    )
    model = sharpened(Gemma2ForCausalLM(config)).double()
    for kind in ("eager", "flash_attention_2"):
        methods = [EntropyPenalty(strength=1.0), ZLoss(strength=0.1), ContraNorm(strength=1.0)]
        expected, found = (train(model, kind, methods, given)[:2] for given in (padded(), packed()))
        same(found, expected, 1e-6)


def test_checkpointed_layers_see_the_same_sequences_again(llama):
    methods, model = (
        [DropHead(p=0.5), EntropyPenalty(strength=1.0), NeuTRENO(strength=0.6)],
        copy.deepcopy(llama).double(),
    )
    expected = train(model, "flash_attention_2", methods, padded())
    model.activation_checkpointing_enable({"use_reentrant": False})
    same(train(model, "flash_attention_2", methods, packed()), expected, 1e-12)


def test_checkpointed_layers_of_two_forwards_see_the_padding_of_their_own(llama):
    model, found = copy.deepcopy(llama).double().train(), []
    model.config.pad_token_id = 0
    first, second = packed_and_padded("positions of 0", "sdpa"), packed_and_padded("positions of 0", "sdpa")
    second["input_ids"][0, 15:] = 0
    for checkpointed in (False, True):
        twin = copy.deepcopy(model)
        if checkpointed:
            twin.activation_checkpointing_enable({"use_reentrant": False})
        handle = headwise.regularize(twin, DropHead(p=0.5), EntropyPenalty(strength=1.0))
        loss = sum(twin(**given, use_cache=False).logits[0, :15].square().mean() for given in (first, second))
        (loss + handle.loss()).backward()
        found.append(twin.model.embed_tokens.weight.grad)
    same(found[1], found[0], 1e-12)


def test_two_rows_of_several_sequences_are_told_apart_on_sdpa(llama):
    tokens = torch.cat(sequences())
    rows = {
        "input_ids": tokens.view(2, 9),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0, 1, 2]]),
    }
    starts = [0, 5, 9, 14, 15, 18]
    parts = [tokens[a:b] for a, b in itertools.pairwise(starts)]
    whole = {
        "input_ids": torch.stack([F.pad(p, (0, 5 - len(p))) for p in parts]),
        "attention_mask": torch.stack([torch.arange(5) < len(p) for p in parts]).long(),
    }
    model = copy.deepcopy(llama).double()
    methods = [DropHead(p=0.5), EntropyPenalty(strength=1.0), ContraNorm(strength=1.0)]
    same(train(model, "sdpa", methods, rows), train(model, "sdpa", methods, whole), 1e-12)


def test_layers_that_are_not_handed_the_positions_see_the_sequences_of_their_model():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 32}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop"), 0.0)
    model = sharpened(CTRLModel(CTRLConfig(**sizes, **off))).double()
    for methods in ([DropHead(p=0.5)], [ContraNorm(strength=1.0)], [EntropyPenalty(strength=1.0)]):
        same(train(model, "sdpa", methods, packed()), train(model, "sdpa", methods, padded()), 1e-12)


@pytest.mark.parametrize("bounds", [False, True])
def test_a_users_function_without_masks_is_told_as_flash_kernels_are(llama, bounds):
    AttentionInterface._global_mapping["varlen"] = backend_functions.varlen_function
    AttentionMaskInterface._global_mapping["varlen"] = AttentionMaskInterface._global_mapping["flash_attention_2"]
    model = copy.deepcopy(llama).double()
    for methods in ([DropHead(p=0.5)], [ContraNorm(strength=1.0)], [EntropyPenalty(strength=1.0)]):
        expected = train(model, "sdpa", methods, padded())
        same(train(model, "varlen", methods, packed(bounds)), expected, 1e-12)


def test_a_users_function_that_looks_across_sequences_is_told_what_it_needs(llama):
    AttentionInterface._global_mapping["unmasked"] = backend_functions.user_function
    message = r"layers\.0\.self_attn .* packed row needs use_cache=False and a mask function \(AttentionMaskInterface"
    with pytest.raises(RuntimeError, match=message):
        train(llama, "unmasked", [EntropyPenalty(strength=1.0)], packed())
    # The remedy works.
    AttentionMaskInterface._global_mapping["unmasked"] = AttentionMaskInterface._global_mapping["sdpa"]
    model = copy.deepcopy(llama).double()
    found, expected = (
        train(model, "unmasked", [EntropyPenalty(strength=1.0)], given) for given in (packed(), padded())
    )
    same(found, expected, 1e-12)


def test_a_function_with_flash_in_its_name_may_take_masks(llama):
    AttentionInterface._global_mapping["my_flash"] = backend_functions.user_function
    AttentionMaskInterface._global_mapping["my_flash"] = AttentionMaskInterface._global_mapping["sdpa"]
    model = copy.deepcopy(llama).double()
    for methods in ([DropHead(p=0.5)], [ContraNorm(strength=1.0)], [EntropyPenalty(strength=1.0)]):
        same(train(model, "my_flash", methods, packed()), train(model, "sdpa", methods, padded()), 1e-12)


def test_positions_that_start_again_behind_padding_make_no_sequences(llama):
    given = padded()
    given = {name: x.flip(1) for name, x in given.items()}
    positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for kind in ("sdpa", "flash_attention_2"):
        twin = use(copy.deepcopy(llama).train(), kind)
        handle = headwise.regularize(twin, DropHead(p=0.5))
        twin(**given, position_ids=positions, use_cache=False)
        assert handle.fitted[0].packing.look() is None


PADDED_ROWS = {
    "positions of 0": [0, 0, 0],
    "a sequence of its own": [0, 1, 2],
    "bounds": [0, 0, 0],
    "hidden": [0, 0, 0],
    "hidden, with positions that go on": [3, 4, 5],
    "looking back": [0, 0, 0],
}


def packed_and_padded(how, kind):
    """Return the packed row with three tokens of padding behind it."""
    row, tail = packed(), torch.tensor([PADDED_ROWS[how]])
    row = {"input_ids": F.pad(row["input_ids"], (0, 3)), "position_ids": torch.cat([row["position_ids"], tail], 1)}
    total = row["input_ids"].shape[1]
    if how == "bounds":
        starts = (row["position_ids"][0] == 0).nonzero()[:, 0]
        bounds = torch.cat([starts, torch.tensor([total])]).int()
        longest = int(bounds.diff().max())
        row |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        row |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
    if how.startswith(("hidden", "looking")):
        sequence = torch.cat([torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)), torch.full((3,), -1)])
        seen = (sequence[:, None] == sequence) & (sequence >= 0)
        if how == "looking back":
            seen |= sequence[:, None] < 0
        seen = (seen & torch.ones(total, total, dtype=torch.bool).tril())[None, None]
        # The eager functions add their mask.
        row["attention_mask"] = (~seen).double() * -1e30 if kind == "eager" else seen
    return row


@pytest.mark.parametrize("how", PADDED_ROWS)
def test_padding_behind_packed_sequences_takes_no_part(llama, how):
    model = copy.deepcopy(llama).double()
    # The token that is behind the sequences; where a mask hides the padding it need not be known.
    model.config.pad_token_id = None if how.startswith("hidden") else 0
    methods = [
        DropHead(p=0.5),
        EntropyPenalty(strength=1.0),
        NeuTRENO(strength=0.6),
        InputNoise(scale=1.0, over="batch"),
    ]
    masked = how.startswith(("hidden", "looking"))
    for kind in ("sdpa", "eager", "users_own") if masked else ("flash_attention_2",):
        row = packed_and_padded(how, kind)
        for chosen in (methods, [ContraNorm(strength=1.0)]):
            # The eager functions round their weights to fp32.
            tolerance = 1e-5 if kind == "eager" else 1e-12
            same(train(model, kind, chosen, row), train(model, kind, chosen, padded()), tolerance)
        expected, found = (records(model, kind, given) for given in (padded(), row))
        assert found.keys() == expected.keys()
        same(list(found.values()), list(expected.values()), 1e-5)


def test_sequences_of_one_token_at_the_end_are_sequences_where_they_hold_no_padding(llama):
    twin = copy.deepcopy(llama).train()
    twin.config.pad_token_id = 0
    handle = headwise.regularize(twin, DropHead(p=0.5))
    twin(torch.tensor([[3, 4, 5, 0, 6, 0, 0]]), position_ids=torch.tensor([[0, 1, 2, 0, 0, 0, 0]]), use_cache=False)
    assert handle.fitted[0].packing.look().lengths.tolist() == [3, 1, 1]


def test_a_mask_that_looks_across_sequences_makes_them_one(llama):
    given = packed() | {"attention_mask": torch.ones(1, 1, sum(LENGTHS), sum(LENGTHS), dtype=torch.bool).tril()}
    twin = copy.deepcopy(llama).train()
    handle = headwise.regularize(twin, DropHead(p=0.5))
    twin(**given, use_cache=False)
    assert handle.fitted[0].packing.look() is None


def test_bounds_that_do_not_fit_the_row_are_refused_by_name(llama):
    twin = use(copy.deepcopy(llama).train(), "flash_attention_2")
    headwise.regularize(twin, DropHead(p=0.5))
    given = packed(bounds=True)
    given["cu_seq_lens_q"] = given["cu_seq_lens_q"] - 1
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn is called with cu_seq_lens_q = .*where="):
        twin(**given, use_cache=False)


@pytest.mark.grid
def test_packed_rows_in_a_compiled_graph_are_refused_by_name(llama):
    twin = copy.deepcopy(llama).train()
    headwise.regularize(twin, DropHead(p=0.5))
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    rows = packed()
    plain = rows | {"position_ids": torch.arange(sum(LENGTHS))[None]}
    compiled(**plain, use_cache=False)
    with pytest.raises(
        RuntimeError,
        match=r"layers\.0\.self_attn is called on rows that hold several sequences inside a compiled.*mlp\.compile",
    ):
        compiled(**rows, use_cache=False)


def test_what_is_compiled_beside_attention_sees_the_same_packed_rows(llama):
    methods, found = [DropHead(p=0.5), EntropyPenalty(strength=1.0)], []
    for compiled in (False, True):
        twin = copy.deepcopy(llama).double().train()
        handle = headwise.regularize(twin, *methods)
        for layer in twin.model.layers if compiled else ():
            layer.mlp.compile(backend="eager", fullgraph=True)
        found.append((twin(**packed(), use_cache=False).logits, handle.loss()))
    same(found[1], found[0], 1e-12)


@pytest.mark.parametrize("bounds", [False, True])
def test_with_a_cache_masks_let_sequences_see_each_other_and_methods_take_the_row_as_one(llama, bounds):
    # transformers' own masks look at positions only where there is no cache
    twin = copy.deepcopy(llama).train()
    handle = headwise.regularize(twin, DropHead(p=0.5))
    twin(**packed(bounds), use_cache=True)
    assert handle.fitted[0].packing.look() is None


def test_what_is_unpacked_is_packed_again():
    first, padding = torch.zeros(2, 1, 9, dtype=torch.bool)
    first[0, [0, 3, 4]] = True
    for behind in (0, 2):
        padding[0, 9 - behind :] = behind > 0
        packing = Packed.of_starts(first, padding)
        assert packing.sequences == 3
        assert packing.longest == 5 - behind
        x = torch.randn(1, 9, 2)
        laid = packing.unpack(x)
        assert laid.shape == (3, 5 - behind, 2)
        assert torch.equal(laid[0, :3], x[0, :3])
        assert not laid[0, 3:].any()
        assert torch.equal(packing.pack(laid), x.masked_fill(padding[..., None], 0))
        weights = packing.pack_matrix(torch.ones(3, 1, 5 - behind, 5 - behind))[0, 0]
        sequence = first[0].cumsum(0)
        together = (sequence[:, None] == sequence) & ~padding[0] & ~padding[0][:, None]
        assert torch.equal(weights, together.float())
    assert Packed.of_starts(first, torch.ones_like(padding)) is None


def test_attention_weights_of_packed_rows_come_back_as_those_of_the_row(llama):
    weights = []
    for methods in ([], [RelaxedAttention(gamma=0.5)]):
        twin = copy.deepcopy(llama).train()
        if methods:
            headwise.regularize(twin, *methods)
        twin.set_attn_implementation("eager")
        weights.append(twin(**packed(), use_cache=False, output_attentions=True).attentions[0])
    plain, relaxed = weights
    assert relaxed.shape == plain.shape == (1, 4, sum(LENGTHS), sum(LENGTHS))
    seen = plain[0, 0] > 0
    uniform = seen / seen.sum(-1, keepdim=True)
    same(relaxed, 0.5 * plain + 0.5 * uniform, 1e-5)
