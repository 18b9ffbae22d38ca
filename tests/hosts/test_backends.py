"""Methods, penalties and readings around kernels of transformers' attention interface: the kernel stays, and figures
are those of sdpa."""

from __future__ import annotations

import copy
import re

import backend_functions
import pytest
import torch
from backend_functions import KINDS, use
from grids import part_of_grid
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    ContinuousBatchingConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import headwise
from headwise import (
    LASER,
    AttentionSink,
    ContraNorm,
    Decorrelation,
    DropColumn,
    DropHead,
    EntropyPenalty,
    GatedOutput,
    InputNoise,
    NeuTRENO,
    QKNorm,
    RelaxedAttention,
    SoftCap,
    SSMax,
    ValueNorm,
    ZLoss,
)

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 50,
}
AROUND = [
    DropHead(p=0.5),
    NeuTRENO(strength=0.6),
    GatedOutput(),
    GatedOutput(source="both", rank=3, per="element"),
    LASER(),
    ValueNorm(),
    ContraNorm(strength=1.0),
    InputNoise(scale=1.0, unit="std"),
    QKNorm(),
    SSMax(),
    AttentionSink(logit=1.0),
    EntropyPenalty(strength=1.0),
    ZLoss(strength=0.1),
    Decorrelation(strength=10.0),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    backend_functions.put_in_place(monkeypatch)


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def batch(padding="right"):
    torch.manual_seed(1)
    mask = torch.ones(3, 10, dtype=torch.long)
    for row, short in enumerate((0, 4, 7)):
        mask[row, 10 - short :] = 0
    mask = mask.flip(1) if padding == "left" else mask
    mask = torch.ones_like(mask) if padding == "none" else mask
    return {"input_ids": torch.randint(0, 50, (3, 10)), "attention_mask": mask}


def run(model, kind, methods, given, attention=None, grad=True):
    """Run a copy of a model once, and return what its real tokens give, its penalty and the names of the kernels that
    ran."""
    twin = use(copy.deepcopy(model).train(), kind)
    handle = headwise.regularize(twin, *methods, attention=attention)
    with torch.set_grad_enabled(grad):
        out = twin(**given, use_cache=False).logits
    loss = handle.loss()
    if grad:
        (out[given["attention_mask"].bool()].square().mean() + loss).backward()
    gradient = twin.model.embed_tokens.weight.grad
    ran = {name for fitted in handle.fitted for name in fitted.ran.names()}
    return out[given["attention_mask"].bool()].detach(), loss.detach(), gradient, ran


@pytest.mark.parametrize("method", part_of_grid(AROUND, AROUND[:5]), ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_methods_around_a_kernel_give_what_they_give_on_sdpa(llama, kind, method):
    # On a CPU flex attention has no backward.
    grad = kind != "flex_attention"
    for padding in ("right", "left"):
        expected = run(llama, "sdpa", [method], batch(padding), grad=grad)
        found = run(llama, kind, [method], batch(padding), grad=grad)
        torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-5)
        if grad:
            torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)
        # What acts on the branch alone leaves the call to the host as it is.
        assert found[3] == (set() if type(method) is ContraNorm else {"the host's"})


@pytest.mark.parametrize("kind", KINDS)
def test_watching_a_kernel_reads_what_it_reads_on_sdpa_and_changes_no_bit(llama, kind):
    read, logits = {}, {}
    for now in ("sdpa", kind):
        plain, twin = use(copy.deepcopy(llama), now), use(copy.deepcopy(llama), now)
        watch = headwise.watch(twin, every=1)
        with torch.no_grad():
            logits[now] = twin.train()(**batch(), use_cache=False).logits
            assert torch.equal(plain.train()(**batch(), use_cache=False).logits, logits[now])
        watch.step()
        read[now] = {(r["site"], r["head"], r["statistic"]): r["value"] for r in watch.records()}
        watch.remove()
    assert read[kind].keys() == read["sdpa"].keys()
    assert len(read[kind]) > 50
    torch.testing.assert_close(
        list(read[kind].values()), list(read["sdpa"].values()), rtol=1e-5, atol=1e-5, equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [DropColumn(), RelaxedAttention(gamma=0.5), SoftCap(cap=1.0)], ids=repr)
def test_what_edits_logits_or_weights_is_refused_by_name_and_runs_on_request(llama, kind, method):
    twin = use(copy.deepcopy(llama), kind)
    stage = "logits" if type(method) is SoftCap else "weights"
    message = (
        rf"layers\.0.*{type(method).__name__} edits the {stage} inside of '{re.escape(kind)}'.*attention=\"headwise\""
    )
    with pytest.raises(ValueError, match=message):
        headwise.regularize(twin, method)
    found = run(llama, kind, [method], batch(), attention="headwise")
    expected = run(llama, "sdpa", [method], batch())
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-4, atol=1e-5)
    assert "the host's" not in found[3]


def test_a_method_beside_a_refused_one_still_acts(llama):
    handle = headwise.regularize(use(copy.deepcopy(llama), "flash_attention_2"), DropHead(p=0.5), allow_none=True)
    assert handle.report().status("model.layers.0.self_attn") == "regularized"
    with pytest.raises(ValueError, match=r"DropColumn.*applies to none of the chosen sites: edits the weights"):
        headwise.regularize(use(copy.deepcopy(llama), "flash_attention_2"), DropHead(p=0.5), DropColumn())


def test_who_computes_the_attention_is_none_or_headwise(llama):
    with pytest.raises(ValueError, match=r"attention must be None.*or \"headwise\", got 'flash'"):
        headwise.regularize(copy.deepcopy(llama), DropHead(), attention="flash")
    # A layer without a kernel of the host's is computed by headwise either way.
    assert run(llama, "sdpa", [DropColumn()], batch(), attention="headwise")[3] == {"fused"}


@pytest.mark.parametrize("kind", ["flash_attention_2", "flash_attention_4", "users_own"])
def test_windows_soft_caps_and_sinks_are_those_of_the_kernel(kind):
    torch.manual_seed(0)
    windowed = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3))
    capped = Gemma2ForCausalLM(
        Gemma2Config(**SMALL, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=1, pad_token_id=0)
    )
    models = [(windowed, "sdpa"), (capped, "eager")]
    if kind != "users_own":
        sinking = GptOssForCausalLM(GptOssConfig(**SMALL, sliding_window=4, num_local_experts=2, num_experts_per_tok=1))
        torch.nn.init.normal_(sinking.model.layers[0].self_attn.sinks)
        models += [(sinking, "eager")] if kind == "flash_attention_4" else []
    for model, plain in models[: 1 if kind == "users_own" else None]:
        methods = [EntropyPenalty(strength=1.0), ZLoss(strength=0.1)]
        for padding in ("none", "right"):
            expected, found = (run(model, now, methods, batch(padding)) for now in (plain, kind))
            torch.testing.assert_close(found[:2], expected[:2], rtol=1e-4, atol=1e-4)
            assert found[3] == {"the host's"}


def test_a_users_function_that_does_more_than_it_is_told_is_refused_where_its_weights_are_read(llama, monkeypatch):
    def halved(module, query, key, value, attention_mask, **others):
        out, _ = backend_functions.user_function(module, query, key / 2, value, attention_mask, **others)
        return out, None

    AttentionInterface._global_mapping["halved"] = halved
    llama = copy.deepcopy(llama)
    llama.model.layers[0].self_attn.q_proj.weight.data.mul_(100)
    found = run(llama, "halved", [DropHead(p=0.5)], batch("none"))
    assert found[3] == {"the host's"}
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.self_attn.*attention 'halved' that does more than its keywords tell"
    ):
        run(llama, "halved", [EntropyPenalty(strength=1.0)], batch("none"))


def test_a_function_that_is_set_after_the_first_step_is_compared_too(llama):
    def halved(module, query, key, value, attention_mask, **others):
        return backend_functions.user_function(module, query, key / 2, value, attention_mask, **others)

    AttentionInterface._global_mapping["halved"] = halved
    twin = copy.deepcopy(llama).train()
    twin.model.layers[0].self_attn.q_proj.weight.data.mul_(100)
    headwise.regularize(use(twin, "users_own"), EntropyPenalty(strength=1.0))
    twin(**batch("none"), use_cache=False)
    twin.set_attn_implementation("halved")
    with pytest.raises(RuntimeError, match=r"layers\.0\.self_attn.*'halved' that does more than its keywords tell"):
        twin(**batch("none"), use_cache=False)


def test_the_kernel_may_be_chosen_later(llama):
    twin = copy.deepcopy(llama).train()
    handle = headwise.regularize(twin, DropHead(p=0.5))
    use(twin, "flash_attention_2")
    twin(**batch(), use_cache=False)
    assert handle.fitted[0].kernels == {"the host's"}
    handle.remove()
    assert twin.model.layers[0].self_attn.config is twin.config
    headwise.regularize(use(twin, "sdpa"), DropColumn())
    use(twin, "flash_attention_2")
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.self_attn: DropColumn\(p=0.2\) edits the weights inside of 'flash_attention_2'"
    ):
        twin(**batch(), use_cache=False)


def test_a_paged_cache_is_refused_where_a_method_acts_and_left_alone_where_none_does(llama):
    twin = use(copy.deepcopy(llama), "flash_attention_2")
    handle = headwise.regularize(twin, GatedOutput())
    layer, q = twin.model.layers[0].self_attn, torch.randn(1, 4, 6, 8)
    with pytest.raises(
        RuntimeError, match=r"layers\.0\.self_attn attends over a paged cache.*without continuous batching"
    ):
        headwise.attend.hosts.transformers.call.routed(layer, q, q, q, None, cache=object())
    handle.remove()
    headwise.regularize(twin, DropHead(p=0.5))
    out, _ = headwise.attend.hosts.transformers.call.routed(layer.eval(), q, q[:, :2], q[:, :2], None, cache=object())
    assert out.shape == (1, 6, 4, 8)


def test_continuous_batching_generates_as_before_under_methods_of_training_and_refuses_what_acts(llama):
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 49}
    # By default the cache takes the memory that is there.
    pages = ContinuousBatchingConfig(page_size=32, num_blocks=8, max_batch_tokens=32)
    given = {"inputs": [[1, 2, 3, 4], [5, 6, 7]], "warmup": False, "continuous_batching_config": pages}
    written, told = [], []
    for method in (None, DropHead(p=0.5), GatedOutput(), ContraNorm(strength=1.0)):
        twin = copy.deepcopy(llama).eval()
        if method is not None:
            headwise.regularize(twin, method)
        batch = twin.generate_batch(**given, generation_config=GenerationConfig(**settings))
        written.append([one.generated_tokens for one in batch.values()])
        told.append({str(one.error) for one in batch.values()})
    assert written[1] == written[0] and all(len(one) == 3 for one in written[0])
    for errors in told[2:]:
        assert all("layers.0.self_attn attends over a paged cache ('sdpa')" in error for error in errors)


@pytest.mark.parametrize("name", ["headwise_mine", "eager_mine", "my flash", "a/b@v1:c", "mine|paged", "None", "Ünï"])
def test_a_users_function_is_kept_whatever_its_name(llama, monkeypatch, name):
    AttentionInterface._global_mapping[name] = backend_functions.user_function
    AttentionMaskInterface._global_mapping[name] = AttentionMaskInterface._global_mapping["users_own"]
    for method in (DropHead(p=0.5), EntropyPenalty(strength=1.0)):
        expected, found = (run(llama, kind, [method], batch()) for kind in ("sdpa", name))
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-4, atol=1e-5)
        assert found[3] == {"the host's"}


def test_a_users_function_gets_the_keywords_that_the_model_gives_those_that_are_none_included():
    given = []

    def asking(module, query, key, value, attention_mask, *, softcap, sliding_window, **others):
        given.append((softcap, sliding_window, sorted(others)))
        return backend_functions.user_function(module, query, key, value, attention_mask, others["scaling"])

    AttentionInterface._global_mapping["asking"] = asking
    AttentionMaskInterface._global_mapping["asking"] = AttentionMaskInterface._global_mapping["users_own"]
    # Gemma 2 gives its function a soft cap of None where the config has none.
    config = Gemma2Config(
        **SMALL, sliding_window=4, attn_logit_softcapping=None, query_pre_attn_scalar=8, pad_token_id=0
    )
    twin = use(Gemma2ForCausalLM(config).train(), "asking")
    plain = twin(**batch("none"), use_cache=False).logits
    asked, given[:] = given[:], []
    handle = headwise.regularize(twin, DropHead(p=0.0), EntropyPenalty(strength=1.0))
    torch.testing.assert_close(twin(**batch("none"), use_cache=False).logits, plain)
    assert {str(one) for one in given} == {str(one) for one in asked}
    assert handle.fitted[0].kernels == {"the host's"}


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_a_users_function_in_the_place_of_transformers_own_is_kept(llama, monkeypatch, name):
    called = []

    def halved(module, query, key, value, attention_mask, **others):
        called.append(module)
        return backend_functions.user_function(module, query, key / 2, value, attention_mask, **others)

    plain = run(llama, name, [GatedOutput()], batch("none"))
    AttentionInterface._global_mapping[name] = halved
    found = run(llama, name, [GatedOutput()], batch("none"))
    assert len(called) == 2 and found[3] == {"the host's"}
    assert not torch.equal(found[0], plain[0])
    with pytest.raises(ValueError, match=rf"DropColumn edits the weights inside of '{name}'.*attention=\"headwise\""):
        headwise.regularize(use(copy.deepcopy(llama), name), DropColumn())
    sharp = copy.deepcopy(llama)
    sharp.model.layers[0].self_attn.q_proj.weight.data.mul_(100)
    with pytest.raises(RuntimeError, match=rf"layers\.0\.self_attn.*attention '{name}' that does more than its"):
        run(sharp, name, [EntropyPenalty(strength=1.0)], batch("none"))


def test_generation_with_a_growing_cache_goes_on_by_the_kernel(llama):
    tokens = batch("none")["input_ids"]
    written = []
    for kind in ("sdpa", "flash_attention_2"):
        twin = use(copy.deepcopy(llama).eval(), kind)
        handle = headwise.regularize(twin, NeuTRENO(strength=0.6), GatedOutput())
        written.append(twin.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert handle.fitted[0].kernels == {"the host's"}
    assert torch.equal(*written)


def test_removal_leaves_the_host_as_it_was(llama):
    twin = use(copy.deepcopy(llama).eval(), "flash_attention_3")
    before = twin(**batch()).logits
    handle = headwise.regularize(twin, GatedOutput())
    assert not torch.equal(twin(**batch()).logits, before)
    handle.remove()
    assert torch.equal(twin(**batch()).logits, before)
    assert all(layer.self_attn.config is twin.config for layer in twin.model.layers)


@pytest.mark.grid
@pytest.mark.slow
def test_a_compiled_model_keeps_the_kernel_in_one_graph(llama):
    # In half precision, as such kernels ask for: transformers' own cast of fp32 breaks the graph with a warning.
    twin = use(copy.deepcopy(llama).train().bfloat16(), "flash_attention_2")
    handle = headwise.regularize(twin, DropHead(p=0.5), EntropyPenalty(strength=1.0))
    given = {"input_ids": batch("none")["input_ids"]}
    # The first call of a layer is compared with the kernel, which a graph cannot do.
    twin(**given, use_cache=False)
    handle.loss()
    other = copy.deepcopy(twin)
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given, use_cache=False).logits, twin(**given, use_cache=False).logits)
    torch.testing.assert_close(headwise.handle(other).loss(), handle.loss())


def test_a_host_whose_own_numbers_are_not_finite_is_not_said_to_do_more_than_it_is_told(llama):
    """In fp64, transformers' eager softmax in fp32 makes rows without keys nan, and with them all later layers."""
    padded = torch.ones(2, 6, dtype=torch.long)
    padded[0, :3] = 0
    inputs = {"input_ids": torch.randint(1, 9, (2, 6)), "attention_mask": padded}
    model = use(copy.deepcopy(llama), "eager").double()
    plain = model(**inputs).logits
    assert not plain.isfinite().all()
    headwise.regularize(model, headwise.GatedNorm(start="one"))
    torch.testing.assert_close(model(**inputs).logits, plain, equal_nan=True)
